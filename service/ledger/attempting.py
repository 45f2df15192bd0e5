"""Claim and settle: an attempt's two short transactions. Each is one statement that commits itself.

The claim commits the intent to make attempt n before a byte is sent; the settle is guarded by
`state = 'delivering' AND attempt_count = n`, so that whoever lost the claim changes nothing.
"""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, assert_never

from service.domain import limits
from service.domain.delivery import (
    Bury,
    Complete,
    Decision,
    Hold,
    Release,
    RetryAfter,
    State,
)
from service.domain.outcome import Exchange, Outcome
from service.domain.retry import Budget, RetryPolicy
from service.ledger.columns import Columns
from service.ledger.destinations import policy_of
from service.ledger.partitions import Weekly
from service.ledger.session import Ledger, Row, Statement


@dataclass(frozen=True, slots=True)
class Secret:
    """An encrypted signing secret. With a public key it is the seed of a `v1a` pair, else a `v1` secret."""

    id: uuid.UUID
    ciphertext: bytes
    public_key: str | None


@dataclass(frozen=True, slots=True)
class Claim:
    """The exclusive right to make attempt `budget.number`, and all that making it takes.

    The destination's part is as it stood when the claim was committed, never from a message.
    """

    delivery_id: uuid.UUID
    tenant: str
    destination_id: uuid.UUID
    budget: Budget
    scheduled_at: dt.datetime
    claimed_at: dt.datetime
    lease_seconds: float
    trigger: str
    event_id: str
    event_type: str | None
    content_type: str
    headers: Mapping[str, str]
    body: bytes
    url: str
    destination_headers: Mapping[str, str]
    timeout_seconds: float
    policy: RetryPolicy
    response_rules: Mapping[str, str]
    secrets: tuple[Secret, ...]


@dataclass(frozen=True, slots=True)
class Settlement:
    """What became of one attempt. `exchange` is None when the worker was lost: nobody knows."""

    delivery_id: uuid.UUID
    number: int
    scheduled_at: dt.datetime
    claimed_at: dt.datetime
    trigger: str
    worker: str | None
    outcome: Outcome
    decision: Decision
    exchange: Exchange | None
    crashed_claims: int = 0


_CLAIM = Weekly("""
WITH chosen AS (
    SELECT d.id, t.timeout_seconds
    FROM {deliveries} d JOIN destinations t ON t.id = d.destination_id
    WHERE d.id = ANY(CAST(:ids AS uuid[])) AND d.state = 'pending' AND d.next_attempt_at <= now()
        AND d.deadline_at > now() AND t.state = 'active'
    FOR NO KEY UPDATE OF d SKIP LOCKED
), claimed AS (
    UPDATE {deliveries} d
    SET state = 'delivering', attempt_count = d.attempt_count + 1, claimed_at = now(), worker = :worker,
        wake_at = NULL, parked = false,
        lease_until = now() + make_interval(secs => chosen.timeout_seconds + :margin_seconds)
    FROM chosen
    WHERE d.id = chosen.id AND d.state = 'pending'
    RETURNING d.id, d.tenant, d.destination_id, d.attempt_count, d.attempts_max, d.crashed_claims, d.uncharged_count,
        d.deadline_at, d.next_attempt_at, d.claimed_at, d.next_trigger
)
SELECT c.*, p.event_id, p.event_type, p.content_type, p.headers, p.body,
    t.url, t.headers AS destination_headers, t.timeout_seconds, t.schedule_seconds, t.base_seconds, t.cap_seconds,
    t.on_ambiguous, t.response_rules, s.secret_ids, s.ciphertexts, s.public_keys
FROM claimed c
JOIN {payloads} p ON p.delivery_id = c.id
JOIN destinations t ON t.id = c.destination_id
LEFT JOIN LATERAL (
    SELECT array_agg(s.id ORDER BY s.created_at DESC, s.id DESC) AS secret_ids,
        array_agg(s.ciphertext ORDER BY s.created_at DESC, s.id DESC) AS ciphertexts,
        array_agg(s.public_key ORDER BY s.created_at DESC, s.id DESC) AS public_keys
    FROM destination_secrets s
    WHERE s.destination_id = t.id AND (s.expires_at IS NULL OR s.expires_at > now())
) s ON true
""")


async def claim(
    ledger: Ledger, delivery_ids: Sequence[uuid.UUID], *, worker: str, lease_margin_seconds: float
) -> list[Claim]:
    """CLAIM those of the ids that are due, within their deadline, at an active destination, and free.

    Guard: `state = 'pending'` under a row lock; rows that another claim holds are skipped. Index:
    the primary keys. Claims come back oldest due first; ids that are not claimable simply do not.
    """
    values = {"ids": list(delivery_ids), "worker": worker, "margin_seconds": lease_margin_seconds}
    claimed = await _CLAIM.rows(ledger, delivery_ids, values)
    claims = [_claim(row, lease_margin_seconds) for row in claimed]
    claims.sort(key=lambda claim: claim.scheduled_at)
    return claims


def _claim(row: Row, lease_margin_seconds: float) -> Claim:
    return Claim(
        delivery_id=row["id"],
        tenant=row["tenant"],
        destination_id=row["destination_id"],
        budget=Budget(
            number=row["attempt_count"],
            attempts_max=row["attempts_max"],
            deadline_at=row["deadline_at"],
            crashed_claims=row["crashed_claims"],
            uncharged_count=row["uncharged_count"],
        ),
        scheduled_at=row["next_attempt_at"],
        claimed_at=row["claimed_at"],
        lease_seconds=row["timeout_seconds"] + lease_margin_seconds,
        trigger=row["next_trigger"],
        event_id=row["event_id"],
        event_type=row["event_type"],
        content_type=row["content_type"],
        headers=row["headers"] or {},
        body=row["body"],
        url=row["url"],
        destination_headers=row["destination_headers"],
        timeout_seconds=row["timeout_seconds"],
        policy=policy_of(row),
        response_rules=row["response_rules"],
        secrets=tuple(map(Secret, row["secret_ids"] or (), row["ciphertexts"] or (), row["public_keys"] or ())),
    )


_GIVEN = Columns(
    "s",
    {
        "id": "uuid",
        "number": "int",
        "scheduled_at": "timestamptz",
        "claimed_at": "timestamptz",
        "trigger": "text",
        "worker": "text",
        "outcome": "text",
        "phase": "text",
        "status_code": "int",
        "error": "text",
        "latency_ms": "int",
        "excerpt": "bytea",
        "state": "text",
        "delay_seconds": "float8",
        "dead_reason": "text",
        "crashed_claims": "int",
        "uncharged": "int",
    },
)

_SETTLE = Weekly(
    """
WITH moved AS (
    UPDATE {deliveries} d
    SET state = s.state, lease_until = NULL, dead_reason = s.dead_reason, crashed_claims = s.crashed_claims,
        attempts_max = d.attempts_max + s.uncharged, uncharged_count = d.uncharged_count + s.uncharged,
        next_trigger = 'schedule',
        last_outcome = s.outcome, last_status_code = s.status_code, last_error = s.error,
        may_have_been_delivered = s.state <> 'delivered' AND (d.may_have_been_delivered OR s.outcome = 'unknown'),
        next_attempt_at = CASE WHEN s.state = 'pending' THEN now() + make_interval(secs => s.delay_seconds)
                               ELSE d.next_attempt_at END,
        wake_at = CASE WHEN s.state = 'pending' THEN now() + make_interval(secs => s.delay_seconds) END,
        completed_at = CASE WHEN s.state IN ('delivered', 'dead') THEN now() END
    FROM {given}
    WHERE d.id = s.id AND d.state = 'delivering' AND d.attempt_count = s.number
    RETURNING s.*
)
INSERT INTO {attempts} (delivery_id, number, scheduled_at, started_at, trigger, worker, outcome, phase, status_code,
                      error, latency_ms, response_excerpt)
SELECT id, number, scheduled_at, claimed_at, trigger, worker, outcome, phase, status_code, error, latency_ms, excerpt
FROM moved
RETURNING delivery_id
""",
    _GIVEN,
)


async def settle(ledger: Ledger, batch: Sequence[Settlement]) -> set[uuid.UUID]:
    """COMPLETE, RETRY, RELEASE, HOLD or BURY each delivery and append its attempt, in one commit.

    Guard: `state = 'delivering' AND attempt_count = number`. Index: the primary key. Answers the ids
    that moved; for the others the caller is a zombie, or this very settlement was committed before
    (`settle_late` tells the two apart). `batch` holds no delivery twice.
    """
    given = _given(batch)
    moved = await _SETTLE.rows(ledger, given["id"], {}, given)
    return {row["delivery_id"] for row in moved}


def _given(batch: Sequence[Settlement]) -> dict[str, Sequence[Any]]:
    exchanges = [settlement.exchange for settlement in batch]
    columns = [_columns(settlement.decision) for settlement in batch]
    return {
        "id": [settlement.delivery_id for settlement in batch],
        "number": [settlement.number for settlement in batch],
        "scheduled_at": [settlement.scheduled_at for settlement in batch],
        "claimed_at": [settlement.claimed_at for settlement in batch],
        "trigger": [settlement.trigger for settlement in batch],
        "worker": [settlement.worker for settlement in batch],
        "outcome": [settlement.outcome.value for settlement in batch],
        "phase": [exchange.phase.value if exchange else None for exchange in exchanges],
        "status_code": [exchange.status_code if exchange else None for exchange in exchanges],
        "error": [_error_text(settlement) for settlement in batch],
        "latency_ms": [exchange.latency_ms if exchange else None for exchange in exchanges],
        "excerpt": [exchange.excerpt or None if exchange else None for exchange in exchanges],
        "state": [state.value for state, _, _, _ in columns],
        "delay_seconds": [delay for _, delay, _, _ in columns],
        "dead_reason": [reason for _, _, reason, _ in columns],
        "crashed_claims": [settlement.crashed_claims for settlement in batch],
        "uncharged": [uncharged for _, _, _, uncharged in columns],
    }


def _columns(decision: Decision) -> tuple[State, float | None, str | None, int]:
    """A decision as the row's state, delay in seconds, dead reason, and attempts given back."""
    match decision:
        case Complete():
            return State.DELIVERED, None, None, 0
        case RetryAfter(delay_seconds):
            return State.PENDING, delay_seconds, None, 0
        case Release(delay_seconds):
            # The number stays used: a fencing token is never handed out twice. The budget grows instead.
            return State.PENDING, delay_seconds, None, 1
        case Hold():
            return State.AMBIGUOUS, None, None, 0
        case Bury(reason):
            return State.DEAD, None, reason.value, 0
        case _:
            assert_never(decision)


def _error_text(settlement: Settlement) -> str | None:
    """One line for people: what the sender saw, or at least the status that was no success."""
    exchange = settlement.exchange
    if exchange is None:
        return "the worker was lost between claim and settle"
    if exchange.error is None:
        return None if settlement.outcome is Outcome.SUCCESS else f"HTTP {exchange.status_code}"
    # A receiver's text may hold what Postgres' text cannot; the outcome is recorded all the same.
    clean = exchange.error.replace("\x00", "\N{REPLACEMENT CHARACTER}")
    return clean.encode("utf-8", "replace").decode()[: limits.ERROR_CHARS_MAX]


_LATE = Statement("""
WITH noted AS (
    UPDATE attempts
    SET late_result = jsonb_build_object(
        'outcome', CAST(:outcome AS text), 'phase', CAST(:phase AS text), 'status_code', CAST(:status_code AS int),
        'error', CAST(:error AS text), 'latency_ms', CAST(:latency_ms AS int), 'worker', CAST(:worker AS text),
        'reported_at', now())
    WHERE delivery_id = :id AND number = :number AND phase IS NULL AND late_result IS NULL
    RETURNING delivery_id, number
)
UPDATE deliveries d
SET state = 'delivered', completed_at = now(), last_outcome = 'success', last_status_code = :status_code,
    last_error = NULL, may_have_been_delivered = false
FROM noted
WHERE CAST(:outcome AS text) = 'success' AND d.id = :id AND d.id = noted.delivery_id
    AND d.state = 'ambiguous'
RETURNING d.id
""")


async def settle_late(ledger: Ledger, settlement: Settlement) -> bool:
    """Keep what a zombie learnt on the attempt that was recorded without it; nothing is overwritten.

    Guard: `phase IS NULL` (the rescue wrote the attempt). A late success, of whichever attempt, is
    the CONFIRM of a delivery that is ambiguous, which has none in flight; answers whether it was. Where this
    settlement itself was committed before its answer was lost, no row matches.
    """
    exchange = settlement.exchange
    assert exchange is not None, "only a worker that has an answer settles late"
    values = {
        "id": settlement.delivery_id,
        "number": settlement.number,
        "outcome": settlement.outcome.value,
        "phase": exchange.phase.value,
        "status_code": exchange.status_code,
        "error": _error_text(settlement),
        "latency_ms": exchange.latency_ms,
        "worker": settlement.worker,
    }
    async with ledger.statement() as connection:
        return bool(await connection.rows(_LATE, values))
