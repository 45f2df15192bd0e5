"""Many webhooks in one request: each item is accepted or refused as its own request would have been."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Raw

from service.accept import Answer
from service.api import intake
from service.api.auth import Principal, principal_of
from service.api.bodies import answer, decode, read_body, schema_of
from service.api.deliveries import accepted, new_delivery, stand
from service.api.problems import Problem, ProblemError
from service.api.schemas import BatchAnswer, BatchItem, BatchRequest, BatchResult
from service.api.state import AppState, state_of
from service.domain import limits
from service.errors import LedgerUnavailable
from service.ledger.accepting import NewDelivery

router = APIRouter(tags=["deliveries"])

_decoder = msgspec.json.Decoder(BatchRequest)
_item_decoder = msgspec.json.Decoder(BatchItem)


@router.post(
    "/deliveries/batch",
    summary="Accept up to 1,000 webhooks",
    openapi_extra={
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema_of(BatchRequest)}}}
    },
    responses={
        200: {
            "description": "One result for each item, in order",
            "content": {"application/json": {"schema": schema_of(BatchAnswer)}},
        }
    },
)
async def create_deliveries(request: Request) -> Response:
    """Commit what can be committed; one bad item never fails the others."""
    state, principal = state_of(request), principal_of(request)
    body = await read_body(
        request.scope["headers"], request.receive, max(limits.BATCH_BYTES_MAX, state.intake_bytes_max)
    )
    items = decode(_decoder, body).deliveries
    rows = [await _row(state, principal, item) for item in items]
    given = await _all_given(state, rows)
    if all(isinstance(each, LedgerUnavailable) for each in given):
        raise LedgerUnavailable("no item of the batch is known to be committed")
    results = [await _result(request, row, each) for row, each in zip(rows, given, strict=True)]
    return answer(BatchAnswer(results=results))


_Refusal = ProblemError | LedgerUnavailable


async def _row(state: AppState, principal: Principal, item: Raw) -> NewDelivery | _Refusal:
    try:
        wanted = decode(_item_decoder, bytes(item))
        return await new_delivery(state, principal, wanted.idempotency_key, wanted)
    except (ProblemError, LedgerUnavailable) as refusal:
        return refusal


async def _all_given(state: AppState, rows: Sequence[NewDelivery | _Refusal]) -> list[Answer | _Refusal]:
    """The ledger's answer to each row. All are offered at once, so that they share the group commits."""
    offered = [_offered(state, row) for row in rows]
    waited_for = [each for each in offered if isinstance(each, asyncio.Future)]
    if waited_for:
        await asyncio.wait(waited_for)
    return [_outcome(each) if isinstance(each, asyncio.Future) else each for each in offered]


def _offered(state: AppState, row: NewDelivery | _Refusal) -> asyncio.Future[Answer] | _Refusal:
    if not isinstance(row, NewDelivery):
        return row
    try:
        if intake.too_late(row, state.clock.now()) is not None:  # seldom: it is asked about by itself
            return asyncio.ensure_future(accepted(state, row))
        return state.intake.offer(row)
    except LedgerUnavailable as refusal:
        return refusal


def _outcome(given: asyncio.Future[Answer]) -> Answer | _Refusal:
    try:
        return given.result()
    except (ProblemError, LedgerUnavailable) as refusal:
        return refusal


async def _result(request: Request, row: NewDelivery | _Refusal, given: Answer | _Refusal) -> BatchResult:
    if isinstance(given, _Refusal):
        return _refused(request, given)
    assert isinstance(row, NewDelivery), "what was no row was refused"
    try:
        standing = await stand(state_of(request), row, given)
    except (ProblemError, LedgerUnavailable) as refusal:
        return _refused(request, refusal)
    return BatchResult(status=standing.status, delivery=standing.view, problem=None)


def _refused(request: Request, refusal: _Refusal) -> BatchResult:
    if isinstance(refusal, LedgerUnavailable):
        refusal = ProblemError(Problem.UNAVAILABLE, "the ledger does not answer; repeat this item with its key")
    return BatchResult(status=refusal.problem.status, delivery=None, problem=refusal.body(request.url.path))
