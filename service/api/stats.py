"""The route for the person on call: one tenant's numbers, quickly, whatever the ledger holds."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request, Response

from service.api.auth import principal_of
from service.api.bodies import answer, schema_of
from service.api.queries import each_known_once
from service.api.schemas import Rates, Stats
from service.api.state import state_of
from service.domain.delivery import DeadReason
from service.domain.outcome import Outcome
from service.domain.tally import ATTEMPTS, Tallied
from service.ledger import stats, tallies
from service.ledger.stats import Standings
from service.ledger.tallies import Recent

router = APIRouter(tags=["operations"])


@router.get(
    "/stats",
    summary="The tenant's deliveries in numbers",
    dependencies=[Depends(each_known_once)],
    responses={200: {"description": "As of now", "content": {"application/json": {"schema": schema_of(Stats)}}}},
)
async def read_stats(request: Request) -> Response:
    """Where deliveries stand, and how fast they move. Bounded: with very many open, the counts are "at least"."""
    ledger, tenant = state_of(request).ledger, principal_of(request).tenant
    standings = await stats.standings(ledger, tenant)
    return answer(_stats(standings, await tallies.recent(ledger, tenant)))


def _stats(standings: Standings, recent: Recent) -> Stats:
    oldest_at = standings.oldest_due_at
    return Stats(
        at=standings.at,
        capped=standings.capped,
        pending=standings.pending_count,
        due=standings.due_count,
        oldest_due_at=oldest_at,
        oldest_due_age_seconds=None if oldest_at is None else (standings.at - oldest_at).total_seconds(),
        parked=standings.parked_count,
        in_flight=standings.in_flight_count,
        ambiguous=standings.ambiguous_count,
        dead=sum(standings.dead_counts.values()),
        dead_capped=standings.dead_capped,
        dead_by_reason={reason.value: standings.dead_counts.get(reason, 0) for reason in DeadReason},
        rates=_rates(recent),
        attempts_by_outcome={outcome.value: recent.window.get(ATTEMPTS[outcome], 0) for outcome in Outcome},
        duplicates_rejected=_sum(recent.window, Tallied.REPLAYED, Tallied.DUPLICATE),
        duplicates_rejected_24h=_sum(recent.day, Tallied.REPLAYED, Tallied.DUPLICATE),
    )


def _rates(recent: Recent) -> Rates:
    def per_second(*names: Tallied) -> float:
        return _sum(recent.window, *names) / recent.window_seconds

    return Rates(
        window_seconds=recent.window_seconds,
        accepted_per_second=per_second(Tallied.ACCEPTED),
        attempts_per_second=per_second(*ATTEMPTS.values()),
        delivered_per_second=per_second(Tallied.DELIVERED),
        dead_per_second=per_second(Tallied.DEAD),
    )


def _sum(counts: dict[str, int], *names: Tallied) -> int:
    return sum(counts.get(name, 0) for name in names)
