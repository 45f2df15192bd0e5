"""From end to end: how many deliveries a second are accepted, attempted and settled, all roles on one machine."""

from __future__ import annotations

import threading
import time
from typing import Any

from bench.report import Plot, Report
from bench.scale import Scale
from bench.stand import Bill, Receiver, Service, Stand, run_load, run_loads, split

CONNECTIONS = 64
WINDOW = 1_000  # accepted and not received: the backlog is flat, whatever the load could do
WARM_SECONDS = 3.0
SETTLE_SECONDS = 30.0


def run(stand: Stand, scale: Scale) -> Report:
    """One receiver that answers after 1 ms; singles of 1 kB."""
    report = Report("end_to_end", "End to end, sustained: 1 kB, one receiver that answers after 1 ms")
    with stand.receiver() as receiver, stand.service() as service:
        destination = service.destination(receiver.url())
        flow(service, receiver, destination, WARM_SECONDS)
        watching = _Watch(receiver)
        told, bill = flow(service, receiver, destination, scale.end_to_end_seconds)
        rates = watching.stop()
        figures = receiver.figures()
        [row] = service.query(
            "SELECT count(*) FILTER (WHERE state = 'delivered') AS delivered, count(*) AS count FROM deliveries"
        )
    count = told["accepted_count"]
    rate, spent = told["received_count"] / told["seconds"], bill.per(count)
    report.rows.append(
        {
            "deliveries/s": rate,
            "all CPU µs": bill.total_per(count),
            **{f"{role} µs": spent[role] for role in spent},
            "load µs": told["cpu_seconds"] / count * 1e6,
            "receiver µs": figures["cpu_seconds"] / count * 1e6,
            "accept p50 ms": told["latency_ms"]["p50"],
            "accept p99 ms": told["latency_ms"]["p99"],
            "to receiver p50 ms": figures["latency_ms"]["p50"],
            "to receiver p99 ms": figures["latency_ms"]["p99"],
        }
    )
    report.notes += [
        (
            f"{CONNECTIONS} connections; a request is sent when fewer than {WINDOW:,} accepted deliveries are still to "
            "be received, so the backlog is flat and latencies are those of a full machine."
        ),
        "µs are CPU per delivery; `all CPU` is everything but the load and the receiver.",
    ]
    report.check(
        f"of {count:,} accepted all were received, and none twice ({figures['repeated_count']})",
        figures["distinct_count"] == count and not figures["repeated_count"],
    )
    report.check("all of them are delivered in the ledger", row["delivered"] == row["count"])
    report.summary = f"{rate:,.0f} deliveries/s end to end at {bill.total_per(count):.0f} µs of all CPU"
    names = list(spent)
    report.plots += [
        Plot("Received per second", "s", "deliveries/s", {"received": rates}),
        Plot("CPU per delivery", "", "µs", {"": [(n, spent[role]) for n, role in enumerate(names)]}, names),
    ]
    return report


def flow(
    service: Service, receiver: Receiver, destination: str, seconds: float, *, loads: int = 1, window: int = WINDOW
) -> tuple[dict[str, Any], Bill]:
    """Sustain as much as flows for so long; what the loads tell together, and what it cost."""
    receiver.reset()
    before = service.bill()
    plan = service.plan(
        [destination],
        connections=CONNECTIONS // loads,
        seconds=seconds,
        window_count=window // loads,
        counter_file=str(receiver.counter_file),
    )
    if loads == 1:
        told = run_load(plan)
    else:
        # Each load sees what all have received, so each window is the whole one's share of what it sent itself.
        parts = run_loads(split(plan, loads))
        told = {
            **parts[0],
            "accepted_count": sum(part["accepted_count"] for part in parts),
            "received_count": max(part["received_count"] for part in parts),
            "seconds": max(part["seconds"] for part in parts),
            "cpu_seconds": sum(part["cpu_seconds"] for part in parts),
        }
    receiver.wait_for(told["accepted_count"], SETTLE_SECONDS)
    return told, service.bill_since(before)


class _Watch:
    """Notes each second how many have been received."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._ended = threading.Event()
        self._rates: list[tuple[float, float]] = []
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> list[tuple[float, float]]:
        """The rate of each second."""
        self._ended.set()
        self._thread.join()
        return self._rates

    def _watch(self) -> None:
        started = before = time.monotonic()
        count = self._receiver.received_count
        while not self._ended.wait(1.0):
            now, current = time.monotonic(), self._receiver.received_count
            if current >= count:  # not where a new run began
                self._rates.append((now - started, (current - count) / (now - before)))
            before, count = now, current
