"""The life of a delivery in memory: accepted, claimed, settled, and dispatched until it ends.

The rule: every change of state goes through `_may` and `_move`, and so through TRANSITIONS; and each guard
is one method, for the tests that take it away.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import assert_never

from service.accept import Accepted, Answer, explain
from service.domain import limits
from service.domain.delivery import (
    TRANSITIONS,
    Bury,
    Complete,
    DeadReason,
    Hold,
    Release,
    RetryAfter,
    State,
    Transition,
    Trigger,
)
from service.domain.outcome import Outcome
from service.domain.retry import Budget
from service.ledger.accepting import Inserted, NewDelivery, Standing
from service.ledger.attempting import Settlement
from service.ledger.dispatching import Due
from tests.model.rows import (
    LEASE_MARGIN_SECONDS,
    TENANT,
    VISIBILITY_SECONDS,
    Attempt,
    Claim,
    Delivery,
    Destination,
    Lost,
    Redrive,
)


def after(seconds: float) -> dt.timedelta:
    """That many seconds."""
    return dt.timedelta(seconds=seconds)


class LedgerCore:
    """One tenant's tables. `now` is the database's clock; `taken` counts the transitions."""

    def __init__(self, now: dt.datetime, destinations: Sequence[Destination]) -> None:
        self.now = now
        self.destinations = {destination.id: destination for destination in destinations}
        self.keys: dict[tuple[str, str], NewDelivery] = {}
        self.identities: dict[tuple[uuid.UUID, str], NewDelivery] = {}
        self.payloads: dict[uuid.UUID, NewDelivery] = {}
        self.deliveries: dict[uuid.UUID, Delivery] = {}
        self.attempts: dict[uuid.UUID, dict[int, Attempt]] = {}
        self.redrives: dict[uuid.UUID, Redrive] = {}
        self.heartbeats: dict[str, dt.datetime] = {}
        self.taken: Counter[Transition] = Counter()

    def let_pass(self, seconds: float) -> None:
        """Move the clock."""
        self.now += after(seconds)

    # The guards

    def _may(self, delivery: Delivery, transition: Transition) -> bool:
        """Whether the delivery is where the transition starts."""
        return delivery.state is TRANSITIONS[transition][0]

    def _is_due(self, delivery: Delivery) -> bool:
        """Whether its time has come."""
        return delivery.next_attempt_at <= self.now

    def _is_held(self, delivery: Delivery, number: int) -> bool:
        """The fence: whether attempt `number` is the one under way."""
        return delivery.attempt_count == number and delivery.state is State.DELIVERING

    def _take_identity(self, new: NewDelivery) -> bool:
        """The primary key of `delivery_identities`."""
        return self.identities.setdefault((new.destination_id, new.event_id), new) is new

    def _move(self, delivery: Delivery, transition: Transition) -> None:
        delivery.state = TRANSITIONS[transition][1]
        self.taken[transition] += 1

    def _end(self, delivery: Delivery) -> None:
        """What ends a row that waited."""
        delivery.wake_at = None
        delivery.parked = False
        delivery.completed_at = self.now

    # accepting

    def accept(self, new: NewDelivery) -> Answer:
        """Take the key, then the identity, at a destination that takes anything; or say what stands in the way."""
        destination = self.destinations[new.destination_id]
        key_is_new = False
        if destination.state != "disabled":
            key_is_new = self.keys.setdefault((new.tenant, new.key), new) is new
            if key_is_new and self._take_identity(new):
                return Accepted(self._insert(new, destination))
        key = self.keys.get((new.tenant, new.key))
        event = self.identities.get((new.destination_id, new.event_id))
        standing = Standing(
            destination_state=destination.state,
            key_fingerprint=key.fingerprint if key else None,
            event_delivery_id=event.id if event else None,
            event_payload_sha256=event.body_sha256 if event else None,
        )
        return explain(new, standing, key_is_new=key_is_new)

    def _insert(self, new: NewDelivery, destination: Destination) -> Inserted:
        next_attempt_at = max(new.due_at or self.now + after(new.delay_seconds or 0), self.now)
        deadline_seconds = destination.deadline_seconds if new.deadline_seconds is None else new.deadline_seconds
        delivery = Delivery(
            id=new.id,
            destination_id=destination.id,
            created_at=self.now,
            next_attempt_at=next_attempt_at,
            deadline_at=new.deadline_at or next_attempt_at + after(deadline_seconds),
            wake_at=max(next_attempt_at, self.now + after(VISIBILITY_SECONDS)),
            attempts_max=destination.attempts_max,
        )
        self.payloads[new.id] = new
        self.deliveries[new.id] = delivery
        self.attempts[new.id] = {}
        return Inserted(
            id=delivery.id,
            created_at=delivery.created_at,
            next_attempt_at=delivery.next_attempt_at,
            deadline_at=delivery.deadline_at,
            attempts_max=delivery.attempts_max,
            hintable=next_attempt_at <= self.now and destination.state == "active",
            paused=destination.state == "paused",
        )

    # attempting

    def claim(self, delivery_ids: Sequence[uuid.UUID], worker: str) -> list[Claim]:
        """CLAIM those that are due, within their deadline, at an active destination, and free."""
        chosen = [self.deliveries[each] for each in dict.fromkeys(delivery_ids) if self._is_claimable(each)]
        claims = [self._claim(delivery, worker) for delivery in chosen]
        return sorted(claims, key=lambda claim: (claim.scheduled_at, claim.delivery_id))

    def _is_claimable(self, delivery_id: uuid.UUID) -> bool:
        delivery = self.deliveries.get(delivery_id)
        return (
            delivery is not None
            and self._may(delivery, Transition.CLAIM)
            and self._is_due(delivery)
            and delivery.deadline_at > self.now
            and self.destinations[delivery.destination_id].state == "active"
        )

    def _claim(self, delivery: Delivery, worker: str) -> Claim:
        destination = self.destinations[delivery.destination_id]
        lease_seconds = destination.timeout_seconds + LEASE_MARGIN_SECONDS
        self._move(delivery, Transition.CLAIM)
        delivery.attempt_count += 1
        delivery.claimed_at = self.now
        delivery.worker = worker
        delivery.wake_at = None
        delivery.parked = False
        delivery.lease_until = self.now + after(lease_seconds)
        return self._claimed(delivery, destination, lease_seconds)

    def _claimed(self, delivery: Delivery, destination: Destination, lease_seconds: float) -> Claim:
        payload = self.payloads[delivery.id]
        return Claim(
            delivery_id=delivery.id,
            destination_id=destination.id,
            budget=_budget(delivery),
            policy=destination.policy,
            scheduled_at=delivery.next_attempt_at,
            claimed_at=self.now,
            lease_seconds=lease_seconds,
            timeout_seconds=destination.timeout_seconds,
            trigger=delivery.next_trigger,
            event_id=payload.event_id,
            body=payload.body,
        )

    def settle(self, batch: Sequence[Settlement]) -> set[uuid.UUID]:
        """COMPLETE, RETRY, RELEASE, HOLD or BURY, and append the attempt; the ids that moved."""
        moved = set()
        for settlement in batch:
            delivery = self.deliveries[settlement.delivery_id]
            if self._is_held(delivery, settlement.number):
                self._decide(delivery, settlement)
                self._append(settlement)
                moved.add(delivery.id)
        return moved

    def _decide(self, delivery: Delivery, settlement: Settlement) -> None:
        unknown = settlement.outcome is Outcome.UNKNOWN
        delivery.may_have_been_delivered = delivery.may_have_been_delivered or unknown
        delivery.lease_until = None
        delivery.crashed_claims = settlement.crashed_claims
        delivery.next_trigger = Trigger.SCHEDULE
        delivery.last_outcome = settlement.outcome
        delivery.last_status_code = settlement.exchange.status_code if settlement.exchange else None
        match settlement.decision:
            case Complete():
                self._move(delivery, Transition.COMPLETE)
                delivery.may_have_been_delivered = False
                delivery.completed_at = self.now
            case RetryAfter(delay_seconds):
                self._move(delivery, Transition.RETRY)
                delivery.next_attempt_at = delivery.wake_at = self.now + after(delay_seconds)
            case Release(delay_seconds):
                self._move(delivery, Transition.RELEASE)
                delivery.next_attempt_at = delivery.wake_at = self.now + after(delay_seconds)
                delivery.attempts_max += 1
                delivery.uncharged_count += 1
            case Hold():
                self._move(delivery, Transition.HOLD)
            case Bury(reason):
                self._move(delivery, Transition.BURY)
                delivery.dead_reason = reason
                delivery.completed_at = self.now
            case _:
                assert_never(settlement.decision)

    def _append(self, settlement: Settlement) -> None:
        exchange = settlement.exchange
        self.attempts[settlement.delivery_id][settlement.number] = Attempt(
            number=settlement.number,
            scheduled_at=settlement.scheduled_at,
            started_at=settlement.claimed_at,
            completed_at=self.now,
            trigger=settlement.trigger,
            worker=settlement.worker,
            outcome=settlement.outcome,
            phase=exchange.phase if exchange else None,
            status_code=exchange.status_code if exchange else None,
        )

    def settle_late(self, settlement: Settlement) -> bool:
        """Keep a zombie's result on the attempt that the rescue wrote; CONFIRM what it leaves no doubt of."""
        assert settlement.exchange is not None, "only a worker that has an answer settles late"
        attempt = self.attempts[settlement.delivery_id].get(settlement.number)
        if attempt is None or attempt.phase is not None or attempt.late_outcome is not None:
            return False
        attempt.late_outcome = settlement.outcome
        delivery = self.deliveries[settlement.delivery_id]
        if settlement.outcome is not Outcome.SUCCESS or not self._may(delivery, Transition.CONFIRM):
            return False
        self._confirm(delivery)
        delivery.last_outcome = Outcome.SUCCESS
        delivery.last_status_code = settlement.exchange.status_code
        return True

    def _confirm(self, delivery: Delivery) -> None:
        self._move(delivery, Transition.CONFIRM)
        delivery.completed_at = self.now
        delivery.may_have_been_delivered = False

    # dispatching

    def take_due(self, visibility_seconds: float) -> Due:
        """Take rows whose `wake_at` has passed: to be hinted, EXPIREd, or parked. Here as elsewhere, by id."""
        due = self.take_unsendable()
        for delivery in self._awake():
            if self.destinations[delivery.destination_id].state == "active":
                delivery.wake_at = self.now + after(visibility_seconds)
                due.to_hint.append(delivery.id)
        return due

    def take_unsendable(self) -> Due:
        """Take rows whose `wake_at` has passed and that may not be sent: to be EXPIREd, or parked."""
        due = Due([], [], [])
        for delivery in self._awake():
            late = delivery.deadline_at <= self.now
            destination_state = self.destinations[delivery.destination_id].state
            if late or destination_state == "disabled":
                reason = DeadReason.DEADLINE if late else DeadReason.DISABLED
                self._expire(delivery, reason)
                due.expired.append((delivery.id, TENANT, reason))
            elif destination_state == "paused":
                due.to_park.append(delivery.id)
        return due

    def _awake(self) -> list[Delivery]:
        awake = [row for row in self.deliveries.values() if row.wake_at is not None and row.wake_at <= self.now]
        return sorted(awake, key=lambda row: row.id)

    def _expire(self, delivery: Delivery, reason: DeadReason) -> None:
        if self._may(delivery, Transition.EXPIRE):
            self._move(delivery, Transition.EXPIRE)
            delivery.dead_reason = reason
            self._end(delivery)

    def wake_hinted(self) -> int:
        """Make rows due again whose hint may be lost with the queue."""
        woken_count = 0
        horizon = self.now + after(limits.HINT_VISIBILITY_SECONDS_MAX)
        for delivery in self.deliveries.values():
            waits = delivery.wake_at is not None and self.now < delivery.wake_at <= horizon
            if waits and delivery.next_attempt_at <= self.now and not delivery.parked:
                delivery.wake_at = self.now
                woken_count += 1
        return woken_count

    def find_lost(self, stale_seconds: float) -> list[Lost]:
        """Read claims whose lease ended, or whose worker stopped beating."""
        stale_at = self.now - after(stale_seconds)
        lost = [self._lost(row) for row in self.deliveries.values() if self._is_lost(row, stale_at)]
        return sorted(lost, key=lambda each: each.delivery_id)

    def _lost(self, delivery: Delivery) -> Lost:
        assert delivery.claimed_at is not None, "it is claimed"
        return Lost(
            delivery_id=delivery.id,
            budget=_budget(delivery),
            policy=self.destinations[delivery.destination_id].policy,
            scheduled_at=delivery.next_attempt_at,
            claimed_at=delivery.claimed_at,
            trigger=delivery.next_trigger,
            worker=delivery.worker,
        )

    def _is_lost(self, delivery: Delivery, stale_at: dt.datetime) -> bool:
        if delivery.lease_until is None or delivery.claimed_at is None:
            return False
        heartbeat_at = self.heartbeats.get(delivery.worker or "")
        silent = heartbeat_at is None or heartbeat_at <= stale_at
        return delivery.lease_until <= self.now or (delivery.claimed_at <= stale_at and silent)

    def park(self, delivery_ids: list[uuid.UUID]) -> None:
        """Set rows of paused destinations aside until they are admitted, or their deadline passes."""
        for delivery in map(self.deliveries.__getitem__, delivery_ids):
            destination = self.destinations[delivery.destination_id]
            if destination.state == "paused":
                destination.gated = True
                if delivery.state is State.PENDING:
                    delivery.parked = True
                    delivery.wake_at = delivery.deadline_at

    def admit(self) -> int | None:
        """Let the parked rows of one resumed destination flow again; None when there is none."""
        marked = [each for each in self.destinations.values() if each.gated and each.state != "paused"]
        if not marked:
            return None
        destination = min(marked, key=lambda each: each.id)
        parked = [row for row in self.deliveries.values() if row.parked and row.destination_id == destination.id]
        for delivery in parked:
            delivery.parked = False
            delivery.wake_at = max(delivery.next_attempt_at, self.now)
        destination.gated = False
        return len(parked)

    def beat(self, worker: str) -> None:
        """Say that the worker lives."""
        self.heartbeats[worker] = self.now


def _budget(delivery: Delivery) -> Budget:
    """What a claim and a rescue read of the row for deciding."""
    return Budget(
        number=delivery.attempt_count,
        attempts_max=delivery.attempts_max,
        deadline_at=delivery.deadline_at,
        crashed_claims=delivery.crashed_claims,
        uncharged_count=delivery.uncharged_count,
    )
