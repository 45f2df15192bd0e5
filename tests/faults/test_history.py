"""The checker itself: a good history is accepted, and each doctored one is rejected for its invariant."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from typing import Any

import pytest

from tests.faults.history import judge
from tests.faults.records import Arrival, Asked, Attempt, Delivery, History, Seen, Violation

T0 = dt.datetime(2026, 11, 30, 12, 0, tzinfo=dt.UTC)
SHA = "ab" * 32


def at(seconds: float) -> dt.datetime:
    return T0 + dt.timedelta(seconds=seconds)


STATUSES = {"success": 200, "redirect": 302, "rejected": 404, "gone": 410, "throttled": 429, "retryable": 503}


def attempt(number: int, seconds: float, outcome: str, **values: Any) -> Attempt:
    """Claimed when due, and settled a tenth of a second later."""
    given: dict[str, Any] = {"scheduled_at": at(seconds), "completed_at": at(seconds + 0.1), "trigger": "schedule"}
    given |= {"status_code": STATUSES.get(outcome)}
    return Attempt(number=number, started_at=at(seconds), outcome=outcome, **given | values)


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
    deliveries=(delivery(*ATTEMPTS, redrive_count=1, uncharged_count=3),),
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


def life(*attempts: Attempt, seen: tuple[Seen, ...] = (), **values: Any) -> Doctor:
    """Another life altogether, whose requests came and were answered as its attempts say."""
    sent = tuple(
        arrival(each.number, (each.started_at - T0).total_seconds(), each.status_code)
        for each in attempts
        if each.status_code is not None
    )
    return only(deliveries=(delivery(*attempts, **values),), arrivals=sent, seen=seen)


def both(*doctors: Doctor) -> Doctor:
    """One after the other."""
    return lambda history: reduce(lambda changed, doctor: doctor(changed), doctors, history)


def sights(*states: str) -> tuple[Seen, ...]:
    """What a GET showed, one after the other, before any redrive."""
    return tuple(Seen("dlv_1", state, 0) for state in states)


OPEN: dict[str, Any] = {"state": "pending", "completed_at": None}
RESENT = (attempt(1, 0, "unknown"), attempt(2, 20, "success", trigger="manual"))
TERMINAL_AGAIN = (*ATTEMPTS, attempt(5, 40, "success"))
DOCTORED: dict[str, tuple[str, Doctor]] = {
    "a lost delivery": ("I1", only(deliveries=(), arrivals=())),
    "a wait beyond the deadline": (
        "I1 waits for an attempt after its deadline",
        with_delivery(**OPEN, next_attempt_at=at(4_000)),
    ),
    "an acceptance without an id": ("I1 no delivery's id", more(asked=(Asked("key-1", "dst_1", SHA, 202, None),))),
    "a sight of what is not there": ("I1 was shown and is not", more(seen=(Seen("dlv_9", "pending", 0),))),
    "a state that is none": ("I1 lost, which is no state", with_delivery(state="lost")),
    "a sight of a state that is none": ("I1 was seen lost", only(seen=sights("lost"))),
    "an end without its time": ("I1 since no time", with_delivery(completed_at=None)),
    "an end that is none": ("I1 is pending and has ended", with_delivery(state="pending")),
    "dead for no reason": ("I1 for the reason None", life(attempt(1, 0, "rejected"), state="dead")),
    "a reason, and not dead": ("I1 for the reason gone", with_delivery(dead_reason="gone")),
    "dead for a reason that is none": ("I1 as bored", life(attempt(1, 0, "gone"), state="dead", dead_reason="bored")),
    "exhausted without an attempt": (
        "I1 dead as exhausted after None",
        life(state="dead", dead_reason="exhausted", completed_at=T0),
    ),
    "rejected without an attempt": (
        "I1 dead as rejected after None",
        life(state="dead", dead_reason="rejected", completed_at=T0),
    ),
    "rejected after a 503": (
        "I1 dead as rejected after retryable",
        life(attempt(1, 0, "retryable"), state="dead", dead_reason="rejected"),
    ),
    "dead by its deadline before it": (
        "I1 before it",
        life(state="dead", dead_reason="deadline", completed_at=at(10)),
    ),
    "in doubt about an answer": ("I1 ambiguous after retryable", life(attempt(1, 0, "retryable"), state="ambiguous")),
    "a wait beyond any delay": (
        "I1 3589.9 s, and 60 s is the most",
        life(attempt(1, 0, "retryable"), **OPEN, next_attempt_at=at(3_590)),
    ),
    "a stranger's delivery told as one's own": (
        "I2 was told for ('default', 'dst_1', 'key-2')",
        more(asked=(Asked("key-2", "dst_1", SHA, 202, "dlv_1"),)),
    ),
    "another event's delivery than the request named": (
        "I2 was told for ('default', 'dst_1', 'evt-1')",
        more(asked=(Asked("key-1", "dst_1", SHA, 202, "dlv_1", event_id="evt-1"),)),
    ),
    "another destination's delivery": (
        "I2 was told for ('default', 'dst_2', 'key-1')",
        more(asked=(Asked("key-1", "dst_2", SHA, 200, "dlv_1"),)),
    ),
    "two deliveries of one event": ("I2", more(deliveries=(delivery(id="dlv_2", state="pending"),))),
    "a delivery that nobody asked for": ("I2", only(asked=())),
    "one event under two ids at the receiver": ("I2", more(arrivals=(arrival(1, 2, 200, delivery_id="dlv_2"),))),
    "a phantom request": ("I3", more(arrivals=(arrival(1, 2, 200, delivery_id="dlv_9", event_id="key-9"),))),
    "a send without an attempt": ("I3", more(arrivals=(arrival(5, 21, None),))),
    "a send before its claim": ("I3", with_attempt(1, started_at=at(0.06), scheduled_at=at(0))),
    "a send whose claim was not yet committed": ("I3", with_arrival(4, witnessed=3)),
    "a request on record as never sent": ("I3", with_attempt(2, outcome="not_sent", late_outcome=None)),
    "a request that a zombie says it never sent": ("I3 says not_sent", with_attempt(2, late_outcome="not_sent")),
    "a request that was begun under a later claim": (
        "I3 begun under the claim of a later one",
        with_arrival(2, at=at(6.5), timestamp=int(at(6).timestamp()), witnessed=3),
    ),
    "a request unanswered when the next was claimed": (
        "I3 unanswered while attempt 2 was claimed",
        with_arrival(1, witnessed=2),
    ),
    "a request after its outcome": ("I3 came after it was settled as retryable", with_arrival(1, at=at(0.11))),
    "two attempts at once": ("I3 claimed while the last was under way", with_attempt(3, completed_at=at(21))),
    "an attempt that ended before it began": (
        "I3 completed before it was claimed",
        with_attempt(4, completed_at=at(6)),
    ),
    "two requests of one attempt": ("I4", more(arrivals=(arrival(2, 1.01, 200),))),
    "delivered without a 2xx": ("I5", with_arrival(4, answered=503)),
    "a late success that was never given": ("I5", with_arrival(2, answered=None)),
    "a 2xx on record as a failure": ("I5", with_arrival(3, answered=200)),
    "a 2xx that a late result calls a failure": ("I5 is late a rejected", with_attempt(2, late_outcome="rejected")),
    "a late failure that was never given": (
        "I5 is retryable by an answer that was never given",
        both(with_attempt(2, late_outcome="retryable"), with_arrival(2, answered=None)),
    ),
    "an answer without a request": (
        "I5 503, which the receiver never gave",
        only(arrivals=ARRIVALS[1:]),
    ),
    "another status than the receiver gave": (
        "I5 400, which the receiver never gave",
        with_attempt(3, status_code=400),
    ),
    "an answer without a status": ("I5 by the status None", with_attempt(3, status_code=None)),
    "a status without an answer": ("I5 is unknown by the status 200", with_attempt(2, status_code=200)),
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
    "a success that was redriven": (
        "I6 attempt 2 was made after a success",
        life(attempt(1, 0, "success"), attempt(2, 20, "success", trigger="redrive"), redrive_count=1),
    ),
    "a success that a person sent again": (
        "I6 attempt 2 was made after a success",
        life(attempt(1, 0, "success"), attempt(2, 20, "success", trigger="manual")),
    ),
    "delivered, redriven, then dead": (
        "I6 succeeded, and is dead",
        life(
            attempt(1, 0, "success"),
            attempt(2, 20, "rejected", trigger="redrive"),
            state="dead",
            dead_reason="rejected",
            redrive_count=1,
        ),
    ),
    **{
        f"{outcome}, then tried again": (
            "I6 attempt 2 was made after the end, without a redrive",
            life(attempt(1, 0, outcome), attempt(2, 20, "success"), redrive_count=1),
        )
        for outcome in ("rejected", "gone", "blocked")
    },
    "rejected, then sent again by a person without a redrive": (
        "I6 its attempts tell of 1 redrives, and it had 0",
        life(attempt(1, 0, "rejected"), attempt(2, 20, "success", trigger="manual")),
    ),
    "more rounds than redrives": (
        "I6 its attempts tell of 2 redrives, and it had 1",
        life(
            attempt(1, 0, "rejected"),
            attempt(2, 20, "rejected", trigger="redrive"),
            attempt(3, 40, "success", trigger="redrive"),
            redrive_count=1,
        ),
    ),
    "a redrive that was forgotten": (
        "I6 was seen redriven 2 times and then 1",
        only(seen=(Seen("dlv_1", "pending", 2), Seen("dlv_1", "pending", 1))),
    ),
    "ambiguous, then tried again by nobody's word": (
        "I6 was seen ambiguous, and is delivered by nobody's word",
        life(attempt(1, 0, "unknown"), attempt(2, 20, "success"), seen=sights("ambiguous")),
    ),
    "ambiguous, then waiting by nobody's word": (
        "I6 was seen ambiguous, and is pending by nobody's word",
        life(attempt(1, 0, "unknown"), **OPEN, next_attempt_at=at(20), seen=sights("ambiguous")),
    ),
    "ambiguous, then dead by nobody's word": (
        "I6 was seen ambiguous, and is dead by nobody's word",
        life(attempt(1, 0, "unknown"), state="dead", dead_reason="exhausted", seen=sights("ambiguous")),
    ),
    "ambiguous after an answer": ("I6 was seen ambiguous", life(attempt(1, 0, "success"), seen=sights("ambiguous"))),
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
    "a timestamp from before the claim": (
        "I8 dated before its claim",
        with_arrival(3, timestamp=int(at(1).timestamp())),
    ),
    "attempts in a hot loop, none of them sent": (
        "I9 attempt 2 came 0.100 s after the last",
        life(attempt(1, 0, "not_sent"), attempt(2, 0.2, "not_sent"), attempt(3, 5, "success")),
    ),
    "a claim after the deadline": (
        "I9 attempt 2 was claimed after the deadline",
        life(attempt(1, 0, "retryable"), attempt(2, 3_601, "success")),
    ),
    "an early retry": ("I9", with_attempt(2, started_at=at(0.3), scheduled_at=at(0.3))),
    "a claim before its time": ("I9", with_attempt(3, scheduled_at=at(5.01))),
    "a Retry-After that was not kept": ("I9", with_arrival(1, retry_after_seconds=30.0)),
    "a request after the end": ("I9", with_delivery(completed_at=at(10))),
    "a delivery that never drained": (
        "I10",
        with_delivery(**OPEN, next_attempt_at=at(50)),
    ),
    "a claim that nobody gave back": ("I10", with_delivery(state="delivering", attempt_count=5, completed_at=None)),
    "a gauge that stays up": ("I10 stands at 3", only(gauges={"hints": 3, "leases": 0})),
    "a queue that nobody looked at": ("I10 hints: was not looked at", only(gauges={"leases": 0})),
    "leases that nobody looked at": ("I10 leases: was not looked at", only(gauges={"hints": 0})),
    "another tenant's row": ("I11", with_delivery(tenant="other")),
    "a row shown to another tenant": ("I11", more(seen=(Seen("dlv_1", "delivered", 1, tenant="other"),))),
    "one key accepted twice": (
        "I12 answered 2 times as if it were new",
        more(asked=(Asked("key-1", "dst_1", SHA, 202, "dlv_1"),)),
    ),
    "one key answered with two deliveries": (
        "I12 one key was answered with 2 deliveries",
        more(
            asked=(Asked("key-1", "dst_1", SHA, 200, "dlv_2"), Asked("key-2", "dst_1", SHA, 202, "dlv_2")),
            deliveries=(delivery(id="dlv_2", event_id="key-2", state="cancelled"),),
        ),
    ),
}


# What looks like a violation and is none.
GOOD_TOO: dict[str, Doctor] = {
    "an event with a name of its own": both(
        with_delivery(event_id="evt-1"),
        only(
            asked=(Asked("key-1", "dst_1", SHA, 202, "dlv_1", event_id="evt-1"),),
            arrivals=tuple(replace(each, event_id="evt-1") for each in ARRIVALS),
        ),
    ),
    "a request that was on the wire for longer than its claim lasted": with_arrival(
        2, at=at(6.5), timestamp=int(at(1).timestamp()), witnessed=3
    ),
    "a status that is none, and is tried again": life(
        attempt(1, 0, "rejected", status_code=600), attempt(2, 20, "success")
    ),
    "a redrive that a person hastened": life(
        attempt(1, 0, "rejected"), attempt(2, 20, "success", trigger="manual"), redrive_count=1
    ),
    "a redrive that is yet to come": life(
        attempt(1, 0, "rejected"), **OPEN, next_trigger="redrive", next_attempt_at=at(61), redrive_count=1
    ),
    "a claim of a redrive after the first deadline": life(
        attempt(1, 0, "rejected"),
        attempt(2, 5_000, "success", trigger="redrive"),
        redrive_count=1,
        deadline_at=at(8_600),
    ),
    "attempts that were released, one soon after the other": life(
        attempt(1, 0, "not_sent"), attempt(2, 0.2, "not_sent"), attempt(3, 0.4, "success"), uncharged_count=2
    ),
    "a wait that was asked for": both(
        life(attempt(1, 0, "throttled"), **OPEN, next_attempt_at=at(900)), with_arrival(1, retry_after_seconds=890.0)
    ),
    "ambiguous, then sent again by a person": life(*RESENT, seen=sights("ambiguous", "pending", "delivered")),
    "ambiguous, sent again, and dead before it was": life(
        RESENT[0], state="dead", dead_reason="disabled", next_trigger="manual", seen=sights("ambiguous", "pending")
    ),
    "ambiguous, then given up": life(RESENT[0], state="dead", dead_reason="given_up", seen=sights("ambiguous")),
    "ambiguous, given up, then discarded": life(RESENT[0], state="cancelled", seen=sights("ambiguous", "dead")),
    "ambiguous to the end": life(RESENT[0], state="ambiguous", completed_at=None, seen=sights("ambiguous")),
    "ambiguous, then settled by a late answer to an earlier attempt": both(
        life(
            attempt(1, 0, "unknown", late_outcome="success"),
            attempt(2, 20, "unknown", trigger="manual"),
            completed_at=at(50),
            seen=sights("ambiguous", "pending", "ambiguous", "delivered"),
        ),
        only(arrivals=(arrival(1, 0, 200), arrival(2, 20, None))),
    ),
    "dead by its deadline, unattempted": life(state="dead", dead_reason="deadline", completed_at=at(3_601)),
}


def test_a_good_history_is_accepted() -> None:
    assert judge(GOOD) == []


def test_a_history_that_goes_on_is_accepted() -> None:
    under_way = delivery(ATTEMPTS[0], state="delivering", attempt_count=2, completed_at=None, next_attempt_at=at(1))
    running = replace(GOOD, deliveries=(under_way,), arrivals=ARRIVALS[:2], seen=GOOD.seen[:1], drained=False)
    assert judge(replace(running, gauges={"hints": 7})) == []


@pytest.mark.parametrize("name", GOOD_TOO)
def test_what_may_happen_is_accepted(name: str) -> None:
    assert judge(GOOD_TOO[name](GOOD)) == []


@pytest.mark.parametrize("name", DOCTORED)
def test_a_doctored_history_is_rejected_for_its_invariant(name: str) -> None:
    wanted, doctor = DOCTORED[name]
    invariant, _, words = wanted.partition(" ")
    found = judge(doctor(GOOD))
    assert [each for each in found if each.invariant == invariant and words in str(each)], found


@pytest.mark.parametrize("invariant", [f"I{number}" for number in range(1, 13)])
def test_every_invariant_has_a_doctored_history(invariant: str) -> None:
    assert invariant in {wanted.partition(" ")[0] for wanted, _ in DOCTORED.values()}


def test_a_violation_is_told_in_one_sentence() -> None:
    assert str(Violation("I1", "dlv_1", "is lost")) == "I1 dlv_1: is lost"
