"""The checker itself: a good history is accepted, and each doctored one is rejected for its invariant."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.faults.history import Arrival, Asked, Attempt, Delivery, History, Seen, Violation, judge

T0 = dt.datetime(2026, 11, 30, 12, 0, tzinfo=dt.UTC)
SHA = "ab" * 32


def at(seconds: float) -> dt.datetime:
    return T0 + dt.timedelta(seconds=seconds)


def attempt(number: int, seconds: float, outcome: str, **values: Any) -> Attempt:
    """Claimed when due, and settled a tenth of a second later."""
    given: dict[str, Any] = {"scheduled_at": at(seconds), "trigger": "schedule"}
    return Attempt(
        number=number, started_at=at(seconds), completed_at=at(seconds + 0.1), outcome=outcome, **given | values
    )


def arrival(number: int, seconds: float, answered: int | None, **values: Any) -> Arrival:
    """Came moments after its claim."""
    moment = at(seconds + 0.05)
    given: dict[str, Any] = {"delivery_id": "dlv_1", "event_id": "key-1", "body_sha256": SHA, "signed": True}
    given |= {"timestamp": int(moment.timestamp()), "witnessed": number}
    return Arrival(attempt=number, at=moment, answered=answered, **given | values)


def delivery(*attempts: Attempt, **values: Any) -> Delivery:
    given: dict[str, Any] = {
        "id": "dlv_1",
        "tenant": "default",
        "destination_id": "dst_1",
        "event_id": "key-1",
        "body_sha256": SHA,
        "state": "delivered",
        "attempt_count": len(attempts),
        "redrive_count": 0,
        "created_at": T0,
        "next_attempt_at": attempts[-1].scheduled_at if attempts else T0,
        "deadline_at": at(3_600),
        "completed_at": attempts[-1].completed_at if attempts else None,
        "base_seconds": 1.0,
        "cap_seconds": 60.0,
        "attempts": attempts,
    }
    return Delivery(**given | values)


# A 503, an answer that nobody read, a 404, a redrive that arrived.
ATTEMPTS = (
    attempt(1, 0, "retryable"),
    attempt(2, 1, "unknown", late_outcome="success"),
    attempt(3, 5, "rejected"),
    attempt(4, 20, "success", trigger="redrive"),
)
ARRIVALS = (arrival(1, 0, 503), arrival(2, 1, 200), arrival(3, 5, 404), arrival(4, 20, 200))
GOOD = History(
    asked=(
        Asked("key-1", "dst_1", SHA, None, None),
        Asked("key-1", "dst_1", SHA, 503, None),
        Asked("key-1", "dst_1", SHA, 202, "dlv_1"),
        Asked("key-1", "dst_1", SHA, 200, "dlv_1"),
    ),
    seen=(
        Seen("dlv_1", "pending", 0),
        Seen("dlv_1", "dead", 0),
        Seen("dlv_1", "delivering", 1),
        Seen("dlv_1", "delivered", 1),
    ),
    arrivals=ARRIVALS,
    deliveries=(delivery(*ATTEMPTS, redrive_count=1),),
    read_at=at(60),
    drained=True,
    gauges={"hints": 0, "leases": 0},
)

Doctor = Callable[[History], History]


def with_delivery(**values: Any) -> Doctor:
    """The ledger's row, changed."""
    return lambda history: replace(history, deliveries=(replace(history.deliveries[0], **values),))


def with_attempt(number: int, **values: Any) -> Doctor:
    """One attempt, changed."""

    def doctor(history: History) -> History:
        found = history.deliveries[0]
        attempts = tuple(replace(each, **values) if each.number == number else each for each in found.attempts)
        return replace(history, deliveries=(replace(found, attempts=attempts),))

    return doctor


def with_arrival(number: int, **values: Any) -> Doctor:
    """One request, changed."""
    return lambda history: replace(
        history,
        arrivals=tuple(replace(each, **values) if each.attempt == number else each for each in history.arrivals),
    )


def more(**values: Any) -> Doctor:
    """Each log, lengthened."""
    return lambda history: replace(history, **{name: getattr(history, name) + more for name, more in values.items()})


def only(**values: Any) -> Doctor:
    """Logs, replaced."""
    return lambda history: replace(history, **values)


TERMINAL_AGAIN = (*ATTEMPTS, attempt(5, 40, "success"))
DOCTORED: dict[str, tuple[str, Doctor]] = {
    "a lost delivery": ("I1", only(deliveries=(), arrivals=())),
    "a wait beyond the deadline": (
        "I1",
        with_delivery(state="pending", completed_at=None, next_attempt_at=at(4_000)),
    ),
    "two deliveries of one event": ("I2", more(deliveries=(delivery(id="dlv_2", state="pending"),))),
    "a delivery that nobody asked for": ("I2", only(asked=())),
    "one event under two ids at the receiver": ("I2", more(arrivals=(arrival(1, 2, 200, delivery_id="dlv_2"),))),
    "a phantom request": ("I3", more(arrivals=(arrival(1, 2, 200, delivery_id="dlv_9", event_id="key-9"),))),
    "a send without an attempt": ("I3", more(arrivals=(arrival(5, 21, None),))),
    "a send before its claim": ("I3", with_attempt(1, started_at=at(0.06), scheduled_at=at(0))),
    "a send whose claim was not yet committed": ("I3", with_arrival(4, witnessed=3)),
    "a request on record as never sent": ("I3", with_attempt(2, outcome="not_sent", late_outcome=None)),
    "two requests of one attempt": ("I4", more(arrivals=(arrival(2, 1.01, 200),))),
    "delivered without a 2xx": ("I5", with_arrival(4, answered=503)),
    "a late success that was never given": ("I5", with_arrival(2, answered=None)),
    "a 2xx on record as a failure": ("I5", with_arrival(3, answered=200)),
    "delivered with nothing to show": ("I5", with_attempt(4, outcome="unknown")),
    "a terminal state that came back": (
        "I6",
        only(
            deliveries=(delivery(*TERMINAL_AGAIN, redrive_count=1),),
            arrivals=(*ARRIVALS, arrival(5, 40, 200)),
        ),
    ),
    "delivered, then seen pending": ("I6", more(seen=(Seen("dlv_1", "pending", 1),))),
    "dead, then pending without a redrive": (
        "I6",
        only(seen=(Seen("dlv_1", "dead", 1), Seen("dlv_1", "pending", 1))),
    ),
    "a success that ended dead": ("I6", with_delivery(state="dead")),
    "a gap in the numbers": (
        "I7",
        only(
            deliveries=(delivery(ATTEMPTS[0], *ATTEMPTS[2:], redrive_count=1),), arrivals=(ARRIVALS[0], *ARRIVALS[2:])
        ),
    ),
    "a number that was given out and left no trace": ("I7", with_delivery(attempt_count=5)),
    "a changed body": ("I8", with_arrival(2, body_sha256="cd" * 32)),
    "other bytes than were posted": ("I8", more(asked=(Asked("key-1", "dst_1", "cd" * 32, 200, "dlv_1"),))),
    "a signature that does not hold": ("I8", with_arrival(1, signed=False)),
    "a timestamp that was not renewed": ("I8", with_arrival(4, timestamp=int(at(1).timestamp()))),
    "an early retry": ("I9", with_attempt(2, started_at=at(0.3), scheduled_at=at(0.3))),
    "a claim before its time": ("I9", with_attempt(3, scheduled_at=at(5.01))),
    "a Retry-After that was not kept": ("I9", with_arrival(1, retry_after_seconds=30.0)),
    "a request after the end": ("I9", with_delivery(completed_at=at(10))),
    "a delivery that never drained": (
        "I10",
        with_delivery(state="pending", completed_at=None, next_attempt_at=at(50)),
    ),
    "a claim that nobody gave back": ("I10", with_delivery(state="delivering", attempt_count=5, completed_at=None)),
    "a gauge that stays up": ("I10", only(gauges={"hints": 3})),
    "another tenant's row": ("I11", with_delivery(tenant="other")),
    "a row shown to another tenant": ("I11", more(seen=(Seen("dlv_1", "delivered", 1, tenant="other"),))),
    "one key answered with two deliveries": (
        "I12",
        more(
            asked=(Asked("key-1", "dst_1", SHA, 200, "dlv_2"), Asked("key-2", "dst_1", SHA, 202, "dlv_2")),
            deliveries=(delivery(id="dlv_2", event_id="key-2", state="cancelled"),),
        ),
    ),
}


def test_a_good_history_is_accepted() -> None:
    assert judge(GOOD) == []


def test_a_history_that_goes_on_is_accepted() -> None:
    under_way = delivery(ATTEMPTS[0], state="delivering", attempt_count=2, completed_at=None, next_attempt_at=at(1))
    running = replace(GOOD, deliveries=(under_way,), arrivals=ARRIVALS[:2], seen=GOOD.seen[:1], drained=False)
    assert judge(replace(running, gauges={"hints": 7})) == []


@pytest.mark.parametrize("name", DOCTORED)
def test_a_doctored_history_is_rejected_for_its_invariant(name: str) -> None:
    invariant, doctor = DOCTORED[name]
    assert invariant in {violation.invariant for violation in judge(doctor(GOOD))}


@pytest.mark.parametrize("invariant", [f"I{number}" for number in range(1, 13)])
def test_every_invariant_has_a_doctored_history(invariant: str) -> None:
    assert invariant in {wanted for wanted, _ in DOCTORED.values()}


def test_a_violation_is_told_in_one_sentence() -> None:
    assert str(Violation("I1", "dlv_1", "is lost")) == "I1 dlv_1: is lost"
