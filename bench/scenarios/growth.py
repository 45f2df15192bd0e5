"""Growth: the same flow, and an operator's reads, on a ledger that holds millions of finished deliveries."""

from __future__ import annotations

import contextlib
import statistics
import time
from dataclasses import dataclass, field
from typing import Any, Final

from bench.fill import insert_finished
from bench.report import Plot, Report
from bench.scale import Scale
from bench.scenarios.end_to_end import flow
from bench.stand import Receiver, Service, Stand

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
_TURNS: Final = 4  # of each ledger, one after the other and back: the machine itself changes its speed meanwhile
_WARM_SECONDS: Final = 2.0


@dataclass(slots=True)
class _Ledger:
    """One of the ledgers that are compared, and what flowed over it."""

    rows_count: int
    service: Service
    destination: str
    filled_seconds: float
    received_count: int = 0
    accepted_count: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    postgres_seconds: float = 0.0
    reads: dict[str, float] = field(default_factory=dict)

    def flow(self, receiver: Receiver, seconds: float) -> None:
        """Let it flow for so long, once warm."""
        flow(self.service, receiver, self.destination, _WARM_SECONDS)
        told, bill = flow(self.service, receiver, self.destination, seconds)
        self.received_count += told["received_count"]
        self.accepted_count += told["accepted_count"]
        self.seconds += told["seconds"]
        self.cpu_seconds += sum(bill.seconds.values())
        self.postgres_seconds += bill.seconds["postgres"]

    def read(self) -> None:
        """Time an operator's reads."""
        self.reads = {name: _read_ms(self.service, path) for name, path in READS.items()}
        self.reads["one delivery"] = _read_ms(self.service, f"/deliveries/{_some_id(self.service)}")

    @property
    def rate(self) -> float:
        """Deliveries per second."""
        return self.received_count / self.seconds

    def row(self) -> dict[str, Any]:
        """Its line in the table."""
        return {
            "finished": self.rows_count,
            "deliveries/s": self.rate,
            "all CPU µs": self.cpu_seconds / self.accepted_count * 1e6,
            "Postgres µs": self.postgres_seconds / self.accepted_count * 1e6,
            **{f"{name} ms": value for name, value in self.reads.items()},
            "filled in s": self.filled_seconds,
        }


def run(stand: Stand, scale: Scale) -> Report:
    """Each number of finished rows on a ledger of its own, filled beforehand; then they take turns."""
    report = Report("growth", "Growth: sustained flow and operators' reads over finished deliveries, 1 kB")
    with contextlib.ExitStack() as stack:
        receiver = stack.enter_context(stand.receiver())
        ledgers = [_filled(stack.enter_context(stand.service()), receiver, count) for count in scale.finished_rows]
        for turn in range(_TURNS):
            for ledger in ledgers if turn % 2 == 0 else reversed(ledgers):
                ledger.service.start(api=1, workers=1, dispatchers=1)
                ledger.flow(receiver, scale.growth_seconds / _TURNS)
                if turn == _TURNS - 1:
                    ledger.read()
                ledger.service.stop()
    report.rows += [ledger.row() for ledger in ledgers]
    rates = [ledger.rate for ledger in ledgers]
    slowest = max(value for ledger in ledgers for value in ledger.reads.values())
    if len(rates) > 1:
        report.check(
            f"over {scale.finished_rows[-1]:,} rows the rate is {rates[-1] / rates[0]:.0%} of an empty ledger's",
            rates[-1] >= SHARE_MIN * scale.leniency * rates[0],
        )
    report.check(f"every read takes less than {READ_MS_MAX:g} ms ({slowest:.0f} ms)", slowest < READ_MS_MAX)
    report.notes.append(
        "The rows are copied in, spread over eight weeks of partitions, one in a hundred dead; reads are medians "
        f"of {_TIMES}, over HTTP. The ledgers take turns, {_TURNS} each."
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


def _filled(service: Service, receiver: Receiver, rows_count: int) -> _Ledger:
    destination = service.destination(receiver.url())
    filled_seconds = insert_finished(service, destination, rows_count)
    service.stop()
    return _Ledger(rows_count, service, destination, filled_seconds)


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
