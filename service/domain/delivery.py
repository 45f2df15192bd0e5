"""The states of a delivery and every way from one to another. Nothing else in the service moves one.

`TRANSITIONS` is the whole machine: the ledger's statements are named after its transitions and
guarded by their sources, the database repeats its invariants as CHECKs, and docs/states.md is
drawn from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class State(StrEnum):
    """Where a delivery stands."""

    PENDING = "pending"
    DELIVERING = "delivering"
    DELIVERED = "delivered"
    AMBIGUOUS = "ambiguous"
    DEAD = "dead"
    CANCELLED = "cancelled"


class Transition(StrEnum):
    """What can happen to a delivery, one name each."""

    CLAIM = "claim"  # a worker takes the right to make attempt n
    COMPLETE = "complete"  # attempt n was answered with success
    RETRY = "retry"  # attempt n failed or is unknown; attempt n + 1 is scheduled
    RELEASE = "release"  # attempt n was never sent, through no fault of the receiver: uncharged
    HOLD = "hold"  # attempt n is unknown and the destination's policy says hold
    BURY = "bury"  # attempt n ends it: to the dead-letter queue
    EXPIRE = "expire"  # the deadline passed, or the destination was disabled, while it waited
    CANCEL = "cancel"
    REDRIVE = "redrive"
    DISCARD = "discard"
    CONFIRM = "confirm"  # ambiguous, and it arrived: by an operator's word or a late answer
    RESEND = "resend"  # ambiguous, and an operator says send again
    GIVE_UP = "give_up"  # ambiguous, and an operator says let it be dead


TRANSITIONS: Final = MappingProxyType(
    {
        Transition.CLAIM: (State.PENDING, State.DELIVERING),
        Transition.COMPLETE: (State.DELIVERING, State.DELIVERED),
        Transition.RETRY: (State.DELIVERING, State.PENDING),
        Transition.RELEASE: (State.DELIVERING, State.PENDING),
        Transition.HOLD: (State.DELIVERING, State.AMBIGUOUS),
        Transition.BURY: (State.DELIVERING, State.DEAD),
        Transition.EXPIRE: (State.PENDING, State.DEAD),
        Transition.CANCEL: (State.PENDING, State.CANCELLED),
        Transition.REDRIVE: (State.DEAD, State.PENDING),
        Transition.DISCARD: (State.DEAD, State.CANCELLED),
        Transition.CONFIRM: (State.AMBIGUOUS, State.DELIVERED),
        Transition.RESEND: (State.AMBIGUOUS, State.PENDING),
        Transition.GIVE_UP: (State.AMBIGUOUS, State.DEAD),
    }
)

TERMINAL: Final = frozenset({State.DELIVERED, State.CANCELLED})


class DeadReason(StrEnum):
    """Why a delivery is in the dead-letter queue."""

    REJECTED = "rejected"  # the receiver said no (a 4xx)
    GONE = "gone"  # the receiver said never again (410)
    EXHAUSTED = "exhausted"  # every attempt of the budget was made
    DEADLINE = "deadline"  # no further attempt fits before the deadline
    BLOCKED = "blocked"  # the URL or its address is not allowed
    POISON = "poison"  # it ended its worker several times in a row
    DISABLED = "disabled"  # the destination was disabled while it waited
    GIVEN_UP = "given_up"  # ambiguous, and an operator decided against it


class Trigger(StrEnum):
    """What brought an attempt about."""

    SCHEDULE = "schedule"
    REDRIVE = "redrive"
    MANUAL = "manual"


class OnAmbiguous(StrEnum):
    """A destination's answer to "we do not know whether it arrived"."""

    RETRY = "retry"  # send again under the same id; the receiver deduplicates
    HOLD = "hold"  # wait for a person


@dataclass(frozen=True, slots=True)
class Complete:
    """The receiver has it."""


@dataclass(frozen=True, slots=True)
class RetryAfter:
    """Another attempt, `delay_seconds` from the settling."""

    delay_seconds: float


@dataclass(frozen=True, slots=True)
class Release:
    """The claim is given back uncharged; due again `delay_seconds` from the settling."""

    delay_seconds: float


@dataclass(frozen=True, slots=True)
class Hold:
    """Ambiguous: a person decides."""


@dataclass(frozen=True, slots=True)
class Bury:
    """To the dead-letter queue."""

    reason: DeadReason


Decision = Complete | RetryAfter | Release | Hold | Bury
