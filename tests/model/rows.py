"""The model's rows, and the operations that it has in common with the real ledger.

The rule: a field is named like the column that it stands for, and an operation like the statement, so
that the conformance test compares the two by name.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from service.accept import Answer
from service.domain.delivery import DeadReason, State, Trigger
from service.domain.outcome import Outcome, Phase
from service.domain.retry import Budget, RetryPolicy
from service.ledger.accepting import NewDelivery
from service.ledger.attempting import Settlement
from service.ledger.dispatching import Due
from service.ledger.operating import Result

TENANT: Final = "default"
T0: Final = dt.datetime(2026, 11, 30, 12, 0, tzinfo=dt.UTC)

VISIBILITY_SECONDS: Final = 2.0
LEASE_MARGIN_SECONDS: Final = 15.0
STALE_SECONDS: Final = 10.0


@dataclass(slots=True)
class Destination:
    """A row of `destinations`. `policy` is its policy columns."""

    id: uuid.UUID
    policy: RetryPolicy
    attempts_max: int
    timeout_seconds: float = 5.0
    deadline_seconds: int = 600
    state: str = "active"
    gated: bool = False


@dataclass(slots=True)
class Delivery:
    """A row of `deliveries`."""

    id: uuid.UUID
    destination_id: uuid.UUID
    created_at: dt.datetime
    next_attempt_at: dt.datetime
    deadline_at: dt.datetime
    wake_at: dt.datetime | None
    attempts_max: int
    state: State = State.PENDING
    attempt_count: int = 0
    uncharged_count: int = 0
    crashed_claims: int = 0
    redrive_count: int = 0
    redrive_id: uuid.UUID | None = None
    lease_until: dt.datetime | None = None
    claimed_at: dt.datetime | None = None
    completed_at: dt.datetime | None = None
    worker: str | None = None
    parked: bool = False
    may_have_been_delivered: bool = False
    next_trigger: str = Trigger.SCHEDULE
    last_outcome: Outcome | None = None
    last_status_code: int | None = None
    dead_reason: DeadReason | None = None


@dataclass(slots=True)
class Attempt:
    """A row of `attempts`. `late_outcome` is what its `late_result` says."""

    number: int
    scheduled_at: dt.datetime
    started_at: dt.datetime
    completed_at: dt.datetime
    trigger: str
    worker: str | None
    outcome: Outcome
    phase: Phase | None
    status_code: int | None
    late_outcome: Outcome | None = None


@dataclass(slots=True)
class Redrive:
    """A running redrive with its waiting items."""

    id: uuid.UUID
    created_at: dt.datetime
    waiting: list[uuid.UUID] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Claim:
    """What a claim answers, as far as the core looks at it."""

    delivery_id: uuid.UUID
    destination_id: uuid.UUID
    budget: Budget
    policy: RetryPolicy
    scheduled_at: dt.datetime
    claimed_at: dt.datetime
    lease_seconds: float
    timeout_seconds: float
    trigger: str
    event_id: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Lost:
    """A claim that nobody will settle."""

    delivery_id: uuid.UUID
    budget: Budget
    policy: RetryPolicy
    scheduled_at: dt.datetime
    claimed_at: dt.datetime
    trigger: str
    worker: str | None


Snapshot = dict[str, Mapping[str, Any]]  # by table and key: a row's columns


class Statements(Protocol):
    """The ledger's statements: the model's (`ModelLedger`) and the product's (`PostgresLedger`)."""

    def let_pass(self, seconds: float) -> None: ...

    def accept(self, new: NewDelivery) -> Answer: ...

    def claim(self, delivery_ids: Sequence[uuid.UUID], worker: str) -> list[Claim]: ...
    def settle(self, batch: Sequence[Settlement]) -> set[uuid.UUID]: ...
    def settle_late(self, settlement: Settlement) -> bool: ...

    def take_due(self, visibility_seconds: float) -> Due: ...
    def take_unsendable(self) -> Due: ...
    def wake_hinted(self) -> int: ...
    def find_lost(self, stale_seconds: float) -> list[Lost]: ...
    def park(self, delivery_ids: list[uuid.UUID]) -> None: ...
    def admit(self) -> int | None: ...
    def beat(self, worker: str) -> None: ...

    def pause(self, destination_id: uuid.UUID) -> bool: ...
    def resume(self, destination_id: uuid.UUID) -> bool: ...
    def disable(self, destination_id: uuid.UUID) -> bool: ...
    def enable(self, destination_id: uuid.UUID) -> bool: ...

    def cancel(self, delivery_id: uuid.UUID) -> Result: ...
    def retry(self, delivery_id: uuid.UUID) -> Result: ...
    def confirm(self, delivery_id: uuid.UUID) -> Result: ...
    def resend(self, delivery_id: uuid.UUID) -> Result: ...
    def give_up(self, delivery_id: uuid.UUID) -> Result: ...
    def discard(self, delivery_ids: Sequence[uuid.UUID]) -> int: ...
    def start_redrive(self, redrive_id: uuid.UUID, delivery_ids: Sequence[uuid.UUID]) -> None: ...
    def redrive(self, batch: int) -> bool: ...

    def snapshot(self) -> Snapshot: ...
