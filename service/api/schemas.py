"""The API's bodies, each defined once: msgspec reads and writes them, and openapi.json is made from them.

They are not tables. A payload is a `Raw`: its exact bytes are cut out of the request and never
parsed into values. Unknown fields are refused; output objects always carry all their fields.
"""

from __future__ import annotations

import datetime as dt
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from service.api.problems import ProblemBody
from service.domain import limits

Aware = Annotated[dt.datetime, Meta(tz=True, description="RFC 3339, with a zone.")]
Headers = Annotated[dict[str, str], Meta(description="Extra request headers.")]
Timeout = Annotated[
    float,
    Meta(ge=limits.TIMEOUT_SECONDS_MIN, le=limits.TIMEOUT_SECONDS_MAX, description="One total deadline, in seconds."),
]
# "$" alone would also match before a last line feed.
VISIBLE: Final = r"^[\x21-\x7e]+(?!\n)$"
RuleStatus = Annotated[str, Meta(pattern=r"^[2-9][0-9][0-9](?!\n)$")]
Rules = Annotated[
    dict[RuleStatus, Literal["success", "retryable", "throttled", "gone", "rejected"]],
    Meta(max_length=limits.RESPONSE_RULES_MAX, description="What a status means at this destination."),
]
Name = Annotated[str, Meta(min_length=1, max_length=limits.NAME_CHARS_MAX)]
Url = Annotated[str, Meta(min_length=1, max_length=limits.URL_CHARS_MAX)]
Reason = Annotated[str, Meta(min_length=1, max_length=limits.REASON_CHARS_MAX, description="Recorded with the deed.")]
Visible = Annotated[
    str, Meta(min_length=1, max_length=255, pattern=VISIBLE, description="Visible ASCII, 1-255 characters.")
]


class In(Struct, forbid_unknown_fields=True, kw_only=True):
    """A body the client sends."""


class Out(Struct, kw_only=True):
    """A body the service sends."""


class DeliveryRequest(In):
    """One webhook to deliver. Exactly one of `destination_id` and `url`; of `payload` and `payload_base64`."""

    destination_id: str | None = None
    url: Url | None = None
    event_id: Visible | None = None
    event_type: Visible | None = None
    payload: Raw | UnsetType = UNSET
    payload_base64: str | None = None
    content_type: Annotated[str, Meta(min_length=1, max_length=limits.CONTENT_TYPE_CHARS_MAX)] | None = None
    headers: Headers | None = None
    deliver_at: Aware | None = None
    delay_seconds: Annotated[float, Meta(ge=0, le=limits.DELAY_SECONDS_MAX)] | None = None
    deadline_at: Aware | None = None
    deadline_seconds: Annotated[float, Meta(ge=1, le=limits.DEADLINE_SECONDS_MAX)] | None = None
    metadata: (
        Annotated[
            dict[
                Annotated[str, Meta(min_length=1, max_length=limits.METADATA_KEY_CHARS_MAX)],
                Annotated[str, Meta(max_length=limits.METADATA_VALUE_CHARS_MAX)],
            ],
            Meta(max_length=limits.METADATA_ENTRIES_MAX, description="Small, searchable, never sent."),
        ]
        | None
    ) = None


class BatchItem(DeliveryRequest, kw_only=True):
    """One webhook of a batch, with the key that names it."""

    idempotency_key: Annotated[str, Meta(min_length=1, max_length=limits.IDEMPOTENCY_KEY_CHARS_MAX, pattern=VISIBLE)]


class BatchRequest(In):
    """Webhooks to deliver, each accepted or refused by itself."""

    # Raw, so that an item which cannot be read fails alone.
    deliveries: Annotated[
        list[Annotated[Raw, Meta(extra_json_schema={"$ref": "#/components/schemas/BatchItem"})]],
        Meta(min_length=1, max_length=limits.BATCH_DELIVERIES_MAX),
    ]


class AttemptView(Out):
    """One HTTP try. Under way: `completed_at` is null."""

    number: int
    trigger: str
    scheduled_at: dt.datetime
    started_at: dt.datetime
    completed_at: dt.datetime | None
    outcome: str | None
    phase: str | None
    status_code: int | None
    error: str | None
    latency_ms: int | None
    response_excerpt: str | None
    late_result: dict[str, Any] | None


class DeliverySummary(Out):
    """A delivery without its attempts."""

    id: str
    destination_id: str
    event_id: str
    event_type: str | None
    state: Literal["pending", "delivering", "delivered", "ambiguous", "dead", "cancelled"]
    attempt_count: int
    max_attempts: int
    redrive_count: int
    next_attempt_at: dt.datetime | None
    deadline_at: dt.datetime
    created_at: dt.datetime
    completed_at: dt.datetime | None
    last_outcome: str | None
    last_status_code: int | None
    last_error: str | None
    dead_reason: str | None
    may_have_been_delivered: bool
    payload_bytes: int
    payload_sha256: str
    metadata: dict[str, str]
    duplicate: bool
    waiting_for: Literal["schedule", "backoff", "paused", "worker"] | None


class DeliveryView(DeliverySummary):
    """A delivery with its attempts, oldest first."""

    attempts: list[AttemptView]


class BatchResult(Out):
    """What became of one item: `status` is what its own request would have been answered."""

    status: int
    delivery: DeliveryView | None
    problem: ProblemBody | None


class BatchAnswer(Out):
    """One result for each item, in order."""

    results: list[BatchResult]


class DeliveryPage(Out):
    """Newest first. `next_cursor` is null at the end, and only there."""

    items: list[DeliverySummary]
    next_cursor: str | None


class RetrySpec(In):
    """When to try again: an explicit schedule, or doubling from `base_seconds` up to `cap_seconds`."""

    max_attempts: Annotated[int, Meta(ge=1, le=limits.ATTEMPTS_MAX)] | None = None
    deadline_seconds: Annotated[int, Meta(ge=1, le=limits.DEADLINE_SECONDS_MAX)] | None = None
    schedule_seconds: (
        Annotated[
            list[Annotated[float, Meta(gt=0, le=limits.RETRY_DELAY_SECONDS_MAX)]],
            Meta(min_length=1, max_length=limits.ATTEMPTS_MAX),
        ]
        | UnsetType
        | None
    ) = UNSET
    base_seconds: Annotated[float, Meta(ge=0.1, le=limits.RETRY_DELAY_SECONDS_MAX)] | None = None
    cap_seconds: Annotated[float, Meta(ge=0.1, le=limits.RETRY_DELAY_SECONDS_MAX)] | None = None


Signature = Annotated[
    Literal["v1", "v1a"],
    Meta(description="`v1`: HMAC-SHA256 under a shared secret. `v1a`: Ed25519, verified by a public key."),
]
OwnSecret = Annotated[
    str, Meta(max_length=128, description="`whsec_…`, or `whsk_…` for `v1a`, to keep one that receivers know.")
]


class DestinationRequest(In):
    """A destination to create. The signing secret is made by the service unless one is brought along."""

    url: Url
    name: Name | None = None
    owner: Name | None = None
    headers: Headers | None = None
    timeout_seconds: Timeout = limits.TIMEOUT_SECONDS_DEFAULT
    retry: RetrySpec | None = None
    on_ambiguous: Literal["retry", "hold"] = "retry"
    response_rules: Rules | None = None
    secret: OwnSecret | None = None
    signature: Signature | None = None


class RotateRequest(In):
    """A new signing secret: of the kind in use, unless another is asked for or brought along."""

    overlap_seconds: Annotated[
        int,
        Meta(
            ge=0,
            le=limits.SECRET_OVERLAP_SECONDS_MAX,
            description="For how long the secrets so far sign along. 0: they end now.",
        ),
    ] = limits.SECRET_OVERLAP_SECONDS_DEFAULT
    secret: OwnSecret | None = None
    signature: Signature | None = None


class DestinationPatch(In):
    """What to change; fields left out stay."""

    url: Url | UnsetType = UNSET
    name: Name | UnsetType = UNSET
    owner: Name | UnsetType | None = UNSET
    headers: Headers | UnsetType = UNSET
    timeout_seconds: Timeout | UnsetType = UNSET
    retry: RetrySpec | UnsetType = UNSET
    on_ambiguous: Literal["retry", "hold"] | UnsetType = UNSET
    response_rules: Rules | UnsetType = UNSET


class RetryView(Out):
    """The retry policy in force."""

    max_attempts: int
    deadline_seconds: int
    schedule_seconds: list[float] | None
    base_seconds: float
    cap_seconds: float


class SecretView(Out):
    """A signing secret in force, without the secret. It signs until `expires_at`; null: until it is rotated."""

    signature: Signature
    public_key: Annotated[str | None, Meta(description="`whpk_…`, to verify `v1a`; null of `v1`.")]
    created_at: dt.datetime
    expires_at: dt.datetime | None


class DestinationView(Out):
    """A destination. A secret is shown once, in the answer that created or rotated it."""

    id: str
    name: str
    url: str
    owner: str | None
    state: Literal["active", "paused", "disabled"]
    disabled_reason: str | None
    ad_hoc: bool
    headers: dict[str, str]
    timeout_seconds: float
    retry: RetryView
    on_ambiguous: str
    response_rules: dict[str, str]
    secrets: Annotated[list[SecretView], Meta(description="Those that sign, newest first.")]
    created_at: dt.datetime
    updated_at: dt.datetime


class DestinationWithSecret(DestinationView):
    """The answer to a creation or a rotation: the only time the secret is told."""

    secret: Annotated[str | None, Meta(description="`whsec_…`; null of `v1a`, whose private half is told to nobody.")]


class DestinationPage(Out):
    """Newest first."""

    items: list[DestinationView]
    next_cursor: str | None


class ResolveRequest(In):
    """What an operator found out about an ambiguous delivery."""

    as_: Literal["delivered", "retry", "dead"] = msgspec.field(name="as")
    note: Reason


class Health(Out):
    """The process turns."""

    status: Literal["ok"]
    version: str


class Readiness(Out):
    """Whether requests can be answered. Redis counts as degraded, never as down."""

    status: Literal["ready", "degraded", "not_ready"]
    ledger: str
    queue: str


class Rates(Out):
    """What happened in the window, by the second, as the processes counted it."""

    window_seconds: Annotated[float, Meta(description="How long the window is: five to six minutes, up to `at`.")]
    accepted_per_second: float
    attempts_per_second: Annotated[float, Meta(description="Of whatever outcome.")]
    delivered_per_second: float
    dead_per_second: float


class Stats(Out):
    """The operational view of one tenant, in numbers."""

    at: Annotated[dt.datetime, Meta(description="When it was counted, by the ledger's clock.")]
    capped: Annotated[
        bool,
        Meta(
            description="Only the oldest open deliveries were looked at: `pending`, `due`, `parked` and `ambiguous`"
            " are at least so many, and `oldest_due_at` is of those."
        ),
    ]
    pending: Annotated[int, Meta(description="Wait to be sent; `due` and `parked` are among them.")]
    due: Annotated[int, Meta(description="Could be sent now, and wait for a worker.")]
    oldest_due_at: Annotated[dt.datetime | None, Meta(description="Since when the one that waits longest is due.")]
    oldest_due_age_seconds: float | None
    parked: Annotated[int, Meta(description="Wait for a paused destination.")]
    in_flight: Annotated[int, Meta(description="Being sent. Always counted whole.")]
    ambiguous: Annotated[int, Meta(description="Wait for a person.")]
    dead: int
    dead_capped: Annotated[bool, Meta(description="`dead` and `dead_by_reason` are at least so many.")]
    dead_by_reason: Annotated[dict[str, int], Meta(description="Every reason, those that do not occur with 0.")]
    rates: Rates
    attempts_by_outcome: Annotated[
        dict[str, int], Meta(description="In the window of `rates`; every outcome, those that did not occur with 0.")
    ]
    duplicates_rejected: Annotated[
        int, Meta(description="Requests that repeated a key or an event, in the window of `rates`.")
    ]
    duplicates_rejected_24h: int
