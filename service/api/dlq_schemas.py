"""The dead-letter queue's bodies: see `schemas`, whose rules are theirs too."""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Literal

from msgspec import Meta

from service.api.schemas import Aware, In, Out, Reason, Visible
from service.domain import limits


class DeadLetter(Out):
    """One entry of the dead-letter queue."""

    delivery_id: str
    destination_id: str
    destination_name: str
    owner: str | None
    event_id: str
    event_type: str | None
    reason: str
    last_outcome: str | None
    last_status_code: int | None
    last_error: str | None
    attempt_count: int
    first_attempt_at: dt.datetime | None
    last_attempt_at: dt.datetime | None
    dead_at: dt.datetime
    may_have_been_delivered: bool
    redrive_count: int


class DeadLetterPage(Out):
    """Latest dead first."""

    items: list[DeadLetter]
    next_cursor: str | None


class DeadLetterCount(Out):
    """How many died at one destination for one reason."""

    destination_id: str
    destination_name: str
    owner: str | None
    reason: str
    count: int
    oldest_dead_at: dt.datetime


class DeadLetterSummary(Out):
    """The dead-letter queue in numbers."""

    total: int
    oldest_dead_at: dt.datetime | None
    oldest_age_seconds: float | None
    groups: list[DeadLetterCount]


class DeadLetterFilter(In):
    """Which dead deliveries. A filter that names nothing is refused."""

    destination_id: str | None = None
    reason: str | None = None
    outcome: str | None = None
    event_type: Visible | None = None
    dead_after: Aware | None = None
    dead_before: Aware | None = None


class RedriveRequest(In):
    """Put dead deliveries back: by ids, or by a filter with a limit."""

    reason: Reason
    delivery_ids: Annotated[list[str], Meta(min_length=1, max_length=limits.REDRIVE_ITEMS_MAX)] | None = None
    filter: DeadLetterFilter | None = None
    limit: Annotated[int, Meta(ge=1, le=limits.REDRIVE_ITEMS_MAX)] | None = None
    dry_run: bool = False
    rate_per_second: (
        Annotated[float, Meta(ge=limits.REDRIVE_RATE_PER_SECOND_MIN, le=limits.REDRIVE_RATE_PER_SECOND_MAX)] | None
    ) = None
    stop_after_same_reason: Annotated[int, Meta(ge=1, le=limits.REDRIVE_ITEMS_MAX)] | None = None


class RedriveView(Out):
    """A redrive and how it fares."""

    id: str
    state: Literal["running", "completed", "stopped", "cancelled"]
    actor: str
    reason: str
    selected: int
    requeued: int
    skipped: int
    delivered: int
    dead_again: int
    outcomes: dict[str, int]
    skipped_because: dict[str, int]
    rate_per_second: float | None
    stop_after_same_reason: int | None
    stopped_because: str | None
    created_at: dt.datetime
    completed_at: dt.datetime | None


class RedriveDryRun(Out):
    """What a redrive would take; nothing was changed."""

    dry_run: bool
    selected: int
    would_skip: Annotated[dict[str, int], Meta(description="How many of those selected would be skipped, and why.")]
    sample: list[DeadLetter]


class RedrivePage(Out):
    """Newest first."""

    items: list[RedriveView]
    next_cursor: str | None


class DiscardRequest(In):
    """Cancel dead deliveries for good: by ids, or by a filter with a limit."""

    reason: Reason
    delivery_ids: Annotated[list[str], Meta(min_length=1, max_length=limits.REDRIVE_ITEMS_MAX)] | None = None
    filter: DeadLetterFilter | None = None
    limit: Annotated[int, Meta(ge=1, le=limits.REDRIVE_ITEMS_MAX)] | None = None
    dry_run: bool = False


class DiscardView(Out):
    """How many were selected, and cancelled."""

    dry_run: bool
    selected: int
    discarded: int
