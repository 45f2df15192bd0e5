"""Growth: the same flow, and an operator's reads, on a ledger that holds millions of finished deliveries."""

from __future__ import annotations

import statistics
import time
from typing import Final

from bench.fill import insert_finished
from bench.report import Plot, Report
from bench.scale import Scale
from bench.scenarios.end_to_end import flow
from bench.stand import Service, Stand

SHARE_MIN: Final = 0.95
READ_MS_MAX: Final = 200.0
READS: Final = {
    "list": "/deliveries?limit=50",
    "list dead": "/deliveries?state=dead&limit=50",
    "list of an event type": "/deliveries?event_type=order.paid&limit=50",
    "DLQ": "/dlq?limit=50",
    "DLQ summary": "/dlq/summary",
    "stats": "/stats",
}
_TIMES: Final = 10


def run(stand: Stand, scale: Scale) -> Report:
    """Each number of finished rows on a ledger of its own, filled beforehand."""
    report = Report("growth", "Growth: sustained flow and operators' reads over finished deliveries, 1 kB")
    rates: list[float] = []
    slowest = 0.0
    for rows_count in scale.finished_rows:
        with stand.receiver() as receiver, stand.service() as service:
            destination = service.destination(receiver.url())
            filled_seconds = insert_finished(service, destination, rows_count)
            flow(service, receiver, destination, 2.0)
            told, bill = flow(service, receiver, destination, scale.growth_seconds)
            count = told["accepted_count"]
            reads = {name: _read_ms(service, path) for name, path in READS.items()}
            reads["one delivery"] = _read_ms(service, f"/deliveries/{_some_id(service)}")
            slowest = max(slowest, *reads.values())
            rates.append(told["received_count"] / told["seconds"])
            report.rows.append(
                {
                    "finished": rows_count,
                    "deliveries/s": rates[-1],
                    "all CPU µs": bill.total_per(count),
                    "Postgres µs": bill.per(count)["postgres"],
                    **{f"{name} ms": value for name, value in reads.items()},
                    "filled in s": filled_seconds,
                }
            )
    if len(rates) > 1:
        report.check(
            f"over {scale.finished_rows[-1]:,} rows the rate is {rates[-1] / rates[0]:.0%} of an empty ledger's",
            rates[-1] >= SHARE_MIN * scale.leniency * rates[0],
        )
    report.check(f"every read takes less than {READ_MS_MAX:g} ms ({slowest:.0f} ms)", slowest < READ_MS_MAX)
    report.notes.append(
        "The rows are copied in, spread over eight weeks of partitions, one in a hundred dead; reads are medians "
        f"of {_TIMES}, over HTTP."
    )
    report.summary = f"{rates[-1]:,.0f}/s over {scale.finished_rows[-1]:,} finished rows"
    names = [f"{rows_count:,}" for rows_count in scale.finished_rows]
    report.plots += [
        Plot("Sustained", "finished deliveries", "deliveries/s", {"": list(enumerate(rates))}, names),
        Plot(
            "Reads",
            "finished deliveries",
            "ms",
            {
                name: [(number, float(row[f"{name} ms"])) for number, row in enumerate(report.rows)]
                for name in [*READS, "one delivery"]
            },
            names,
        ),
    ]
    return report


def _read_ms(service: Service, path: str) -> float:
    taken: list[float] = []
    for _ in range(_TIMES):
        started = time.perf_counter()
        service.client.get(path).raise_for_status()
        taken.append((time.perf_counter() - started) * 1_000)
    return statistics.median(taken)


def _some_id(service: Service) -> str:
    listed = service.client.get("/deliveries?limit=1").raise_for_status().json()
    text: str = listed["items"][0]["id"]
    return text
