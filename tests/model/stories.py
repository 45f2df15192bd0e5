"""What a worker and the dispatcher make of an attempt between two statements, by the product's own rules."""

from __future__ import annotations

import datetime as dt

from service.domain.outcome import Exchange, Fault, Outcome, Phase, classify
from service.domain.retry import decide, decide_lost
from service.ledger.attempting import Settlement
from tests.model.rows import Claim, Lost

UNSENT_STOPPED = Exchange(Phase.NOT_SENT, 0, fault=Fault.SHUTDOWN, error="the worker is stopping")
UNSENT_PAUSED = Exchange(Phase.NOT_SENT, 0, fault=Fault.INTERNAL, error="the worker was paused before sending")


def settlement_of(claim: Claim, exchange: Exchange, *, worker: str, now: dt.datetime, jitter: float) -> Settlement:
    """What service/deliver.py settles after an exchange."""
    outcome = classify(exchange, {})
    decision = decide(outcome, exchange, claim.policy, claim.budget, now=now, wall_now=now, jitter=jitter)
    return Settlement(
        delivery_id=claim.delivery_id,
        number=claim.budget.number,
        scheduled_at=claim.scheduled_at,
        claimed_at=claim.claimed_at,
        trigger=claim.trigger,
        worker=worker,
        outcome=outcome,
        decision=decision,
        exchange=exchange,
    )


def settlement_of_lost(lost: Lost, *, now: dt.datetime, jitter: float) -> Settlement:
    """What service/dispatch.py settles for a worker that will not."""
    return Settlement(
        delivery_id=lost.delivery_id,
        number=lost.budget.number,
        scheduled_at=lost.scheduled_at,
        claimed_at=lost.claimed_at,
        trigger=lost.trigger,
        worker=lost.worker,
        outcome=Outcome.UNKNOWN,
        decision=decide_lost(lost.policy, lost.budget, now=now, jitter=jitter),
        exchange=None,
        crashed_claims=lost.budget.crashed_claims + 1,
    )
