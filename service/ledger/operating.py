"""What a person does to one delivery, or to dead ones: guarded by tenant and state, audited in the same commit.

The row is locked before its state is judged, so the state in a refusal is the one that refused.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from service.domain.delivery import TRANSITIONS, State, Transition
from service.domain.ids import Prefix, to_typeid
from service.ledger import audit
from service.ledger.session import Ledger, Statement


@dataclass(frozen=True, slots=True)
class Done:
    """The delivery moved, and the deed is on record."""


@dataclass(frozen=True, slots=True)
class UnknownDelivery:
    """The tenant has no such delivery."""


@dataclass(frozen=True, slots=True)
class WrongState:
    """The delivery's state does not allow it; nothing changed."""

    state: State


Result = Done | UnknownDelivery | WrongState

_LOCK = Statement("SELECT state FROM deliveries WHERE id = :id AND tenant = :tenant FOR NO KEY UPDATE")

_CANCEL = Statement("""
UPDATE deliveries SET state = 'cancelled', wake_at = NULL, parked = false, completed_at = now()
WHERE id = :id AND tenant = :tenant AND state = 'pending'
""")

# At a paused destination the row stays parked; woken, it is parked again until the resume.
_RETRY = Statement("""
UPDATE deliveries d
SET next_attempt_at = now(), wake_at = now(), next_trigger = 'manual', parked = d.parked AND t.state = 'paused'
FROM destinations t
WHERE d.id = :id AND d.tenant = :tenant AND d.state = 'pending' AND t.id = d.destination_id
""")

_CONFIRM = Statement("""
UPDATE deliveries SET state = 'delivered', completed_at = now(), may_have_been_delivered = false
WHERE id = :id AND tenant = :tenant AND state = 'ambiguous'
""")

# The budget may be used up, or the deadline past: sending again takes at least one attempt.
_RESEND = Statement("""
UPDATE deliveries d
SET state = 'pending', next_attempt_at = now(), wake_at = now(), next_trigger = 'manual', parked = false,
    attempts_max = greatest(d.attempts_max, d.attempt_count + 1),
    deadline_at = greatest(d.deadline_at, now() + make_interval(secs => t.deadline_seconds))
FROM destinations t
WHERE d.id = :id AND d.tenant = :tenant AND d.state = 'ambiguous' AND t.id = d.destination_id
""")

_GIVE_UP = Statement("""
UPDATE deliveries
SET state = 'dead', dead_reason = 'given_up', completed_at = now(), may_have_been_delivered = true
WHERE id = :id AND tenant = :tenant AND state = 'ambiguous'
""")


async def cancel(ledger: Ledger, deed: audit.Deed, delivery_id: uuid.UUID) -> Result:
    """CANCEL. Guard: `state = 'pending'`. Index: the primary key."""
    return await _move(ledger, _CANCEL, TRANSITIONS[Transition.CANCEL][0], deed, delivery_id)


async def retry(ledger: Ledger, deed: audit.Deed, delivery_id: uuid.UUID) -> Result:
    """Make a waiting delivery due now; no transition. Guard: `state = 'pending'`. Index: the primary key."""
    return await _move(ledger, _RETRY, State.PENDING, deed, delivery_id)


async def confirm(ledger: Ledger, deed: audit.Deed, delivery_id: uuid.UUID) -> Result:
    """CONFIRM. Guard: `state = 'ambiguous'`. Index: the primary key."""
    return await _move(ledger, _CONFIRM, TRANSITIONS[Transition.CONFIRM][0], deed, delivery_id)


async def resend(ledger: Ledger, deed: audit.Deed, delivery_id: uuid.UUID) -> Result:
    """RESEND. Guard: `state = 'ambiguous'`. Index: the primary key."""
    return await _move(ledger, _RESEND, TRANSITIONS[Transition.RESEND][0], deed, delivery_id)


async def give_up(ledger: Ledger, deed: audit.Deed, delivery_id: uuid.UUID) -> Result:
    """GIVE_UP. Guard: `state = 'ambiguous'`. Index: the primary key."""
    return await _move(ledger, _GIVE_UP, TRANSITIONS[Transition.GIVE_UP][0], deed, delivery_id)


async def _move(
    ledger: Ledger, statement: Statement, needed: State, deed: audit.Deed, delivery_id: uuid.UUID
) -> Result:
    values = {"id": delivery_id, "tenant": deed.tenant}
    async with ledger.transaction() as connection:
        found = await connection.rows(_LOCK, values)
        if not found:
            return UnknownDelivery()
        if found[0]["state"] != needed:
            return WrongState(State(found[0]["state"]))
        await connection.execute(statement, values)
        await audit.record(connection, deed)
    return Done()


_DISCARD = Statement("""
WITH locked AS (
    SELECT d.id FROM deliveries d
    WHERE d.id = ANY(CAST(:ids AS uuid[])) AND d.tenant = :tenant AND d.state = 'dead'
    ORDER BY d.id FOR NO KEY UPDATE
)
UPDATE deliveries d SET state = 'cancelled', dead_reason = NULL, completed_at = now()
FROM locked
WHERE d.id = locked.id AND d.id = ANY(CAST(:ids AS uuid[])) AND d.tenant = :tenant AND d.state = 'dead'
RETURNING d.id
""")

# The subject of a deed that touched more than one delivery; its detail names each.
QUEUE_SUBJECT: Final = "dlq"


async def discard(ledger: Ledger, deed: audit.Deed, ids: Sequence[uuid.UUID]) -> int:
    """DISCARD those of the ids that are dead; answers how many were. The record names each of them.

    Guard: `state = 'dead'`, under row locks in id order. Index: the primary key. `ids` is bounded by
    REDRIVE_ITEMS_MAX.
    """
    async with ledger.transaction() as connection:
        moved = await connection.rows(_DISCARD, {"ids": list(ids), "tenant": deed.tenant})
        texts = sorted(to_typeid(Prefix.DELIVERY, row["id"]) for row in moved)
        if texts:
            subject = texts[0] if len(texts) == 1 else deed.subject
            detail = {**(deed.detail or {}), "delivery_ids": texts}
            await audit.record(connection, replace(deed, subject=subject, detail=detail))
    return len(moved)
