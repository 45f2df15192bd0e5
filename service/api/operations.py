"""The routes for whatever watches the process: alive, and ready."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from service.api.bodies import answer, schema_of
from service.api.schemas import Health, Readiness
from service.api.state import state_of
from service.errors import LedgerUnavailable, QueueUnavailable
from service.ledger.migrate import check_migrated
from service.version import VERSION

router = APIRouter(tags=["operations"])


@router.get(
    "/healthz",
    summary="The process turns",
    responses={200: {"description": "Alive", "content": {"application/json": {"schema": schema_of(Health)}}}},
)
async def healthz() -> Response:
    """Says nothing of Postgres or Redis: a restart would not mend those."""
    return answer(Health(status="ok", version=VERSION))


_READINESS = {"application/json": {"schema": schema_of(Readiness)}}


@router.get(
    "/readyz",
    summary="Requests can be answered",
    responses={
        200: {"description": "Ready, or degraded: Redis is away and hints are late", "content": _READINESS},
        503: {"description": "Not ready", "content": _READINESS},
    },
)
async def readyz(request: Request) -> Response:
    """The ledger must be reachable and migrated. Redis is reported, and never counts as down."""
    state = state_of(request)
    try:
        ledger = await check_migrated(state.ledger) or "ok"
    except LedgerUnavailable:
        ledger = "does not answer"
    try:
        await state.queue.depth()
        queue = "ok"
    except QueueUnavailable:
        queue = "does not answer"
    if state.stopping:
        ledger = "the process is stopping"
    if ledger != "ok":
        return answer(Readiness(status="not_ready", ledger=ledger, queue=queue), 503, {"retry-after": "1"})
    return answer(Readiness(status="ready" if queue == "ok" else "degraded", ledger=ledger, queue=queue))
