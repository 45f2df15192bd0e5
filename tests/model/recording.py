"""The three logs of a run on the model, in the terms of the history checker that judges real runs.

The rule: the judge is not ours. What rejects a run of real processes (tests/faults/history.py) rejects
one of the model, by the same invariants.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping

from service.accept import Accepted, Answer, Duplicate, Replayed
from service.domain.delivery import State
from service.ledger.accepting import NewDelivery
from tests.faults.history import judge
from tests.faults.records import Arrival, Asked, Attempt, Delivery, History, Seen, Violation
from tests.model.ledger import ModelLedger
from tests.model.rows import TENANT, Claim
from tests.model.rows import Delivery as Row


def request(
    delivery_id: uuid.UUID,
    destination_id: uuid.UUID,
    event_id: str,
    *,
    key: str,
    body: bytes,
    delay_seconds: float | None = None,
    deadline_seconds: float | None = None,
) -> NewDelivery:
    """One client's request, ready for the ledger."""
    return NewDelivery(
        id=delivery_id,
        tenant=TENANT,
        key=key,
        fingerprint=hashlib.sha256(b"%s %s %s" % (destination_id.bytes, event_id.encode(), body)).digest(),
        destination_id=destination_id,
        event_id=event_id,
        event_type=None,
        content_type="application/json",
        headers=None,
        metadata=None,
        body=body,
        body_sha256=hashlib.sha256(body).digest(),
        delay_seconds=delay_seconds,
        deadline_seconds=deadline_seconds,
    )


class Recorder:
    """What the API told, what the receiver saw, and what a person confirmed."""

    def __init__(self) -> None:
        self.confirmed: set[uuid.UUID] = set()
        self._asked: list[Asked] = []
        self._seen: list[Seen] = []
        self._arrivals: list[Arrival] = []

    def answer(self, new: NewDelivery, answer: Answer | None) -> None:
        """Note what the client was told; None when no answer came."""
        status: int | None = None
        told_id: str | None = None
        match answer:
            case Accepted(row):
                status, told_id = 202, str(row.id)
            case Replayed(known_id) | Duplicate(known_id):
                status, told_id = 200, str(known_id)
            case None:
                pass
            case _:
                status = 409
        self._asked.append(
            Asked(
                key=new.key,
                destination_id=str(new.destination_id),
                body_sha256=new.body_sha256.hex(),
                status=status,
                delivery_id=told_id,
                event_id=new.event_id,
            )
        )

    def arrival(self, ledger: ModelLedger, claim: Claim, answered: int | None, retry_after: float = 0.0) -> None:
        """Note a request at the receiver, and which claim the ledger held at that moment."""
        self._arrivals.append(
            Arrival(
                delivery_id=str(claim.delivery_id),
                attempt=claim.budget.number,
                event_id=claim.event_id,
                at=ledger.now,
                body_sha256=hashlib.sha256(claim.body).hexdigest(),
                signed=True,
                timestamp=ledger.now.timestamp(),
                answered=answered,
                retry_after_seconds=retry_after,
                witnessed=ledger.deliveries[claim.delivery_id].attempt_count,
            )
        )

    def has_yes(self, delivery_id: uuid.UUID) -> bool:
        """What a person finds in the receiver's log: whether it took the delivery."""
        return any(each.delivery_id == str(delivery_id) and each.answered == 200 for each in self._arrivals)

    def look(self, ledger: ModelLedger) -> None:
        """Note how every delivery is shown."""
        self._seen += [Seen(str(row.id), self._told(row.id, row.state), row.redrive_count) for row in _rows(ledger)]

    def judge(self, ledger: ModelLedger, *, gauges: Mapping[str, int], drained: bool) -> list[Violation]:
        """Every violation so far."""
        found = judge(self._history(ledger, gauges, drained))
        return found + [
            Violation("I6", str(each), "was confirmed by a person and is delivered no more")
            for each in self.confirmed
            if ledger.deliveries[each].state is not State.DELIVERED
        ]

    def _told(self, delivery_id: uuid.UUID, state: State) -> str:
        """A state for the checker: what a person confirmed stays as ambiguous as the receiver left it."""
        confirmed = delivery_id in self.confirmed and state is State.DELIVERED
        return State.AMBIGUOUS.value if confirmed else state.value

    def _history(self, ledger: ModelLedger, gauges: Mapping[str, int], drained: bool) -> History:
        return History(
            asked=tuple(self._asked),
            seen=tuple(self._seen),
            arrivals=tuple(self._arrivals),
            deliveries=tuple(self._delivery(ledger, row.id) for row in _rows(ledger)),
            read_at=ledger.now,
            drained=drained,
            gauges=gauges,
        )

    def _delivery(self, ledger: ModelLedger, delivery_id: uuid.UUID) -> Delivery:
        row = ledger.deliveries[delivery_id]
        payload = ledger.payloads[delivery_id]
        policy = ledger.destinations[row.destination_id].policy
        attempts = ledger.attempts[delivery_id]
        return Delivery(
            id=str(delivery_id),
            tenant=TENANT,
            destination_id=str(row.destination_id),
            event_id=payload.event_id,
            body_sha256=payload.body_sha256.hex(),
            state=self._told(delivery_id, row.state),
            attempt_count=row.attempt_count,
            redrive_count=row.redrive_count,
            created_at=row.created_at,
            next_attempt_at=row.next_attempt_at,
            deadline_at=row.deadline_at,
            completed_at=row.completed_at,
            base_seconds=policy.base_seconds,
            cap_seconds=policy.cap_seconds,
            dead_reason=row.dead_reason.value if row.dead_reason else None,
            next_trigger=row.next_trigger,
            uncharged_count=row.uncharged_count,
            attempts=tuple(
                Attempt(
                    number=each.number,
                    scheduled_at=each.scheduled_at,
                    started_at=each.started_at,
                    completed_at=each.completed_at,
                    trigger=each.trigger,
                    outcome=each.outcome.value,
                    status_code=each.status_code,
                    late_outcome=each.late_outcome.value if each.late_outcome else None,
                )
                for each in (attempts[number] for number in sorted(attempts))
            ),
        )


def _rows(ledger: ModelLedger) -> list[Row]:
    return list(ledger.deliveries.values())
