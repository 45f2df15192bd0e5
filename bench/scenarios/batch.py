"""POST /deliveries/batch: what a delivery costs when it comes with others."""

from __future__ import annotations

from bench.report import Plot, Report
from bench.scale import Scale
from bench.stand import Stand, run_load

CONNECTIONS = 4
DELIVERIES_MAX = 200_000  # so that the disk is not what is measured


def run(stand: Stand, scale: Scale) -> Report:
    """Batches of each size beside single requests, on one ledger."""
    report = Report("batch", "Batch accept, closed loop, one API process, 1 kB")
    costs: dict[int, float] = {}
    with stand.receiver() as receiver, stand.service(workers=0, dispatchers=0) as service:
        destination = service.destination(receiver.url())
        run_load(service.plan([destination], connections=8, seconds=1.0))
        for batch_count in (1, *scale.batches):
            connections = 64 if batch_count == 1 else CONNECTIONS
            before = service.bill()
            told = run_load(
                service.plan(
                    [destination],
                    connections=connections,
                    batch_count=batch_count,
                    seconds=scale.accept_seconds,
                    requests_count=DELIVERIES_MAX // batch_count,
                )
            )
            count = told["accepted_count"]
            bill = service.bill_since(before)
            spent = bill.per(count)
            costs[batch_count] = bill.total_per(count)
            report.rows.append(
                {
                    "in one request": batch_count,
                    "connections": connections,
                    "deliveries/s": count / told["seconds"],
                    "request p50 ms": told["latency_ms"]["p50"],
                    "request p99 ms": told["latency_ms"]["p99"],
                    "API µs": spent["api"],
                    "Postgres µs": spent["postgres"],
                    "Redis µs": spent["redis"],
                }
            )
        [row] = service.query("SELECT count(*) AS count FROM deliveries")
        [claimed] = service.query("SELECT count(*) AS count FROM idempotency_keys")
        report.check("every key that was answered stands for a delivery", row["count"] == claimed["count"])
    for batch_count in scale.batches:
        report.check(
            f"a delivery in a batch of {batch_count} costs {costs[batch_count]:.0f} µs of all CPU, "
            f"less than one by itself ({costs[1]:.0f} µs)",
            costs[batch_count] * scale.leniency < costs[1],
        )
    report.notes.append("µs are CPU per delivery.")
    first = report.rows[1]
    report.summary = f"{first['deliveries/s']:,.0f}/s in batches of {first['in one request']}"
    names = [str(row["in one request"]) for row in report.rows]
    by_role = {
        role: [(number, float(row[f"{role} µs"])) for number, row in enumerate(report.rows)]
        for role in ("API", "Postgres", "Redis")
    }
    report.plots.append(Plot("CPU per accepted delivery", "deliveries in one request", "µs", by_role, names))
    return report
