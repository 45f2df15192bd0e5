"""What one attempt came to: the wire's facts, their class, and what to do next. Pure.

Classified by *phase*, not by exception name: could a byte of the request have been written, and
did a complete status line and headers arrive? That is all a sender can know, and it is what
decides between "did not happen" and "we do not know" (docs/architecture.md, Outcomes).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never


class Phase(StrEnum):
    """How far the exchange came."""

    NOT_SENT = "not_sent"  # no byte of the request was written
    WRITTEN = "written"  # some of it may have been; no complete response head arrived
    RESPONDED = "responded"  # a complete status line and headers arrived


class Fault(StrEnum):
    """Why no response head arrived, and so whose fault it is."""

    # the receiver's, or the way to it
    DNS = "dns"
    REFUSED = "refused"
    CONNECT = "connect"  # unreachable, reset while connecting
    CONNECT_TIMEOUT = "connect_timeout"
    TLS = "tls"
    RESET = "reset"  # the connection ended under the exchange
    TIMEOUT = "timeout"  # the total deadline passed after the first byte
    GARBAGE = "garbage"  # what came back is not HTTP
    # the destination's configuration
    BLOCKED = "blocked"  # the address or URL is not allowed
    # ours: never charged to the destination
    INTERNAL = "internal"
    SHUTDOWN = "shutdown"
    PROXY = "proxy"  # the egress proxy made no tunnel


OUR_FAULTS = frozenset({Fault.INTERNAL, Fault.SHUTDOWN, Fault.PROXY})


@dataclass(frozen=True, slots=True)
class Exchange:
    """The facts of one HTTP exchange, as the sender saw them.

    `status_code` is set exactly when `phase` is RESPONDED, `fault` exactly when it is not.
    `error` is one short line for people, without secrets or URL queries; it may also note a body
    that broke after a complete head. `retry_after` is the raw header value.
    """

    phase: Phase
    latency_ms: int
    status_code: int | None = None
    fault: Fault | None = None
    error: str | None = None
    retry_after: str | None = None
    excerpt: bytes = b""


class Outcome(StrEnum):
    """The class of an attempt's result, as the ledger and the API name it."""

    SUCCESS = "success"
    NOT_SENT = "not_sent"
    BLOCKED = "blocked"
    UNKNOWN = "unknown"
    REDIRECT = "redirect"
    RETRYABLE = "retryable"
    THROTTLED = "throttled"
    GONE = "gone"
    REJECTED = "rejected"


# What a destination may declare a status to mean (`response_rules`): its contract, not our guess.
RULE_OUTCOMES = frozenset({Outcome.SUCCESS, Outcome.RETRYABLE, Outcome.THROTTLED, Outcome.GONE, Outcome.REJECTED})

_RETRYABLE_4XX = frozenset({408, 425})


def classify(exchange: Exchange, rules: Mapping[str, str]) -> Outcome:
    """Name the class of an exchange. `rules` maps a status, as text, to a member of RULE_OUTCOMES."""
    match exchange.phase:
        case Phase.NOT_SENT:
            return Outcome.BLOCKED if exchange.fault is Fault.BLOCKED else Outcome.NOT_SENT
        case Phase.WRITTEN:
            return Outcome.UNKNOWN
        case Phase.RESPONDED:
            status_code = exchange.status_code or 0
            rule = rules.get(str(status_code))
            return Outcome(rule) if rule is not None else _of_status(status_code, exchange.retry_after)
        case _:
            assert_never(exchange.phase)


def _of_status(status_code: int, retry_after: str | None) -> Outcome:
    match status_code // 100:
        case 2:
            return Outcome.SUCCESS
        case 3:
            return Outcome.REDIRECT
        case 4 if status_code == 410:
            return Outcome.GONE
        case 4 if status_code == 429:
            return Outcome.THROTTLED
        case 4 if status_code in _RETRYABLE_4XX:
            return Outcome.RETRYABLE
        case 5 if status_code == 503 and retry_after is not None:
            return Outcome.THROTTLED
        case 5:
            return Outcome.RETRYABLE
        case _:
            return Outcome.REJECTED


def is_nonsense(status_code: int | None) -> bool:
    """Whether a status is none that a server may end an exchange with (1xx, 6xx and beyond).

    Such an answer says nothing about the delivery, so it is tried again, unlike an honest 4xx.
    """
    return status_code is not None and not 200 <= status_code <= 599
