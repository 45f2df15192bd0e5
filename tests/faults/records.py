"""What is read of a run for the history checker: what was asked, seen and received, and what the ledger holds."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Asked:
    """One POST of a delivery. `status` None: no answer came. `delivery_id` as a 200 or 202 told it.

    `event_id`: as the request gave it; None when it gave none, and the key stands for it.
    """

    key: str
    destination_id: str
    body_sha256: str
    status: int | None
    delivery_id: str | None
    tenant: str = "default"
    event_id: str | None = None

    @property
    def identity(self) -> tuple[str, str, str]:
        """Whose delivery of what to where it asks for."""
        return self.tenant, self.destination_id, self.event_id or self.key


@dataclass(frozen=True, slots=True)
class Seen:
    """A delivery as a GET of a tenant's showed it, in the order of asking."""

    delivery_id: str
    state: str
    redrive_count: int
    tenant: str = "default"


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request at the receiver. `answered` is the status that it wrote whole, or None.

    `witnessed`: the number of the latest committed claim while the request was still unanswered.
    `timestamp`: when it was signed, by its header, and so before it began.
    """

    delivery_id: str
    attempt: int
    event_id: str
    at: dt.datetime
    body_sha256: str
    signed: bool
    timestamp: float
    answered: int | None
    retry_after_seconds: float = 0.0
    witnessed: int | None = None


@dataclass(frozen=True, slots=True)
class Attempt:
    """One row of the ledger's attempts."""

    number: int
    scheduled_at: dt.datetime
    started_at: dt.datetime
    completed_at: dt.datetime
    trigger: str
    outcome: str
    status_code: int | None = None
    late_outcome: str | None = None

    @property
    def is_final(self) -> bool:
        """Whether it ends its delivery, whatever is left of the budget. A status that is none says nothing."""
        nonsense = self.status_code is not None and not 200 <= self.status_code <= 599
        return self.outcome in ("gone", "blocked") or (self.outcome == "rejected" and not nonsense)


@dataclass(frozen=True, slots=True)
class Delivery:
    """One row of the ledger's deliveries with its attempts, by number."""

    id: str
    tenant: str
    destination_id: str
    event_id: str
    body_sha256: str
    state: str
    attempt_count: int
    redrive_count: int
    created_at: dt.datetime
    next_attempt_at: dt.datetime
    deadline_at: dt.datetime
    completed_at: dt.datetime | None
    base_seconds: float
    cap_seconds: float
    dead_reason: str | None = None
    next_trigger: str = "schedule"
    uncharged_count: int = 0
    attempts: tuple[Attempt, ...] = ()

    @property
    def identity(self) -> tuple[str, str, str]:
        """Whose delivery of what to where it is."""
        return self.tenant, self.destination_id, self.event_id


@dataclass(frozen=True, slots=True)
class History:
    """One run. `drained`: faults are over and the time to drain has passed. `gauges` must be zero then."""

    asked: tuple[Asked, ...]
    seen: tuple[Seen, ...]
    arrivals: tuple[Arrival, ...]
    deliveries: tuple[Delivery, ...]
    read_at: dt.datetime
    drained: bool
    gauges: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Violation:
    """An invariant that does not hold, of which delivery (or key), and how."""

    invariant: str
    subject: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.invariant} {self.subject}: {self.sentence}"
