"""The ledger in memory: small enough to be read whole, and to be run ten thousand times.

The rule: each operation is one statement of service/ledger, by the same name and with the same guards,
and does all of it or nothing. Here is what people do to it; core.py has what it does by itself. That it
is the product and no fiction, test_conformance.py shows.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import fields

from service.domain.delivery import DeadReason, State, Transition, Trigger
from service.ledger.operating import Done, Result, UnknownDelivery, WrongState
from tests.model.core import LedgerCore, after
from tests.model.rows import Attempt, Delivery, Redrive, Snapshot


class ModelLedger(LedgerCore):
    """One tenant's tables, whole."""

    # destinations

    def pause(self, destination_id: uuid.UUID) -> bool:
        """PAUSE: active → paused."""
        return self._set_destination(destination_id, {"active"}, "paused")

    def resume(self, destination_id: uuid.UUID) -> bool:
        """RESUME: paused → active."""
        return self._set_destination(destination_id, {"paused"}, "active")

    def disable(self, destination_id: uuid.UUID) -> bool:
        """DISABLE: active or paused → disabled."""
        return self._set_destination(destination_id, {"active", "paused"}, "disabled")

    def enable(self, destination_id: uuid.UUID) -> bool:
        """ENABLE: disabled → active."""
        return self._set_destination(destination_id, {"disabled"}, "active")

    def _set_destination(self, destination_id: uuid.UUID, sources: set[str], target: str) -> bool:
        destination = self.destinations[destination_id]
        if destination.state not in sources:
            return False
        destination.state = target
        destination.gated = destination.gated or target != "paused"
        return True

    # operating

    def cancel(self, delivery_id: uuid.UUID) -> Result:
        """CANCEL."""
        delivery = self.deliveries.get(delivery_id)
        if delivery is None or not self._may(delivery, Transition.CANCEL):
            return _refused(delivery)
        self._move(delivery, Transition.CANCEL)
        self._end(delivery)
        return Done()

    def retry(self, delivery_id: uuid.UUID) -> Result:
        """Make a waiting delivery due now; no transition."""
        delivery = self.deliveries.get(delivery_id)
        if delivery is None or delivery.state is not State.PENDING:
            return _refused(delivery)
        delivery.next_attempt_at = delivery.wake_at = self.now
        delivery.next_trigger = Trigger.MANUAL
        delivery.parked = delivery.parked and self.destinations[delivery.destination_id].state == "paused"
        return Done()

    def confirm(self, delivery_id: uuid.UUID) -> Result:
        """CONFIRM."""
        delivery = self.deliveries.get(delivery_id)
        if delivery is None or not self._may(delivery, Transition.CONFIRM):
            return _refused(delivery)
        self._confirm(delivery)
        return Done()

    def resend(self, delivery_id: uuid.UUID) -> Result:
        """RESEND, with at least one attempt and time for it."""
        delivery = self.deliveries.get(delivery_id)
        if delivery is None or not self._may(delivery, Transition.RESEND):
            return _refused(delivery)
        deadline_seconds = self.destinations[delivery.destination_id].deadline_seconds
        self._move(delivery, Transition.RESEND)
        delivery.next_attempt_at = delivery.wake_at = self.now
        delivery.next_trigger = Trigger.MANUAL
        delivery.attempts_max = max(delivery.attempts_max, delivery.attempt_count + 1)
        delivery.deadline_at = max(delivery.deadline_at, self.now + after(deadline_seconds))
        return Done()

    def give_up(self, delivery_id: uuid.UUID) -> Result:
        """GIVE_UP."""
        delivery = self.deliveries.get(delivery_id)
        if delivery is None or not self._may(delivery, Transition.GIVE_UP):
            return _refused(delivery)
        self._move(delivery, Transition.GIVE_UP)
        delivery.dead_reason = DeadReason.GIVEN_UP
        delivery.completed_at = self.now
        delivery.may_have_been_delivered = True
        return Done()

    def discard(self, delivery_ids: Sequence[uuid.UUID]) -> int:
        """DISCARD those that are dead; answers how many were."""
        dead = [row for row in map(self.deliveries.__getitem__, delivery_ids) if self._may(row, Transition.DISCARD)]
        for delivery in dead:
            self._move(delivery, Transition.DISCARD)
            delivery.dead_reason = None
            delivery.completed_at = self.now
        return len(dead)

    # redrives

    def start_redrive(self, redrive_id: uuid.UUID, delivery_ids: Sequence[uuid.UUID]) -> None:
        """Write a redrive with those that are dead as its items; with none it is completed at once."""
        dead = [each for each in delivery_ids if self.deliveries[each].state is State.DEAD]
        if dead:
            self.redrives[redrive_id] = Redrive(redrive_id, self.now, sorted(dead))

    def redrive(self, batch: int) -> bool:
        """REDRIVE up to `batch` items of each running redrive; whether one was left with more to do now."""
        more = False
        for running in sorted(self.redrives.values(), key=lambda each: each.id):
            taken, running.waiting = running.waiting[:batch], running.waiting[batch:]
            for delivery_id in taken:
                self._requeue(self.deliveries[delivery_id], running)
            if running.waiting:
                more = True
            else:
                del self.redrives[running.id]
        return more

    def _requeue(self, delivery: Delivery, running: Redrive) -> None:
        destination = self.destinations[delivery.destination_id]
        since = delivery.completed_at
        if not self._may(delivery, Transition.REDRIVE) or since is None or since > running.created_at:
            return
        if destination.state == "disabled":
            return
        self._move(delivery, Transition.REDRIVE)
        delivery.dead_reason = None
        delivery.completed_at = None
        delivery.next_attempt_at = delivery.wake_at = self.now
        delivery.parked = False
        delivery.uncharged_count = delivery.attempt_count
        delivery.attempts_max = delivery.attempt_count + destination.attempts_max
        delivery.deadline_at = self.now + after(destination.deadline_seconds)
        delivery.redrive_count += 1
        delivery.redrive_id = running.id
        delivery.crashed_claims = 0
        delivery.next_trigger = Trigger.REDRIVE

    def snapshot(self) -> Snapshot:
        """Every row that the conformance test compares."""
        found: Snapshot = {}
        for delivery in self.deliveries.values():
            found[f"delivery {delivery.id}"] = _columns(delivery)
            for attempt in self.attempts[delivery.id].values():
                found[f"attempt {delivery.id} {attempt.number}"] = _columns(attempt)
        for destination in self.destinations.values():
            found[f"destination {destination.id}"] = {"state": destination.state, "gated": destination.gated}
        return found


def _columns(row: Delivery | Attempt) -> dict[str, object]:
    return {column.name: getattr(row, column.name) for column in fields(row)}


def _refused(delivery: Delivery | None) -> Result:
    return UnknownDelivery() if delivery is None else WrongState(delivery.state)
