"""Accept alone, closed loop: how many single requests one API process commits, and at what cost."""

from __future__ import annotations

from bench import wrk
from bench.report import Plot, Report
from bench.scale import Scale
from bench.stand import Stand, run_load


def run(stand: Stand, scale: Scale) -> Report:
    """Each number of connections with each payload, without workers beside it."""
    report = Report("accept", "Accept: single requests, closed loop, one API process")
    costs: dict[int, dict[int, float]] = {}
    latencies: dict[str, list[tuple[float, float]]] = {}
    with stand.receiver() as receiver, stand.service(workers=0, dispatchers=0) as service:
        destination = service.destination(receiver.url())
        run_load(service.plan([destination], connections=8, seconds=1.0))  # what is slow only the first time
        for payload_bytes in scale.payloads_bytes:
            for connections in scale.connections:
                plan = service.plan(
                    [destination],
                    connections=connections,
                    payload_bytes=payload_bytes,
                    seconds=scale.accept_seconds,
                )
                before = service.bill()
                told = wrk.run(plan) if wrk.is_there() else run_load(plan)
                count = told["accepted_count"]
                spent = service.bill_since(before).per(count)
                costs.setdefault(payload_bytes, {})[connections] = spent["api"]
                rate = count / told["seconds"]
                latencies.setdefault(f"{payload_bytes // 1_000} kB", []).append((connections, rate))
                report.rows.append(
                    {
                        "payload": f"{payload_bytes // 1_000} kB",
                        "connections": connections,
                        "accepted/s": rate,
                        "p50 ms": told["latency_ms"]["p50"],
                        "p99 ms": told["latency_ms"]["p99"],
                        "API µs": spent["api"],
                        "Postgres µs": spent["postgres"],
                        "Redis µs": spent["redis"],
                        "load µs": told["cpu_seconds"] / count * 1e6,
                    }
                )
    report.notes.append(f"The load is {'wrk' if wrk.is_there() else 'the built-in generator'}. µs are CPU per accept.")
    few, many = min(scale.connections), max(scale.connections)
    for payload_bytes, cost in costs.items():
        report.check(
            f"an accept of {payload_bytes:,} B costs the API less at {many} connections ({cost[many]:.0f} µs) "
            f"than at {few} ({cost[few]:.0f} µs): they share commits",
            cost[many] < cost[few],
        )
    best = max(report.rows, key=lambda row: float(row["accepted/s"]))
    report.summary = f"accepts {best['accepted/s']:,.0f}/s at {best['API µs']:.0f} µs of API CPU"
    report.plots.append(Plot("Accepted per second", "connections", "accepts/s", latencies))
    return report
