"""The three logs of a run, brought into the history checker's words."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import asyncpg

from service.domain import signing
from service.domain.ids import Prefix, to_typeid
from tests.faults.receiver import Request
from tests.faults.records import Arrival, Attempt, Delivery

_DELIVERIES = """
SELECT d.*, p.event_id, encode(p.body_sha256, 'hex') AS sha256, t.base_seconds, t.cap_seconds, t.schedule_seconds
FROM deliveries d JOIN payloads p ON p.delivery_id = d.id JOIN destinations t ON t.id = d.destination_id
ORDER BY d.id
"""
_ATTEMPTS = "SELECT * FROM attempts ORDER BY delivery_id, number"


async def read_ledger(connection: asyncpg.Connection[asyncpg.Record]) -> tuple[tuple[Delivery, ...], dt.datetime]:
    """Every delivery with its attempts as of one instant, and the instant."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        read_at: dt.datetime = await connection.fetchval("SELECT clock_timestamp()")
        rows = await connection.fetch(_DELIVERIES)
        attempts: defaultdict[Any, list[Attempt]] = defaultdict(list)
        for row in await connection.fetch(_ATTEMPTS):
            attempts[row["delivery_id"]].append(_attempt(row))
    return tuple(_delivery(row, attempts[row["id"]]) for row in rows), read_at


def _delivery(row: asyncpg.Record, attempts: list[Attempt]) -> Delivery:
    return Delivery(
        id=to_typeid(Prefix.DELIVERY, row["id"]),
        tenant=row["tenant"],
        destination_id=to_typeid(Prefix.DESTINATION, row["destination_id"]),
        event_id=row["event_id"],
        body_sha256=row["sha256"],
        state=row["state"],
        attempt_count=row["attempt_count"],
        redrive_count=row["redrive_count"],
        created_at=row["created_at"],
        next_attempt_at=row["next_attempt_at"],
        deadline_at=row["deadline_at"],
        completed_at=row["completed_at"],
        # A schedule of its own is not judged by doubling.
        base_seconds=0.0 if row["schedule_seconds"] else row["base_seconds"],
        cap_seconds=row["cap_seconds"],
        dead_reason=row["dead_reason"],
        next_trigger=row["next_trigger"],
        uncharged_count=row["uncharged_count"],
        attempts=tuple(attempts),
    )


def _attempt(row: asyncpg.Record) -> Attempt:
    late = json.loads(row["late_result"]) if row["late_result"] else {}
    return Attempt(
        number=row["number"],
        scheduled_at=row["scheduled_at"],
        started_at=row["started_at"],
        completed_at=row["completed_at"],
        trigger=row["trigger"],
        outcome=row["outcome"],
        status_code=row["status_code"],
        late_outcome=late.get("outcome"),
    )


def read_arrivals(requests: Iterable[Request], secrets: Mapping[str, str]) -> tuple[Arrival, ...]:
    """The receiver's log; `secrets` holds each path's signing secret."""
    keys = {path: signing.parse_secret(secret) for path, secret in secrets.items()}
    return tuple(_arrival(request, keys.get(request.path)) for request in requests)


def _arrival(request: Request, key: bytes | None) -> Arrival:
    headers = request.headers
    timestamp = headers["webhook-timestamp"]
    verdict = signing.verify(
        request.webhook_id,
        timestamp,
        headers["webhook-signature"],
        request.body,
        keys=[key] if key is not None else [],
        now_unix_seconds=request.at.timestamp(),
    )
    return Arrival(
        delivery_id=request.webhook_id,
        attempt=request.attempt,
        event_id=headers["hookledger-event-id"],
        at=request.at,
        body_sha256=hashlib.sha256(request.body).hexdigest(),
        signed=verdict is signing.Verdict.VALID and headers["idempotency-key"] == request.webhook_id,
        timestamp=int(timestamp),
        answered=request.answered,
        retry_after_seconds=float(request.reply.retry_after_seconds or 0),
        witnessed=request.witnessed,
    )
