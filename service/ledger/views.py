"""Read models: a delivery as the API tells it, and lists by keyset. Every query is bound to a tenant.

A list is driven by an index of the immutable `payloads` or by one of the partial indexes of
`deliveries`; the predicate of the latter is spelled out beside each `state`, so that it can be used.
"""

from __future__ import annotations

import datetime as dt
import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from service.domain.delivery import State
from service.ledger.session import Ledger, Row, Statement

_COLUMNS: Final = """
    d.id, d.destination_id, d.state, d.attempt_count, d.attempts_max, d.redrive_count, d.next_attempt_at,
    d.deadline_at, d.created_at, d.completed_at, d.claimed_at, d.next_trigger, d.last_outcome, d.last_status_code,
    d.last_error, d.dead_reason, d.may_have_been_delivered,
    p.event_id, p.event_type, p.metadata, p.body_sha256, octet_length(p.body) AS body_bytes,
    t.state AS destination_state, d.next_attempt_at > now() AS waits"""
_TABLES: Final = """
FROM deliveries d
JOIN payloads p ON p.delivery_id = d.id
JOIN destinations t ON t.id = d.destination_id"""

_FIND = Statement(f"""
SELECT {_COLUMNS}, a.number, a.trigger, a.scheduled_at, a.started_at, a.completed_at AS attempt_completed_at, a.outcome,
    a.phase, a.status_code, a.error, a.latency_ms, a.response_excerpt, a.late_result
{_TABLES}
LEFT JOIN attempts a ON a.delivery_id = d.id AND a.delivery_id = :id
WHERE d.id = :id AND p.delivery_id = :id AND d.tenant = :tenant
ORDER BY a.number
""")
_PAYLOAD = Statement("""
SELECT content_type, body FROM payloads WHERE delivery_id = :id AND tenant = :tenant
""")


async def find_delivery(ledger: Ledger, tenant: str, delivery_id: uuid.UUID) -> tuple[Row, list[Row]] | None:
    """Read a delivery and its attempts, oldest first. Index: the primary keys.

    One statement, so one snapshot: a state is never told without the attempt that led to it.
    """
    async with ledger.statement() as connection:
        found = await connection.rows(_FIND, {"id": delivery_id, "tenant": tenant})
    return (found[0], [row for row in found if row["number"] is not None]) if found else None


async def find_payload(ledger: Ledger, tenant: str, delivery_id: uuid.UUID) -> tuple[str, bytes] | None:
    """Read the exact bytes and their content type."""
    async with ledger.statement() as connection:
        found = await connection.rows(_PAYLOAD, {"id": delivery_id, "tenant": tenant})
    return (found[0]["content_type"], found[0]["body"]) if found else None


@dataclass(frozen=True, slots=True)
class DeliveryFilter:
    """What a list is narrowed to; None leaves a field open."""

    state: State | None = None
    destination_id: uuid.UUID | None = None
    event_id: str | None = None
    event_type: str | None = None
    dead_reason: str | None = None
    outcome: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    created_after: dt.datetime | None = None
    created_before: dt.datetime | None = None


async def list_deliveries(
    ledger: Ledger, tenant: str, wanted: DeliveryFilter, *, before: uuid.UUID | None, limit: int
) -> list[Row]:
    """Read up to `limit` deliveries older than `before`, newest first."""
    conditions, values = _conditions(wanted)
    if before is not None:
        conditions.append("d.id < CAST(:before AS uuid)")
        values["before"] = before
    statement = Statement(f"""
    SELECT {_COLUMNS} {_TABLES}
    WHERE d.tenant = :tenant AND p.tenant = :tenant {"".join(f" AND {condition}" for condition in conditions)}
    ORDER BY d.id DESC LIMIT :limit
    """)
    async with ledger.statement() as connection:
        return await connection.rows(statement, {**values, "tenant": tenant, "limit": limit})


# What each state implies, in the words of the partial index that holds its rows.
_INDEX_PREDICATES: Final = {
    State.PENDING: "d.completed_at IS NULL",
    State.DELIVERING: "d.completed_at IS NULL AND d.lease_until IS NOT NULL",
    State.AMBIGUOUS: "d.completed_at IS NULL",
    State.DEAD: "d.dead_reason IS NOT NULL",
}


def _conditions(  # noqa: C901 — one `if` for each filter, and nothing else
    wanted: DeliveryFilter,
) -> tuple[list[str], dict[str, Any]]:
    conditions: list[str] = []
    values: dict[str, Any] = {}

    def narrow(condition: str, **given: Any) -> None:
        conditions.append(condition)
        values.update(given)

    if wanted.state is not None:
        narrow("d.state = :state", state=wanted.state.value)
        if predicate := _INDEX_PREDICATES.get(wanted.state):
            narrow(predicate)
    if wanted.destination_id is not None:
        narrow("p.destination_id = CAST(:destination_id AS uuid)", destination_id=wanted.destination_id)
    if wanted.event_id is not None:
        # Probes the identity table once per destination of the tenant: it has no index of its own
        # for this, because every accept would pay for it.
        narrow(
            "d.id IN (SELECT i.delivery_id FROM destinations o JOIN delivery_identities i ON i.destination_id = o.id"
            " WHERE o.tenant = :tenant AND i.event_id = :event_id)",
            event_id=wanted.event_id,
        )
    if wanted.event_type is not None:
        narrow("p.event_type = :event_type", event_type=wanted.event_type)
    if wanted.dead_reason is not None:
        narrow("d.dead_reason IS NOT NULL AND d.dead_reason = :dead_reason", dead_reason=wanted.dead_reason)
    if wanted.outcome is not None:
        narrow("d.last_outcome = :outcome", outcome=wanted.outcome)
    if wanted.metadata:
        narrow(
            "p.metadata IS NOT NULL AND p.metadata @> CAST(:metadata AS jsonb)",
            metadata=json.dumps(dict(wanted.metadata)),
        )
    if wanted.created_after is not None:
        narrow("d.created_at > :created_after AND d.id >= CAST(:id_from AS uuid)", created_after=wanted.created_after)
        values["id_from"] = _id_bound(wanted.created_after, -_CLOCK_SLACK)
    if wanted.created_before is not None:
        narrow("d.created_at < :created_before AND d.id < CAST(:id_to AS uuid)", created_before=wanted.created_before)
        values["id_to"] = _id_bound(wanted.created_before, _CLOCK_SLACK)
    return conditions, values


# Ids carry the API's clock, `created_at` the database's; partitions are pruned by the former.
_CLOCK_SLACK: Final = dt.timedelta(days=1)


def _id_bound(at: dt.datetime, slack: dt.timedelta) -> uuid.UUID:
    """The least UUID of an instant with some slack, within what a UUIDv7 can hold."""
    # In seconds and not as dates: the first and the last day of the calendar have no neighbour.
    unix_ms = int((at.timestamp() + slack.total_seconds()) * 1000)
    return uuid.UUID(int=min(max(unix_ms, 0), (1 << 48) - 1) << 80)
