"""More processes against one ledger, as far as the machine carries them."""

from __future__ import annotations

from bench.report import Plot, Report
from bench.scale import Scale
from bench.scenarios.end_to_end import flow
from bench.stand import Stand

WARM_SECONDS = 2.0


def run(stand: Stand, scale: Scale) -> Report:
    """The sustained flow with each number of API and worker processes."""
    report = Report("scaling", "Scaling: API and worker processes against one ledger, 1 kB, sustained")
    for api, workers in scale.processes:
        with stand.receiver() as receiver, stand.service(api=api, workers=workers) as service:
            destination = service.destination(receiver.url())
            flow(service, receiver, destination, WARM_SECONDS)
            told, bill = flow(service, receiver, destination, scale.scaling_seconds)
            figures = receiver.figures()
            count = told["accepted_count"]
            spent = bill.per(count)
        report.rows.append(
            {
                "API": api,
                "workers": workers,
                "deliveries/s": told["received_count"] / told["seconds"],
                "all CPU µs": bill.total_per(count),
                "API µs": spent["api"],
                "worker µs": spent["worker"],
                "Postgres µs": spent["postgres"],
                "Redis µs": spent["redis"],
            }
        )
        report.check(f"with {workers} worker(s) none was received twice", not figures["repeated_count"])
    report.notes.append("µs are CPU per delivery. Beyond the machine's cores more processes only share them.")
    best = max(report.rows, key=lambda row: float(row["deliveries/s"]))
    report.summary = f"most with {best['API']} API and {best['workers']} workers: {best['deliveries/s']:,.0f}/s"
    names = [f"{row['API']}+{row['workers']}" for row in report.rows]
    points = [(number, float(row["deliveries/s"])) for number, row in enumerate(report.rows)]
    report.plots.append(Plot("Sustained", "API + workers", "deliveries/s", {"": points}, names))
    return report
