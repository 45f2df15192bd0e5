"""What the dispatcher reads and moves: bounded batches, locks in order, safe to run twice at once."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from service.domain import limits
from service.domain.retry import Budget, RetryPolicy
from service.ledger.destinations import policy_of
from service.ledger.session import Ledger, Row, Statement

# The ids go through arrays so that the updates find their rows by key and not by a join, for which a
# small table's statistics would read the whole of a large one.
_DUE = """
    SELECT d.id, t.state AS destination_state, d.deadline_at <= now() AS late
    FROM (
        SELECT id, destination_id, deadline_at FROM deliveries
        WHERE wake_at <= now() ORDER BY wake_at LIMIT :batch
        FOR NO KEY UPDATE SKIP LOCKED
    ) d JOIN destinations t ON t.id = d.destination_id
"""

_UNSENDABLE = """
    SELECT d.id, t.state AS destination_state, d.deadline_at <= now() AS late
    FROM deliveries d JOIN destinations t ON t.id = d.destination_id
    WHERE d.wake_at <= now() AND (d.deadline_at <= now() OR t.state <> 'active')
    ORDER BY d.wake_at LIMIT :batch
    FOR NO KEY UPDATE OF d SKIP LOCKED
"""

_TAKE = """
WITH due AS ({due}), hinted AS (
    UPDATE deliveries d SET wake_at = now() + make_interval(secs => :visibility_seconds)
    WHERE d.id = ANY(ARRAY(SELECT id FROM due WHERE destination_state = 'active' AND NOT late)) AND d.state = 'pending'
    RETURNING d.id, d.next_attempt_at
), expired AS (
    UPDATE deliveries d
    SET state = 'dead', wake_at = NULL, parked = false, completed_at = now(),
        dead_reason = CASE WHEN d.deadline_at <= now() THEN 'deadline' ELSE 'disabled' END
    WHERE d.id = ANY(ARRAY(SELECT id FROM due WHERE late OR destination_state = 'disabled')) AND d.state = 'pending'
    RETURNING d.id, d.tenant, d.dead_reason
)
SELECT due.id, hinted.next_attempt_at, expired.tenant, expired.dead_reason,
    due.destination_state = 'paused' AND NOT due.late AS paused
FROM due LEFT JOIN hinted ON hinted.id = due.id LEFT JOIN expired ON expired.id = due.id
ORDER BY hinted.next_attempt_at
"""
_TAKE_DUE = Statement(_TAKE.format(due=_DUE))
_TAKE_UNSENDABLE = Statement(_TAKE.format(due=_UNSENDABLE))


@dataclass(frozen=True, slots=True)
class Due:
    """One batch of rows whose `wake_at` had passed."""

    to_hint: list[uuid.UUID]
    expired: list[tuple[uuid.UUID, str, str]]  # id, tenant, reason
    to_park: list[uuid.UUID]

    @property
    def rows_count(self) -> int:
        """How many rows the batch held; a full one means that more may wait."""
        return len(self.to_hint) + len(self.expired) + len(self.to_park)


async def take_due(ledger: Ledger, *, visibility_seconds: float, batch: int = limits.DUE_BATCH) -> Due:
    """Take rows whose `wake_at` has passed: to be hinted, EXPIREd, or parked.

    Hinted rows are not looked at again for `visibility_seconds`. Index: `ix_deliveries_wake_at`.
    """
    return await _take(ledger, _TAKE_DUE, {"visibility_seconds": visibility_seconds, "batch": batch})


async def take_unsendable(ledger: Ledger, *, batch: int = limits.DUE_BATCH) -> Due:
    """Take rows whose `wake_at` has passed and that may not be sent: to be EXPIREd, or parked.

    For when nothing can be hinted. It passes over all that is due, so it is not for every pass.
    Index: `ix_deliveries_wake_at`.
    """
    return await _take(ledger, _TAKE_UNSENDABLE, {"visibility_seconds": 0.0, "batch": batch})


async def _take(ledger: Ledger, statement: Statement, values: dict[str, float]) -> Due:
    async with ledger.statement() as connection:
        found = await connection.rows(statement, values)
    return Due(
        to_hint=[row["id"] for row in found if row["next_attempt_at"] is not None],
        expired=[(row["id"], row["tenant"], row["dead_reason"]) for row in found if row["dead_reason"] is not None],
        to_park=[row["id"] for row in found if row["paused"]],
    )


_WAKE_HINTED = Statement("""
UPDATE deliveries SET wake_at = now()
WHERE id IN (
    SELECT id FROM deliveries
    WHERE wake_at > now() AND wake_at <= now() + make_interval(secs => :visibility_seconds_max)
        AND next_attempt_at <= now() AND NOT parked
    LIMIT :batch FOR NO KEY UPDATE SKIP LOCKED
) AND state = 'pending'
RETURNING id
""")


async def wake_hinted(ledger: Ledger, *, batch: int = limits.DUE_BATCH) -> int:
    """Make rows due again whose hint may be lost with the queue. Index: `ix_deliveries_wake_at`."""
    values = {"visibility_seconds_max": limits.HINT_VISIBILITY_SECONDS_MAX, "batch": batch}
    async with ledger.statement() as connection:
        return len(await connection.rows(_WAKE_HINTED, values))


@dataclass(frozen=True, slots=True)
class LostClaim:
    """A claim whose lease ended, or whose worker stopped beating, with what deciding on it takes."""

    delivery_id: uuid.UUID
    budget: Budget
    policy: RetryPolicy
    row: Row


_LOST = Statement("""
SELECT d.id, d.tenant, d.attempt_count, d.attempts_max, d.deadline_at, d.crashed_claims, d.uncharged_count,
    d.next_attempt_at, d.claimed_at, d.next_trigger, d.worker, t.schedule_seconds, t.base_seconds, t.cap_seconds,
    t.on_ambiguous, now() AS now
FROM deliveries d JOIN destinations t ON t.id = d.destination_id
WHERE d.lease_until IS NOT NULL AND d.id <> ALL(CAST(:skipped AS uuid[])) AND (d.lease_until <= now() OR (
    d.claimed_at <= now() - make_interval(secs => :stale_seconds)
    AND NOT EXISTS (
        SELECT FROM workers w WHERE w.id = d.worker AND w.heartbeat_at > now() - make_interval(secs => :stale_seconds)
    )))
ORDER BY d.lease_until LIMIT :batch
""")


async def find_lost(
    ledger: Ledger,
    *,
    stale_seconds: float,
    skipped: Sequence[uuid.UUID] = (),
    batch: int = limits.RESCUE_BATCH,
) -> list[LostClaim]:
    """Read claims that nobody will settle. No lock: the settle that follows is guarded by the number.

    A claim younger than `stale_seconds` is left alone whatever its worker's heartbeat says, so that a
    claim which just went out on a late heartbeat is not taken back. Index: `ix_deliveries_lease_until`.
    """
    async with ledger.statement() as connection:
        found = await connection.rows(_LOST, {"stale_seconds": stale_seconds, "skipped": list(skipped), "batch": batch})
    return [
        LostClaim(
            delivery_id=row["id"],
            budget=Budget(
                number=row["attempt_count"],
                attempts_max=row["attempts_max"],
                deadline_at=row["deadline_at"],
                crashed_claims=row["crashed_claims"],
                uncharged_count=row["uncharged_count"],
            ),
            policy=policy_of(row),
            row=row,
        )
        for row in found
    ]


_LOCK_GATED = Statement("""
UPDATE destinations SET gated = true WHERE id IN (
    SELECT t.id FROM destinations t
    WHERE t.id IN (SELECT destination_id FROM deliveries WHERE id = ANY(CAST(:ids AS uuid[])))
    ORDER BY t.id FOR NO KEY UPDATE
) AND state = 'paused' RETURNING id
""")

_PARK = Statement("""
UPDATE deliveries SET parked = true, wake_at = deadline_at
WHERE id = ANY(CAST(:ids AS uuid[])) AND state = 'pending' AND destination_id = ANY(CAST(:destination_ids AS uuid[]))
""")


async def park(ledger: Ledger, delivery_ids: list[uuid.UUID]) -> None:
    """Set rows of paused destinations aside until they are admitted, or their deadline passes.

    The destination is marked and locked first, so that the mark cannot be taken off in between.
    """
    async with ledger.transaction() as connection:
        paused = await connection.rows(_LOCK_GATED, {"ids": delivery_ids})
        values = {"ids": delivery_ids, "destination_ids": [row["id"] for row in paused]}
        await connection.execute(_PARK, values)


_LOCK_ADMITTED = Statement("""
SELECT id FROM destinations WHERE gated AND state <> 'paused'
ORDER BY id LIMIT 1 OFFSET :skipped FOR NO KEY UPDATE SKIP LOCKED
""")

_ADMIT = Statement("""
WITH oldest AS (
    SELECT id FROM deliveries WHERE parked AND destination_id = :destination_id
    ORDER BY next_attempt_at LIMIT :batch FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE deliveries d SET parked = false, wake_at = greatest(d.next_attempt_at, now())
FROM oldest WHERE d.id = oldest.id AND d.state = 'pending'
RETURNING d.id
""")

_UNGATE = Statement("""
UPDATE destinations SET gated = false
WHERE id = :destination_id AND NOT EXISTS (SELECT FROM deliveries WHERE parked AND destination_id = :destination_id)
""")


async def admit(ledger: Ledger, *, skipped: int = 0, batch: int = limits.PARK_BATCH) -> int | None:
    """Let parked rows of one resumed destination flow again, oldest first; None when there is none.

    Three statements under the destination's lock: `park` cannot slip a row in between the last
    admission and the mark's going. `skipped` destinations are passed over, for those done already.
    """
    async with ledger.transaction() as connection:
        found = await connection.rows(_LOCK_ADMITTED, {"skipped": skipped})
        if not found:
            return None
        destination_id = found[0]["id"]
        admitted = await connection.rows(_ADMIT, {"destination_id": destination_id, "batch": batch})
        if len(admitted) < batch:
            await connection.execute(_UNGATE, {"destination_id": destination_id})
        return len(admitted)


_BEAT = Statement("""
INSERT INTO workers (id) VALUES (:worker) ON CONFLICT (id) DO UPDATE SET heartbeat_at = now()
""")
_LEAVE = Statement("DELETE FROM workers WHERE id = :worker")
_FORGET = Statement("DELETE FROM workers WHERE heartbeat_at < now() - interval '1 day'")


async def beat(ledger: Ledger, worker: str) -> None:
    """Say that the worker lives."""
    async with ledger.statement() as connection:
        await connection.execute(_BEAT, {"worker": worker})


async def leave(ledger: Ledger, worker: str) -> None:
    """Say that the worker is gone, having settled all its claims."""
    async with ledger.statement() as connection:
        await connection.execute(_LEAVE, {"worker": worker})


async def forget_workers(ledger: Ledger) -> None:
    """Drop the heartbeats of workers lost long ago."""
    async with ledger.statement() as connection:
        await connection.execute(_FORGET)
