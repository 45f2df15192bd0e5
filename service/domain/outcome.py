"""What one attempt came to: the wire's facts, their class, and what to do next. Pure.

Classified by *phase*, not by exception name: could a byte of the request have been written, and
did a complete status line and headers arrive? That is all a sender can know, and it is what
decides between "did not happen" and "we do not know" (docs/architecture.md, Outcomes).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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


OUR_FAULTS = frozenset({Fault.INTERNAL, Fault.SHUTDOWN})


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
