"""Rows that a year of use would have left, written by COPY past the API."""

from __future__ import annotations

import asyncio
import datetime as dt
import io
import time
from typing import Final

import asyncpg

from bench.stand import Service
from service.domain.ids import Prefix, parse_typeid
from service.ledger import partitions

WEEKS: Final = 8
DEAD_EVERY: Final = 100
_CHUNK_ROWS: Final = 50_000
_TYPES: Final = ("order.created", "order.paid", "order.shipped", "order.returned")
_BODY: Final = b'{"order":"A-1001","total":"129.90","lines":[{"sku":"S-1","count":2},{"sku":"S-2","count":1}]}'

_COLUMNS: Final = {
    "idempotency_keys": "tenant key fingerprint destination_id event_id expires_at",
    "delivery_identities": "destination_id event_id delivery_id payload_sha256",
    "payloads": "delivery_id destination_id tenant event_id event_type content_type body_sha256 body",
    "deliveries": "id destination_id created_at next_attempt_at deadline_at claimed_at completed_at attempt_count "
    "attempts_max last_status_code state tenant last_outcome dead_reason worker",
    "attempts": "delivery_id number status_code latency_ms scheduled_at started_at completed_at trigger outcome phase "
    "worker response_excerpt",
}


def insert_finished(service: Service, destination_text: str, rows_count: int) -> float:
    """Finished deliveries with all that belongs to them, oldest first, over eight weeks; the seconds it took."""
    if not rows_count:
        return 0.0
    destination_id = parse_typeid(Prefix.DESTINATION, destination_text)
    assert destination_id is not None
    started = time.monotonic()
    asyncio.run(_copy(service.database_url, str(destination_id), rows_count))
    return time.monotonic() - started


async def _copy(url: str, destination_id: str, rows_count: int) -> None:
    connection = await asyncpg.connect(url)
    try:
        await _make_weeks(connection)
        end = dt.datetime.now(dt.UTC) - dt.timedelta(hours=1)
        step = dt.timedelta(weeks=WEEKS) / rows_count
        for first in range(0, rows_count, _CHUNK_ROWS):
            numbers = range(first, min(first + _CHUNK_ROWS, rows_count))
            for table, lines in _lines(numbers, end - dt.timedelta(weeks=WEEKS), step, destination_id).items():
                source = io.BytesIO("".join(lines).encode())
                await connection.copy_to_table(table, source=source, columns=_COLUMNS[table].split(), timeout=600.0)
        for table in _COLUMNS:
            await connection.execute(f"VACUUM (ANALYZE) {table}", timeout=1_200.0)
    finally:
        await connection.close()


async def _make_weeks(connection: asyncpg.Connection[asyncpg.Record]) -> None:
    for week in partitions.weeks(dt.datetime.now(dt.UTC), back=WEEKS, ahead=0):
        for table in partitions.PARTITIONED:
            if await connection.fetchval("SELECT to_regclass($1)", f"{table}_{week.suffix}") is None:
                for statement in partitions.statements(table, week):
                    await connection.execute(statement)


def _lines(numbers: range, begin: dt.datetime, step: dt.timedelta, destination_id: str) -> dict[str, list[str]]:
    """The rows of each table, in COPY's text format."""
    lines: dict[str, list[str]] = {table: [] for table in _COLUMNS}
    sha = "\\\\x" + "ab" * 32
    body = "\\\\x" + _BODY.hex()
    for number in numbers:
        at = begin + number * step
        created = at.isoformat()
        ended = (at + dt.timedelta(milliseconds=40)).isoformat()
        hexed = f"{int(at.timestamp() * 1_000):012x}7{number & 0xFFF:03x}8{number:015x}"
        delivery_id = f"{hexed[:8]}-{hexed[8:12]}-{hexed[12:16]}-{hexed[16:20]}-{hexed[20:]}"
        event = f"old-{number:012}"
        dead = number % DEAD_EVERY == 0
        state, outcome, status, reason = (
            ("dead", "rejected", 400, "rejected") if dead else ("delivered", "success", 200, "\\N")
        )
        deadline = (at + dt.timedelta(days=3)).isoformat()
        lines["idempotency_keys"].append(f"default\t{event}\t{sha}\t{destination_id}\t{event}\t{deadline}\n")
        lines["delivery_identities"].append(f"{destination_id}\t{event}\t{delivery_id}\t{sha}\n")
        lines["payloads"].append(
            f"{delivery_id}\t{destination_id}\tdefault\t{event}\t{_TYPES[number & 3]}\tapplication/json\t{sha}"
            f"\t{body}\n"
        )
        lines["deliveries"].append(
            f"{delivery_id}\t{destination_id}\t{created}\t{created}\t{deadline}\t{created}\t{ended}\t1\t18\t{status}"
            f"\t{state}\tdefault\t{outcome}\t{reason}\tbench\n"
        )
        lines["attempts"].append(
            f"{delivery_id}\t1\t{status}\t12\t{created}\t{created}\t{ended}\tschedule\t{outcome}\tresponded\tbench\t{body}\n"
        )
    return lines


def insert_waiting(service: Service, rows_count: int) -> None:
    """Deliveries that are due, as the dispatcher sees them: without payloads, for nobody to send."""
    service.query(
        """
        INSERT INTO destinations (id, tenant, name, url, timeout_seconds, attempts_max, deadline_seconds, base_seconds,
                                  cap_seconds, on_ambiguous)
        VALUES ('00000000-0000-7000-8000-000000000001', 'default', 'bench', 'http://127.0.0.1:9/', 15, 18, 259200, 5,
                86400, 'retry')
        """
    )
    service.query(
        """
        INSERT INTO deliveries (id, destination_id, tenant, state, next_attempt_at, deadline_at, wake_at, attempts_max)
        SELECT CAST(lpad(to_hex(CAST(extract(epoch FROM now()) * 1000 AS bigint)), 12, '0') || '7abc8'
                    || lpad(to_hex(number), 15, '0') AS uuid),
            '00000000-0000-7000-8000-000000000001', 'default', 'pending', now(), now() + interval '1 day', now(), 18
        FROM generate_series(1, $1::int) AS number
        """,
        rows_count,
    )
