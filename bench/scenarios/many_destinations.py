"""Many destinations, one delivery each, against one destination with as many deliveries."""

from __future__ import annotations

from bench.report import Plot, Report
from bench.scale import Scale
from bench.scenarios.drain import drain
from bench.stand import Stand, run_load

BATCH = 100
SHARE_MIN = 0.6  # of one destination's rate


def run(stand: Stand, scale: Scale) -> Report:
    """A backlog of one delivery for each destination, drained; then the same number for one."""
    count = scale.destinations
    report = Report("many_destinations", f"{count:,} destinations, one delivery each, against one destination")
    rates: dict[int, float] = {}
    for destinations_count in (1, count):
        with stand.receiver() as receiver, stand.service(workers=0, dispatchers=0) as service:
            ids = service.destinations([receiver.url(f"hooks/{number}") for number in range(destinations_count)])
            told = run_load(service.plan(ids, connections=4, batch_count=BATCH, requests_count=count // BATCH))
            rate, bill = drain(service, receiver, told["accepted_count"])
            spent, figures = bill.per(count), receiver.figures()
        rates[destinations_count] = rate
        report.rows.append(
            {
                "destinations": destinations_count,
                "delivered/s": rate,
                "worker µs": spent["worker"],
                "Postgres µs": spent["postgres"],
                "receiver µs": figures["cpu_seconds"] / count * 1e6,
            }
        )
        report.check("none was received twice", not figures["repeated_count"])
    share = rates[count] / rates[1]
    report.check(
        f"{count:,} destinations are served at {share:.0%} of the rate of one", share >= SHARE_MIN * scale.leniency
    )
    report.notes.append(
        "Each destination has a secret and a connection of its own: with one delivery each nothing is kept alive for "
        "another. µs are CPU per delivery."
    )
    report.summary = f"{count:,} destinations at {share:.0%} of the rate of one"
    names = [f"{number:,}" for number in rates]
    report.plots.append(Plot("Rate", "destinations", "delivered/s", {"": list(enumerate(rates.values()))}, names))
    return report
