"""Two destinations and all that a receiver may do."""

from __future__ import annotations

import uuid
from typing import Final

from service.domain.delivery import OnAmbiguous
from service.domain.outcome import Exchange, Fault, Phase
from service.domain.retry import RetryPolicy
from tests.model.rows import Destination

UNSENT: Final = Exchange(Phase.NOT_SENT, 3, fault=Fault.REFUSED, error="connection refused")
BROKEN: Final = Exchange(Phase.WRITTEN, 3, fault=Fault.RESET, error="connection reset")
SILENT: Final = Exchange(Phase.WRITTEN, 3, fault=Fault.TIMEOUT, error="no answer in time")
FORBIDDEN: Final = Exchange(Phase.NOT_SENT, 3, fault=Fault.BLOCKED, error="the address is not allowed")


def answered(status_code: int, retry_after: str | None = None) -> Exchange:
    """A complete answer."""
    return Exchange(Phase.RESPONDED, 3, status_code=status_code, retry_after=retry_after)


EXCHANGES: Final = (
    answered(200),
    answered(503),
    answered(302),
    answered(404),
    answered(410),
    answered(429, "20"),
    answered(600),
    BROKEN,
    SILENT,
    UNSENT,
    FORBIDDEN,
)


def destinations() -> list[Destination]:
    """One whose receiver deduplicates, and one whose unknown results a person resolves."""
    retrying = RetryPolicy(base_seconds=1.0, cap_seconds=4.0)
    holding = RetryPolicy(base_seconds=1.0, cap_seconds=4.0, on_ambiguous=OnAmbiguous.HOLD)
    return [
        Destination(uuid.UUID(int=1), retrying, attempts_max=5),
        Destination(uuid.UUID(int=2), holding, attempts_max=3, deadline_seconds=60),
    ]
