"""Redrives: every bit of a redrive's progress is in its row and its items, so that any dispatcher can go on with it.

A running redrive is advanced under a lock on its row, in one transaction per step: two dispatchers
never do the same step twice, and one that dies in between leaves the step undone.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from service.ledger import audit
from service.ledger.dead_letters import Selection, chosen_by
from service.ledger.session import Connection, Ledger, Row, Statement


@dataclass(frozen=True, slots=True)
class NewRedrive:
    """One validated request to redrive, ready for the ledger. `fingerprint` is its meaning."""

    id: uuid.UUID
    key: str | None
    fingerprint: bytes
    selection: Selection
    rate_per_second: float | None
    stop_after_same_reason: int | None


@dataclass(frozen=True, slots=True)
class Keyed:
    """The redrive that an idempotency key stands for."""

    id: uuid.UUID
    fingerprint: bytes


# The clock is read after the selection's snapshot was taken, so whatever was selected died before
# `created_at`; what died after it died in another round, and is left alone (`_REQUEUE`).
_INSERT: Final = """
WITH chosen AS MATERIALIZED ({chosen}), made AS (
    INSERT INTO redrives (id, tenant, idempotency_key, fingerprint, state, actor, reason, selected_count,
                          rate_per_second, stop_after_same_reason, created_at, completed_at)
    SELECT CAST(:id AS uuid), CAST(:tenant AS text), CAST(:key AS text), CAST(:fingerprint AS bytea),
        CASE WHEN c.dead_count > 0 THEN 'running' ELSE 'completed' END, CAST(:actor AS text), CAST(:reason AS text),
        c.selected_count, CAST(:rate_per_second AS float8), CAST(:stop_after AS int), clock_timestamp(),
        CASE WHEN c.dead_count = 0 THEN clock_timestamp() END
    FROM (SELECT count(*) AS selected_count, count(*) FILTER (WHERE state = 'dead') AS dead_count FROM chosen) c
    ON CONFLICT (tenant, idempotency_key) DO NOTHING
    RETURNING id, selected_count
), items AS (
    INSERT INTO redrive_items (redrive_id, delivery_id, state, skipped_because)
    SELECT made.id, chosen.id, CASE WHEN chosen.state = 'dead' THEN 'waiting' ELSE 'skipped' END,
        CASE WHEN chosen.state <> 'dead' THEN chosen.state END
    FROM chosen CROSS JOIN made
)
SELECT selected_count FROM made
"""

_FIND_KEYED = Statement("""
SELECT id, fingerprint FROM redrives WHERE tenant = :tenant AND idempotency_key = :key
""")


async def start(ledger: Ledger, new: NewRedrive, deed: audit.Deed) -> bool:
    """Write a redrive, its items and its record in one commit; False when its key is taken.

    Guard: the unique (tenant, idempotency_key). Indexes: those of the selection. Deliveries that are
    selected by id and not dead are items too, skipped for their state.
    """
    chosen, values = chosen_by(new.selection)
    values |= {
        "id": new.id,
        "tenant": deed.tenant,
        "key": new.key,
        "fingerprint": new.fingerprint,
        "actor": deed.actor,
        "reason": deed.reason,
        "rate_per_second": new.rate_per_second,
        "stop_after": new.stop_after_same_reason,
    }
    async with ledger.transaction() as connection:
        made = await connection.rows(Statement(_INSERT.format(chosen=chosen)), values)
        if not made:
            return False
        detail = {**(deed.detail or {}), "selected": made[0]["selected_count"]}
        await audit.record(connection, replace(deed, detail=detail))
    return True


async def find_keyed(ledger: Ledger, tenant: str, key: str) -> Keyed | None:
    """Read what a key stands for. Index: the unique (tenant, idempotency_key)."""
    async with ledger.statement() as connection:
        found = await connection.rows(_FIND_KEYED, {"tenant": tenant, "key": key})
    return Keyed(found[0]["id"], found[0]["fingerprint"]) if found else None


# One step


@dataclass(frozen=True, slots=True)
class Progress:
    """A running redrive, locked, with what deciding on its next step takes.

    `elapsed_seconds` counts from where its rate was last paid up to, and is None before the first step.
    `same_reason` is set when as many as `stop_after_same_reason` died again last, all for it.
    """

    id: uuid.UUID
    tenant: str
    created_at: dt.datetime
    rate_per_second: float | None
    stop_after_same_reason: int | None
    elapsed_seconds: float | None
    outstanding_count: int
    same_reason: str | None


# A redrive whose rate does not allow one more delivery yet is passed over.
_LOCK_NEXT = Statement("""
SELECT id, tenant, created_at, rate_per_second, stop_after_same_reason,
    CAST(extract(epoch FROM now() - stepped_at) AS float8) AS elapsed_seconds
FROM redrives
WHERE state = 'running' AND (CAST(:after AS uuid) IS NULL OR id > CAST(:after AS uuid))
    AND (rate_per_second IS NULL OR stepped_at IS NULL
         OR now() >= stepped_at + make_interval(secs => 1 / rate_per_second))
ORDER BY id LIMIT 1
FOR NO KEY UPDATE SKIP LOCKED
""")

# What a person holds as ambiguous is not finished; what a person cancelled says nothing of the receiver.
_FATES = Statement("""
WITH mine AS MATERIALIZED (
    SELECT id, state, dead_reason, completed_at FROM deliveries WHERE redrive_id = :id
), latest AS (
    SELECT state, dead_reason FROM mine WHERE state IN ('delivered', 'dead')
    ORDER BY completed_at DESC, id DESC LIMIT :stop_after
)
SELECT (SELECT count(*) FROM mine WHERE completed_at IS NULL) AS outstanding_count,
    (SELECT CASE WHEN count(*) = :stop_after AND bool_and(state = 'dead') AND count(DISTINCT dead_reason) = 1
                 THEN min(dead_reason) END
     FROM latest) AS same_reason
""")


async def lock_next(connection: Connection, after: uuid.UUID | None) -> Progress | None:
    """Lock the next running redrive behind `after` that nobody else holds; None when there is none.

    Indexes: `ix_redrives_running`, `ix_deliveries_redrive_id`.
    """
    found = await connection.rows(_LOCK_NEXT, {"after": after})
    if not found:
        return None
    outstanding_count, same_reason = 0, None
    stop_after = found[0]["stop_after_same_reason"]
    if stop_after is not None:
        fates = await connection.rows(_FATES, {"id": found[0]["id"], "stop_after": stop_after})
        outstanding_count, same_reason = fates[0]["outstanding_count"], fates[0]["same_reason"]
    return Progress(**found[0], outstanding_count=outstanding_count, same_reason=same_reason)


_WAITING = Statement("""
SELECT delivery_id FROM redrive_items WHERE redrive_id = :id AND state = 'waiting' ORDER BY delivery_id LIMIT :limit
""")

_REQUEUE = Statement("""
WITH locked AS (
    SELECT d.id, d.state, d.completed_at, t.state AS destination_state, t.attempts_max, t.deadline_seconds
    FROM deliveries d JOIN destinations t ON t.id = d.destination_id
    WHERE d.id = ANY(CAST(:ids AS uuid[])) AND d.tenant = :tenant
    ORDER BY d.id FOR NO KEY UPDATE OF d
), requeued AS (
    UPDATE deliveries d
    SET state = 'pending', dead_reason = NULL, completed_at = NULL, next_attempt_at = now(), wake_at = now(),
        parked = false, attempts_max = d.attempt_count + l.attempts_max, uncharged_count = d.attempt_count,
        deadline_at = now() + make_interval(secs => l.deadline_seconds), redrive_count = d.redrive_count + 1,
        redrive_id = CAST(:redrive_id AS uuid), crashed_claims = 0, next_trigger = 'redrive'
    FROM locked l
    WHERE d.id = l.id AND d.id = ANY(CAST(:ids AS uuid[])) AND d.tenant = :tenant AND d.state = 'dead'
        AND l.destination_state <> 'disabled' AND l.completed_at <= CAST(:created_at AS timestamptz)
    RETURNING d.id
)
UPDATE redrive_items i
SET state = CASE WHEN r.id IS NOT NULL THEN 'requeued' ELSE 'skipped' END,
    skipped_because = CASE WHEN r.id IS NOT NULL THEN NULL
                           WHEN l.id IS NULL THEN 'deleted'
                           WHEN l.state <> 'dead' THEN l.state
                           WHEN l.destination_state = 'disabled' THEN 'destination-disabled'
                           ELSE 'redriven-since' END
FROM unnest(CAST(:ids AS uuid[])) AS b(id) LEFT JOIN locked l ON l.id = b.id LEFT JOIN requeued r ON r.id = b.id
WHERE i.redrive_id = CAST(:redrive_id AS uuid) AND i.delivery_id = b.id AND i.state = 'waiting'
RETURNING i.state
""")


async def requeue(connection: Connection, progress: Progress, limit: int) -> tuple[int, int]:
    """REDRIVE up to `limit` waiting items, lowest id first; answers how many were requeued, and skipped.

    Guard: `state = 'dead'`, since before the redrive began, under row locks in id order. Indexes:
    `ix_redrive_items_waiting`, the primary key. At a paused destination the delivery waits as any other.
    """
    waiting = await connection.rows(_WAITING, {"id": progress.id, "limit": limit})
    values = {
        "ids": [row["delivery_id"] for row in waiting],
        "redrive_id": progress.id,
        "tenant": progress.tenant,
        "created_at": progress.created_at,
    }
    handled = Counter(row["state"] for row in await connection.rows(_REQUEUE, values))
    return handled["requeued"], handled["skipped"]


_STEPPED = Statement("""
WITH waiting AS (
    SELECT EXISTS (SELECT FROM redrive_items WHERE redrive_id = :id AND state = 'waiting') AS any_left
)
UPDATE redrives
SET stepped_at = now() - make_interval(secs => :unspent_seconds),
    state = CASE WHEN any_left THEN state ELSE 'completed' END,
    completed_at = CASE WHEN any_left THEN NULL ELSE now() END
FROM waiting WHERE id = :id AND state = 'running'
RETURNING state
""")


async def stepped(connection: Connection, progress: Progress, *, unspent_seconds: float) -> bool:
    """Note a step, and completion when no item waits any more; answers whether it still runs.

    Guard: `state = 'running'`. Index: the primary key; `ix_redrive_items_waiting`.
    """
    values = {"id": progress.id, "unspent_seconds": unspent_seconds}
    moved = await connection.rows(_STEPPED, values)
    return bool(moved) and moved[0]["state"] == "running"


_END = Statement("""
UPDATE redrives SET state = :state, stopped_because = :because, completed_at = now()
WHERE id = :id AND tenant = :tenant AND state = 'running'
RETURNING id
""")
_SKIP_WAITING = Statement("""
UPDATE redrive_items SET state = 'skipped', skipped_because = :because WHERE redrive_id = :id AND state = 'waiting'
""")

STOPPED_ACTOR: Final = "dispatcher"


async def stop(connection: Connection, progress: Progress, reason: str, deed: audit.Deed) -> None:
    """End a running redrive for the reason that they die again for. What waited is skipped."""
    await _end(connection, progress.id, "stopped", reason, deed)


async def cancel(ledger: Ledger, deed: audit.Deed, redrive_id: uuid.UUID) -> bool:
    """End a running redrive by a person's word; answers whether it was running. What waited is skipped."""
    async with ledger.transaction() as connection:
        return await _end(connection, redrive_id, "cancelled", None, deed)


# Guard: `state = 'running'`; a step that holds the row's lock is waited for. Index: the primary key.
async def _end(
    connection: Connection, redrive_id: uuid.UUID, state: str, because: str | None, deed: audit.Deed
) -> bool:
    values = {"id": redrive_id, "tenant": deed.tenant, "state": state, "because": because}
    if not await connection.rows(_END, values):
        return False
    await connection.execute(_SKIP_WAITING, {"id": redrive_id, "because": f"redrive-{state}"})
    await audit.record(connection, deed)
    return True


# As they are told


@dataclass(frozen=True, slots=True)
class Tally:
    """How the items of a redrive fare, counted from the deliveries as they are now."""

    requeued_count: int
    skipped_count: int
    delivered_count: int
    dead_again_count: int
    outcomes: dict[str, int]
    skipped_because: dict[str, int]


_COLUMNS: Final = """id, state, actor, reason, selected_count, rate_per_second, stop_after_same_reason,
    stopped_because, created_at, completed_at"""
_FIND = Statement(f"SELECT {_COLUMNS} FROM redrives WHERE id = :id AND tenant = :tenant")
_LIST = Statement(f"""
SELECT {_COLUMNS} FROM redrives
WHERE tenant = :tenant AND (CAST(:before AS uuid) IS NULL OR id < CAST(:before AS uuid))
ORDER BY id DESC LIMIT :limit
""")

# A delivery that another redrive took died again before it did.
_TALLIES = Statement("""
SELECT i.redrive_id, i.state, i.skipped_because,
    CASE WHEN i.state = 'requeued' AND d.redrive_id <> i.redrive_id THEN 'dead'
         WHEN i.state = 'requeued' THEN d.state END AS fate,
    CASE WHEN i.state = 'requeued' AND d.redrive_id = i.redrive_id AND d.state IN ('delivered', 'dead', 'ambiguous')
         THEN d.last_outcome END AS outcome,
    count(*) AS items_count
FROM redrive_items i LEFT JOIN deliveries d ON d.id = i.delivery_id
WHERE i.redrive_id = ANY(CAST(:ids AS uuid[]))
GROUP BY 1, 2, 3, 4, 5
""")


async def find(ledger: Ledger, tenant: str, redrive_id: uuid.UUID) -> tuple[Row, Tally] | None:
    """Read one redrive of the tenant, and how it fares. Index: the primary keys."""
    async with ledger.statement() as connection:
        found = await connection.rows(_FIND, {"id": redrive_id, "tenant": tenant})
        tallied = await _tallied(connection, found)
    return tallied[0] if tallied else None


async def list_page(ledger: Ledger, tenant: str, *, before: uuid.UUID | None, limit: int) -> list[tuple[Row, Tally]]:
    """Read up to `limit` redrives older than `before`, newest first. Index: `ix_redrives_tenant_id`."""
    async with ledger.statement() as connection:
        found = await connection.rows(_LIST, {"tenant": tenant, "before": before, "limit": limit})
        return await _tallied(connection, found)


async def _tallied(connection: Connection, found: Sequence[Row]) -> list[tuple[Row, Tally]]:
    counted: dict[uuid.UUID, list[Row]] = {row["id"]: [] for row in found}
    if found:
        for group in await connection.rows(_TALLIES, {"ids": list(counted)}):
            counted[group["redrive_id"]].append(group)
    return [(row, _tally(counted[row["id"]])) for row in found]


def _tally(groups: Sequence[Row]) -> Tally:
    states: Counter[str] = Counter()
    fates: Counter[str] = Counter()
    outcomes: Counter[str] = Counter()
    skipped_because: Counter[str] = Counter()
    for group in groups:
        for counter, name in ((states, "state"), (fates, "fate"), (outcomes, "outcome")):
            if group[name] is not None:
                counter[group[name]] += group["items_count"]
        if group["skipped_because"] is not None:
            skipped_because[group["skipped_because"]] += group["items_count"]
    return Tally(
        requeued_count=states["requeued"],
        skipped_count=states["skipped"],
        delivered_count=fates["delivered"],
        dead_again_count=fates["dead"],
        outcomes=dict(outcomes),
        skipped_because=dict(skipped_because),
    )
