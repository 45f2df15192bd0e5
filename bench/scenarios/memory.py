"""Memory: a worker full of slow attempts, an API under load, a dispatcher before a long queue."""

from __future__ import annotations

import time

from bench import meter
from bench.fill import insert_waiting
from bench.report import Plot, Report
from bench.scale import Scale
from bench.stand import Service, Stand, run_load

PAYLOAD_BYTES = 20_000
SLOW_MS = 8_000.0
LOAD_SECONDS = 3.0
PASSES_SECONDS = 5.0
WORKER_MB_MAX = 200


def run(stand: Stand, scale: Scale) -> Report:
    """Resident memory of each role at rest and at its worst."""
    report = Report("memory", "Memory of each role")
    environment = {"WORKER_SLOTS": str(scale.in_flight), "DATABASE_POOL_CONNECTIONS_MAX": "5"}
    with stand.receiver(SLOW_MS) as receiver, stand.service(environment=environment) as service:
        destination = service.destination(receiver.url())
        resting = {role: _now(service, role) for role in ("api", "worker")}
        told = run_load(
            service.plan([destination], connections=16, payload_bytes=PAYLOAD_BYTES, requests_count=scale.in_flight)
        )
        receiver.wait_for(told["accepted_count"], 60.0)
        [row] = service.query("SELECT count(*) AS count FROM deliveries WHERE state = 'delivering'")
        report.rows.append(
            _row(f"worker, {row['count']:,} attempts in flight, 20 kB", resting["worker"], service, "worker")
        )
        report.check(f"all {scale.in_flight:,} attempts were in flight at once", row["count"] == scale.in_flight)
        run_load(service.plan([destination], connections=64, payload_bytes=PAYLOAD_BYTES, seconds=LOAD_SECONDS))
        report.rows.append(_row("API, 64 connections, 20 kB", resting["api"], service, "api"))
    with stand.service(api=0, workers=0, dispatchers=1) as service:
        time.sleep(1.0)
        resting_mb = _now(service, "dispatcher")
        insert_waiting(service, scale.waiting_rows)
        time.sleep(PASSES_SECONDS)
        report.rows.append(_row(f"dispatcher, {scale.waiting_rows:,} waiting", resting_mb, service, "dispatcher"))
    worker_mb = float(report.rows[0]["peak MB"])
    report.check(f"the worker's peak of {worker_mb:.0f} MB is below {WORKER_MB_MAX} MB", worker_mb < WORKER_MB_MAX)
    report.notes.append("Resident memory in MB of 10^6 bytes; a third of it is code that processes share.")
    report.summary = f"a worker with {scale.in_flight:,} attempts in flight takes {worker_mb:.0f} MB"
    names = [str(row["role"]).partition(",")[0] for row in report.rows]
    series = {
        kind: [(number, float(row[f"{kind} MB"])) for number, row in enumerate(report.rows)]
        for kind in ("resting", "peak")
    }
    report.plots.append(Plot("Resident memory", "", "MB", series, names))
    return report


def _now(service: Service, role: str) -> float:
    [pid] = service.pids(role)
    return meter.memory_mb(pid)


def _row(name: str, resting_mb: float, service: Service, role: str) -> dict[str, str | float | int]:
    [pid] = service.pids(role)
    return {"role": name, "resting MB": resting_mb, "peak MB": meter.memory_mb(pid, "VmHWM")}
