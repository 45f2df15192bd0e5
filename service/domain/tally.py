"""What is counted as it happens, so that a rate is read and never counted from the rows. Pure."""

from __future__ import annotations

from enum import StrEnum
from types import MappingProxyType
from typing import Final, assert_never

from service.domain.delivery import Bury, Complete, Decision, Hold, Release, RetryAfter
from service.domain.outcome import Outcome


class Tallied(StrEnum):
    """One thing that is counted, by the name that the ledger keeps it under."""

    ACCEPTED = "accepted"  # a request became a delivery
    REPLAYED = "replayed"  # a request came again under its key
    DUPLICATE = "duplicate"  # another key brought an event that was there
    DELIVERED = "delivered"
    DEAD = "dead"
    ATTEMPT_SUCCESS = "attempt_success"
    ATTEMPT_NOT_SENT = "attempt_not_sent"
    ATTEMPT_BLOCKED = "attempt_blocked"
    ATTEMPT_UNKNOWN = "attempt_unknown"
    ATTEMPT_REDIRECT = "attempt_redirect"
    ATTEMPT_RETRYABLE = "attempt_retryable"
    ATTEMPT_THROTTLED = "attempt_throttled"
    ATTEMPT_GONE = "attempt_gone"
    ATTEMPT_REJECTED = "attempt_rejected"


ATTEMPTS: Final = MappingProxyType({outcome: Tallied(f"attempt_{outcome.value}") for outcome in Outcome})


def ended_as(decision: Decision) -> Tallied | None:
    """What a decision makes of its delivery, where it ends it."""
    match decision:
        case Complete():
            return Tallied.DELIVERED
        case Bury():
            return Tallied.DEAD
        case RetryAfter() | Release() | Hold():
            return None
        case _:
            assert_never(decision)
