"""The three seams of the service, each with two implementations.

`Sender`: `egress.sender` and the tests' scripted one. `HintQueue`: `queue.arq_queue` and
`queue.inprocess`. `Clock`: the system's and the tests' frozen one.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from service.domain.outcome import Exchange


def always() -> bool:
    """The answer of a caller that holds no lease."""
    return True


@dataclass(frozen=True, slots=True)
class OutboundRequest:
    """One POST, ready for the wire.

    `headers` are complete but for `Host`, `Content-Length`, `Accept-Encoding` and `Connection`,
    which belong to the sender. `timeout_seconds` is one total deadline over connecting, writing
    and reading. `pool_key` keeps one destination's connections apart from every other's. `may_write`
    is asked last, before the first byte: when it says no, the request ends unsent as our own fault.
    """

    url: str
    headers: Sequence[tuple[str, str]]
    body: bytes
    timeout_seconds: float
    pool_key: str
    may_write: Callable[[], bool] = always


class Sender(Protocol):
    """Makes exactly one HTTP exchange and says what it saw."""

    async def send(self, request: OutboundRequest) -> Exchange:
        """Send once. Every failure is a value; only cancellation is raised."""
        ...

    async def close(self) -> None:
        """Close every connection."""
        ...


class HintQueue(Protocol):
    """Carries ids of deliveries that are due to whoever can attempt them. May lose or repeat any."""

    async def hint(self, delivery_ids: Sequence[uuid.UUID]) -> None:
        """Offer the ids, in jobs of bounded size. Raises QueueUnavailable."""
        ...

    async def depth(self) -> int:
        """How many jobs wait, those under way not counted. Raises QueueUnavailable."""
        ...

    async def epoch_lost(self) -> bool:
        """Whether the queue lost its contents since last asked (marker gone). Raises QueueUnavailable."""
        ...

    async def mark_epoch(self) -> None:
        """Set the marker whose absence `epoch_lost` reports. Raises QueueUnavailable."""
        ...

    async def close(self) -> None:
        """Close every connection."""
        ...


class Clock(Protocol):
    """The application's time: for signatures and for reading `Retry-After` dates, nothing else.

    Due times and leases go by the database's clock.
    """

    def now(self) -> dt.datetime:
        """The current instant, aware, in UTC."""
        ...

    def monotonic(self) -> float:
        """Seconds of a clock that never steps."""
        ...
