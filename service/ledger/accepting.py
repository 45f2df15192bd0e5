"""Accept: the one statement that makes a 202 true, and the one that explains every other answer.

Three rules keep a shared batch honest. Keys are taken before identities, and both in sorted order, so
that two flushes over the same rows cannot wait for each other. A key points at the identity, so a key
whose event exists already points at the existing delivery by construction. And the destination is
read inside the statement: what is written was allowed when it was written.
"""

from __future__ import annotations

import datetime as dt
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from service.ledger.columns import Columns
from service.ledger.partitions import Weekly
from service.ledger.session import Ledger, Statement


class NewDelivery(msgspec.Struct, frozen=True):
    """One validated request, ready for the ledger.

    `due_at` is absolute, and means "now" when it is None or past; `delay_seconds` counts from the commit instead.
    Without `deadline_at` and `deadline_seconds` the destination's deadline holds, from the due time.
    """

    id: uuid.UUID
    tenant: str
    key: str
    fingerprint: bytes
    destination_id: uuid.UUID
    event_id: str
    event_type: str | None
    content_type: str
    headers: Mapping[str, str] | None
    metadata: Mapping[str, str] | None
    body: bytes
    body_sha256: bytes
    due_at: dt.datetime | None = None
    delay_seconds: float | None = None
    deadline_at: dt.datetime | None = None
    deadline_seconds: float | None = None


class Inserted(msgspec.Struct, frozen=True):
    """A row of this flush became a delivery. `hintable`: due at once, at an active destination."""

    id: uuid.UUID
    created_at: dt.datetime
    next_attempt_at: dt.datetime
    deadline_at: dt.datetime
    attempts_max: int
    hintable: bool
    paused: bool


@dataclass(frozen=True, slots=True)
class Written:
    """What one flush wrote: the new deliveries, and the rows whose key is new, by the row's id."""

    deliveries: dict[uuid.UUID, Inserted]
    keyed: frozenset[uuid.UUID]


@dataclass(frozen=True, slots=True)
class Standing:
    """What the ledger holds where a row of this flush did not become a delivery."""

    destination_state: str | None  # None: no such destination for this tenant
    key_fingerprint: bytes | None  # None: the key is not taken
    event_delivery_id: uuid.UUID | None  # None: the event is new
    event_payload_sha256: bytes | None


_GIVEN = Columns(
    "i",
    {
        "id": "uuid",
        "tenant": "text",
        "key": "text",
        "fingerprint": "bytea",
        "destination_id": "uuid",
        "event_id": "text",
        "event_type": "text",
        "content_type": "text",
        "headers": "text",
        "metadata": "text",
        "body": "bytea",
        "body_sha256": "bytea",
        "due_at": "timestamptz",
        "delay_seconds": "float8",
        "deadline_at": "timestamptz",
        "deadline_seconds": "float8",
    },
)

_INSERT = Weekly(
    """
WITH input AS (
    SELECT i.*, d.attempts_max, d.state AS destination_state,
        greatest(coalesce(i.due_at, now() + make_interval(secs => i.delay_seconds)), now()) AS next_attempt_at,
        coalesce(i.deadline_seconds, d.deadline_seconds) AS deadline_after
    FROM {given}
    CROSS JOIN LATERAL (
        SELECT attempts_max, state, deadline_seconds FROM destinations
        WHERE id = i.destination_id AND tenant = i.tenant AND state <> 'disabled' LIMIT 1
    ) d
), new_keys AS (
    INSERT INTO idempotency_keys (tenant, key, fingerprint, destination_id, event_id, expires_at)
    SELECT tenant, key, fingerprint, destination_id, event_id, now() + make_interval(secs => :window_seconds)
    FROM input ORDER BY tenant, key
    ON CONFLICT DO NOTHING
    RETURNING tenant, key
), new_identities AS (
    INSERT INTO delivery_identities (destination_id, event_id, delivery_id, payload_sha256)
    SELECT destination_id, event_id, id, body_sha256
    FROM input JOIN new_keys USING (tenant, key) ORDER BY destination_id, event_id
    ON CONFLICT DO NOTHING
    RETURNING delivery_id
), new_payloads AS (
    INSERT INTO {payloads} (delivery_id, destination_id, tenant, event_id, event_type, content_type, headers, metadata,
                          body_sha256, body)
    SELECT id, destination_id, tenant, event_id, event_type, content_type, CAST(headers AS jsonb),
           CAST(metadata AS jsonb), body_sha256, body
    FROM input JOIN new_identities ON delivery_id = id
), new_deliveries AS (
    INSERT INTO {deliveries} (id, destination_id, tenant, state, next_attempt_at, deadline_at, wake_at, attempts_max)
    SELECT id, destination_id, tenant, 'pending', next_attempt_at,
        coalesce(deadline_at, next_attempt_at + make_interval(secs => deadline_after)),
        greatest(next_attempt_at, now() + make_interval(secs => :visibility_seconds)), attempts_max
    FROM input JOIN new_identities ON delivery_id = id
    RETURNING id, created_at, next_attempt_at, deadline_at, attempts_max
)
SELECT i.id AS input_id, i.destination_state, n.*, n.next_attempt_at <= now() AS due,
    (i.tenant, i.key) IN (SELECT tenant, key FROM new_keys) AS keyed
FROM input i LEFT JOIN new_deliveries n ON n.id = i.id
""",
    _GIVEN,
)


async def insert_new(
    ledger: Ledger, batch: Sequence[NewDelivery], *, window_seconds: float, visibility_seconds: float
) -> Written:
    """Write every row of the batch whose key is new, as a delivery where the event is new too; commit.

    `batch` holds no (tenant, key) twice. Guards: the primary keys of `idempotency_keys` and
    `delivery_identities`. Due rows are not looked at by the dispatcher for `visibility_seconds`,
    the time that the hint which follows the commit has to be taken.
    """
    values = {"window_seconds": window_seconds, "visibility_seconds": visibility_seconds}
    ids = [row.id for row in batch]
    given: dict[str, Sequence[Any]] = {
        "id": ids,
        "tenant": [row.tenant for row in batch],
        "key": [row.key for row in batch],
        "fingerprint": [row.fingerprint for row in batch],
        "destination_id": [row.destination_id for row in batch],
        "event_id": [row.event_id for row in batch],
        "event_type": [row.event_type for row in batch],
        "content_type": [row.content_type for row in batch],
        "headers": [json.dumps(dict(row.headers)) if row.headers else None for row in batch],
        "metadata": [json.dumps(dict(row.metadata)) if row.metadata else None for row in batch],
        "body": [row.body for row in batch],
        "body_sha256": [row.body_sha256 for row in batch],
        "due_at": [row.due_at for row in batch],
        "delay_seconds": [row.delay_seconds for row in batch],
        "deadline_at": [row.deadline_at for row in batch],
        "deadline_seconds": [row.deadline_seconds for row in batch],
    }
    written = await _INSERT.rows(ledger, ids, values, given)
    deliveries = {
        row["id"]: Inserted(
            id=row["id"],
            created_at=row["created_at"],
            next_attempt_at=row["next_attempt_at"],
            deadline_at=row["deadline_at"],
            attempts_max=row["attempts_max"],
            hintable=row["due"] and row["destination_state"] == "active",
            paused=row["destination_state"] == "paused",
        )
        for row in written
        if row["id"] is not None
    }
    return Written(deliveries, frozenset(row["input_id"] for row in written if row["keyed"]))


_STANDING = Statement("""
SELECT i.n, d.state AS destination_state, k.fingerprint AS key_fingerprint,
    e.delivery_id AS event_delivery_id, e.payload_sha256 AS event_payload_sha256
FROM unnest(
    CAST(:tenants AS text[]), CAST(:keys AS text[]), CAST(:destination_ids AS uuid[]), CAST(:event_ids AS text[])
) WITH ORDINALITY AS i(tenant, key, destination_id, event_id, n)
LEFT JOIN destinations d ON d.id = i.destination_id AND d.tenant = i.tenant
LEFT JOIN idempotency_keys k ON k.tenant = i.tenant AND k.key = i.key
LEFT JOIN delivery_identities e ON d.id IS NOT NULL AND e.destination_id = i.destination_id AND e.event_id = i.event_id
ORDER BY i.n
""")


async def look_up(ledger: Ledger, batch: Sequence[NewDelivery]) -> list[Standing]:
    """Read, for each row, what stood in its way. By the two identity tables' primary keys."""
    values = {
        "tenants": [row.tenant for row in batch],
        "keys": [row.key for row in batch],
        "destination_ids": [row.destination_id for row in batch],
        "event_ids": [row.event_id for row in batch],
    }
    async with ledger.statement() as connection:
        found = await connection.rows(_STANDING, values)
    return [
        Standing(
            destination_state=row["destination_state"],
            key_fingerprint=row["key_fingerprint"],
            event_delivery_id=row["event_delivery_id"],
            event_payload_sha256=row["event_payload_sha256"],
        )
        for row in found
    ]
