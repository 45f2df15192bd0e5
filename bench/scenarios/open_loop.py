"""Open loop: how long an accept takes, and how long until the receiver has it, at rates the machine carries easily."""

from __future__ import annotations

import time

from bench import meter
from bench.report import Plot, Report
from bench.scale import Scale
from bench.stand import Stand, run_load

CONNECTIONS = 64
POLL_MS = 500.0  # a worker's fallback: with the doorbell nobody waits for it


def run(stand: Stand, scale: Scale) -> Report:
    """Each rate for a while, arrivals drawn beforehand; then nothing at all."""
    report = Report("open_loop", "Open loop: latency from the moment a request was due, 1 kB")
    accepts: dict[str, list[tuple[float, float]]] = {}
    arrivals: dict[str, list[tuple[float, float]]] = {}
    with stand.receiver() as receiver, stand.service() as service:
        destination = service.destination(receiver.url())
        run_load(service.plan([destination], connections=CONNECTIONS, seconds=2.0, rate_per_second=300))
        for rate in scale.rates_per_second:
            time.sleep(1.0)
            receiver.reset()
            before = service.bill()
            told = run_load(
                service.plan(
                    [destination], connections=CONNECTIONS, seconds=scale.open_loop_seconds, rate_per_second=rate
                )
            )
            count = told["accepted_count"]
            receiver.wait_for(count, 30.0)
            bill, figures = service.bill_since(before), receiver.figures()
            accept, arrival = told["latency_ms"], figures["latency_ms"]
            report.rows.append(
                {
                    "due/s": rate,
                    "accept p50 ms": accept["p50"],
                    "accept p99 ms": accept["p99"],
                    "accept p99.9 ms": accept["p99.9"],
                    "to receiver p50 ms": arrival["p50"],
                    "to receiver p99 ms": arrival["p99"],
                    "to receiver p99.9 ms": arrival["p99.9"],
                    "all CPU µs": bill.total_per(count),
                }
            )
            accepts[f"{rate}/s"] = _curve(told["curve_ms"])
            arrivals[f"{rate}/s"] = _curve(figures["curve_ms"])
            report.check(
                f"at {rate}/s half the deliveries are received before any poll: the doorbell rings",
                arrival["p50"] < POLL_MS / 2,
            )
        time.sleep(1.0)
        idle = {role: meter.cpu_seconds(service.pids(role)) for role in ("api", "worker", "dispatcher")}
        time.sleep(scale.idle_seconds)
        shares = {
            role: (meter.cpu_seconds(service.pids(role)) - spent) / scale.idle_seconds for role, spent in idle.items()
        }
    report.notes += [
        (
            "Arrivals are a Poisson process; a latency counts from when the request was due, so a stall is charged "
            "to all that came due meanwhile. `to receiver` ends when the receiver has read the request."
        ),
        "Idle: " + ", ".join(f"the {role} uses {share:.1%} of a core" for role, share in shares.items()) + ".",
    ]
    first = report.rows[min(1, len(report.rows) - 1)]
    report.summary = (
        f"at {first['due/s']}/s p50 {first['to receiver p50 ms']:.1f} ms and p99 {first['to receiver p99 ms']:.1f} ms "
        "from due to received"
    )
    report.plots += [
        Plot("Accept", "per cent of requests", "ms", accepts, log_y=True),
        Plot("Due to received", "per cent of deliveries", "ms", arrivals, log_y=True),
    ]
    return report


def _curve(curve: dict[str, float]) -> list[tuple[float, float]]:
    return [(float(share.removeprefix("p")), value) for share, value in curve.items()]
