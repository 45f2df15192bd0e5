"""The drain of a backlog: nobody worked while it was accepted, then a worker comes."""

from __future__ import annotations

import time

from bench.report import Plot, Report
from bench.scale import Scale
from bench.stand import Bill, Receiver, Service, Stand, run_load

BATCH = 100
CONNECTIONS = 4
SHARE_MIN = 0.9  # of the small backlog's rate
PATIENCE_SECONDS = 300.0


def run(stand: Stand, scale: Scale) -> Report:
    """Each backlog on a ledger of its own."""
    report = Report("drain", "Drain of a backlog: one worker, 1 kB, one receiver that answers after 1 ms")
    rates: list[float] = []
    for backlog in scale.backlogs:
        with stand.receiver() as receiver, stand.service(workers=0, dispatchers=0) as service:
            fill(service, receiver, backlog)
            rate, bill = drain(service, receiver, backlog)
            spent, figures = bill.per(backlog), receiver.figures()
        rates.append(rate)
        report.rows.append(
            {
                "backlog": backlog,
                "delivered/s": rate,
                "worker µs": spent["worker"],
                "Postgres µs": spent["postgres"],
                "Redis µs": spent["redis"],
            }
        )
        report.check(f"of {backlog:,} none was received twice", not figures["repeated_count"])
    small, large = scale.backlogs[0], scale.backlogs[-1]
    report.check(
        f"the backlog of {large:,} drains at {rates[-1] / rates[0]:.0%} of the rate of {small:,}",
        rates[-1] >= SHARE_MIN * scale.leniency * rates[0],
    )
    report.notes.append("The rate counts from the first delivery received to the last. µs are CPU per delivery.")
    report.summary = f"a backlog of {large:,} drains at {rates[-1]:,.0f}/s"
    names = [f"{backlog:,}" for backlog in scale.backlogs]
    report.plots.append(Plot("Drain", "backlog", "delivered/s", {"": list(enumerate(rates))}, names))
    return report


def fill(service: Service, receiver: Receiver, backlog: int) -> None:
    """Accept so many."""
    destination = service.destination(receiver.url())
    told = run_load(
        service.plan([destination], connections=CONNECTIONS, batch_count=BATCH, requests_count=backlog // BATCH)
    )
    assert told["accepted_count"] == backlog


def drain(service: Service, receiver: Receiver, backlog: int) -> tuple[float, Bill]:
    """Start a worker and a dispatcher; the rate from the first delivery to the last, and what it cost."""
    before = service.bill()
    service.start(workers=1, dispatchers=1)
    receiver.wait_for(1, PATIENCE_SECONDS)
    started, already = time.monotonic(), receiver.received_count
    receiver.wait_for(backlog, PATIENCE_SECONDS)
    return (backlog - already) / (time.monotonic() - started), service.bill_since(before)
