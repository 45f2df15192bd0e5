"""When the next attempt is due, and when there is none: pure, with `now` and `jitter` as arguments."""

from __future__ import annotations

import datetime as dt
import email.utils
import re
from dataclasses import dataclass
from typing import Final, assert_never

from service.domain import limits
from service.domain.delivery import Bury, Complete, DeadReason, Decision, Hold, OnAmbiguous, Release, RetryAfter
from service.domain.outcome import OUR_FAULTS, Exchange, Fault, Outcome, is_nonsense

BASE_SECONDS_DEFAULT: Final = 5.0
CAP_SECONDS_DEFAULT: Final = 12 * 3_600.0
DEADLINE_SECONDS_DEFAULT: Final = 3 * 86_400

# On top of an explicit schedule or a Retry-After: enough to spread a crowd, little enough to read.
_ON_TOP_RATIO: Final = 0.1

# After a fault of our own: long enough not to spin, short enough that nobody waits for a mended bug.
_OWN_FAULT_DELAY_SECONDS: Final = 30.0

_DELTA_SECONDS = re.compile(r"[0-9]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """A destination's delays: an explicit schedule, or doubling from `base_seconds` up to `cap_seconds`."""

    base_seconds: float = BASE_SECONDS_DEFAULT
    cap_seconds: float = CAP_SECONDS_DEFAULT
    schedule_seconds: tuple[float, ...] | None = None
    on_ambiguous: OnAmbiguous = OnAmbiguous.RETRY


@dataclass(frozen=True, slots=True)
class Budget:
    """What is left to a delivery: attempt `number` of `attempts_max`, until `deadline_at`.

    `crashed_claims` counts the claims in a row, this one excluded, that ended without an outcome.
    `uncharged_count` counts the earlier attempts that the schedule does not: those before the latest
    redrive, and those that were released.
    """

    number: int
    attempts_max: int
    deadline_at: dt.datetime
    crashed_claims: int = 0
    uncharged_count: int = 0


def decide(
    outcome: Outcome,
    exchange: Exchange,
    policy: RetryPolicy,
    budget: Budget,
    *,
    now: dt.datetime,
    wall_now: dt.datetime,
    jitter: float,
) -> Decision:
    """Say what becomes of a delivery after an attempt.

    `now` is the database's time, for the deadline; `wall_now` the application's, for a
    `Retry-After` date alone; `jitter` is uniform in [0, 1).
    """
    match outcome:
        case Outcome.SUCCESS:
            return Complete()
        case Outcome.BLOCKED:
            return Bury(DeadReason.BLOCKED)
        case Outcome.GONE:
            return Bury(DeadReason.GONE)
        case Outcome.REJECTED if not is_nonsense(exchange.status_code):
            return Bury(DeadReason.REJECTED)
        case Outcome.NOT_SENT if exchange.fault in OUR_FAULTS:
            return Release(0.0 if exchange.fault is Fault.SHUTDOWN else _own_fault_seconds(budget, now, jitter))
        case Outcome.UNKNOWN if policy.on_ambiguous is OnAmbiguous.HOLD:
            return Hold()
        case (
            Outcome.UNKNOWN
            | Outcome.NOT_SENT
            | Outcome.REDIRECT
            | Outcome.RETRYABLE
            | Outcome.THROTTLED
            | Outcome.REJECTED
        ):
            asked_seconds = parse_retry_after(exchange.retry_after, wall_now)
            return _again(policy, budget, asked_seconds, now=now, jitter=jitter)
        case _:
            assert_never(outcome)


def decide_lost(policy: RetryPolicy, budget: Budget, *, now: dt.datetime, jitter: float) -> Decision:
    """Say what becomes of a delivery whose worker was lost between claim and settle.

    The claim itself may be what kills workers: after CRASHED_CLAIMS_MAX in a row it is poison.
    """
    if budget.crashed_claims + 1 >= limits.CRASHED_CLAIMS_MAX:
        return Bury(DeadReason.POISON)
    if policy.on_ambiguous is OnAmbiguous.HOLD:
        return Hold()
    return _again(policy, budget, None, now=now, jitter=jitter)


def _own_fault_seconds(budget: Budget, now: dt.datetime, jitter: float) -> float:
    """How soon to try again after a fault of our own: half the time left, at most, so that one still fits."""
    left_seconds = (budget.deadline_at - now).total_seconds()
    return max(0.0, min(_OWN_FAULT_DELAY_SECONDS * (1 - jitter / 2), left_seconds / 2))


def _again(
    policy: RetryPolicy, budget: Budget, asked_seconds: float | None, *, now: dt.datetime, jitter: float
) -> Decision:
    """Another attempt if the budget and the deadline leave room for one."""
    if budget.number >= budget.attempts_max:
        return Bury(DeadReason.EXHAUSTED)
    delay_seconds = backoff_seconds(policy, budget.number - budget.uncharged_count, jitter)
    if asked_seconds is not None:
        delay_seconds = max(delay_seconds, asked_seconds * (1 + _ON_TOP_RATIO * jitter))
    if now + dt.timedelta(seconds=delay_seconds) > budget.deadline_at:
        return Bury(DeadReason.DEADLINE)
    return RetryAfter(delay_seconds)


def backoff_seconds(policy: RetryPolicy, number: int, jitter: float) -> float:
    """The delay after the `number`th charged attempt (1, 2, 3 …), in seconds: positive, never beyond the cap.

    Doubling with full jitter over the step: drawn from the whole interval between the step before
    and this one, (b/2, b]. So a crowd is spread over half of every delay, and still each delay of
    one delivery is longer than the one before, until the cap (docs/adr/0004).
    """
    if policy.schedule_seconds is not None:
        step_seconds = policy.schedule_seconds[min(number, len(policy.schedule_seconds)) - 1]
        return step_seconds * (1 + _ON_TOP_RATIO * jitter)
    # 2 ** 63 steps is beyond any cap; a larger exponent would overflow a float.
    step_seconds = min(policy.cap_seconds, policy.base_seconds * 2.0 ** min(number - 1, 63))
    return step_seconds * (1 - jitter / 2)


def parse_retry_after(raw: str | None, wall_now: dt.datetime) -> float | None:
    """Read a Retry-After header (RFC 9110, 10.2.3): seconds from now, capped; None when it asks nothing.

    Digits or one of the three HTTP date forms; everything else, the past included, is no wish.
    """
    if raw is None:
        return None
    text = raw.strip(" \t")
    if _DELTA_SECONDS.fullmatch(text):
        # Past nine digits it is beyond the cap, and int() of thousands of digits is refused by Python.
        asked_seconds = float(text) if len(text) <= 9 else float(limits.RETRY_AFTER_SECONDS_MAX)
    else:
        at = _parse_http_date(text)
        if at is None:
            return None
        asked_seconds = (at - wall_now).total_seconds()
    return min(asked_seconds, float(limits.RETRY_AFTER_SECONDS_MAX)) if asked_seconds > 0 else None


def _parse_http_date(text: str) -> dt.datetime | None:
    if not text[:3].isalpha() or len(text) > 64:
        return None
    try:
        at = email.utils.parsedate_to_datetime(text)
        # "-0000" and asctime carry no zone; HTTP dates are UTC by definition.
        return at.replace(tzinfo=dt.UTC) if at.tzinfo is None else at.astimezone(dt.UTC)
    except (ValueError, TypeError, OverflowError, IndexError):
        return None
