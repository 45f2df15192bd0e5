"""Dead deliveries, and others in any state, made by SQL: what stories about the dead-letter queue begin with."""

from __future__ import annotations

import datetime as dt
import uuid

from tests.world import World

# What the table's checks ask of each state besides its name.
_STATES = {
    "pending": "wake_at = now() + interval '1 hour', next_attempt_at = now() + interval '1 hour'",
    "delivering": "lease_until = now() + interval '1 hour', claimed_at = now(), wake_at = NULL",
    "delivered": "completed_at = now(), wake_at = NULL",
    "ambiguous": "wake_at = NULL, last_outcome = 'unknown', may_have_been_delivered = true",
    "cancelled": "completed_at = now(), wake_at = NULL",
}


async def dead(
    world: World,
    destination_id: uuid.UUID,
    *,
    reason: str = "rejected",
    outcome: str = "rejected",
    event_type: str | None = None,
    at: dt.datetime | None = None,
) -> uuid.UUID:
    """A delivery that died after one attempt, at an instant or now."""
    delivery_id = await world.accepted(destination_id, event_type=event_type)
    await die(world, delivery_id, reason=reason, outcome=outcome, at=at)
    await world.execute(
        "INSERT INTO attempts (delivery_id, number, scheduled_at, started_at, trigger, outcome, phase)"
        " VALUES (:id, 1, now(), now(), 'schedule', :outcome, 'responded')",
        {"id": delivery_id, "outcome": outcome},
    )
    return delivery_id


async def die(
    world: World,
    delivery_id: uuid.UUID,
    *,
    reason: str = "rejected",
    outcome: str = "rejected",
    at: dt.datetime | None = None,
) -> None:
    """Let one more attempt of an open delivery end in the dead-letter queue."""
    await world.execute(
        "UPDATE deliveries SET state = 'dead', dead_reason = :reason, last_outcome = :outcome, wake_at = NULL,"
        " lease_until = NULL, attempt_count = attempt_count + 1,"
        " completed_at = coalesce(CAST(:at AS timestamptz), now()) WHERE id = :id",
        {"id": delivery_id, "reason": reason, "outcome": outcome, "at": at},
    )


async def put(world: World, delivery_id: uuid.UUID, state: str) -> uuid.UUID:
    """Bring a pending delivery into another state than dead."""
    await world.execute(
        f"UPDATE deliveries SET state = :state, {_STATES[state]} WHERE id = :id", {"id": delivery_id, "state": state}
    )
    return delivery_id


async def states(world: World, *delivery_ids: uuid.UUID) -> list[str]:
    """The states of deliveries, in the order asked."""
    return [(await world.view(delivery_id))["state"] for delivery_id in delivery_ids]
