"""The dead-letter queue's routes: look, count, redrive, discard. A bulk deed names what it means, and why.

An empty filter is refused, and a filter without a limit too: nobody redrives or discards everything
by leaving something out.
"""

from __future__ import annotations

import datetime as dt
import uuid
from typing import Annotated, Any, assert_never

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response

from service import redrive
from service.api.actions import recordable
from service.api.auth import principal_of
from service.api.bodies import answer, read, schema_of
from service.api.deliveries import idempotency_key
from service.api.dlq_schemas import (
    DeadLetter,
    DeadLetterCount,
    DeadLetterPage,
    DeadLetterSummary,
    DiscardRequest,
    DiscardView,
    RedriveDryRun,
    RedrivePage,
    RedriveRequest,
    RedriveView,
)
from service.api.paging import decode_cursor, encode_cursor, malformed_cursor
from service.api.problems import Problem, ProblemError, not_found
from service.api.queries import Cursor, DestinationId, Instant, Limit, destination_of, each_known_once
from service.api.selecting import no_such_deliveries, selection_of
from service.api.state import state_of
from service.api.times import in_utc
from service.domain import limits
from service.domain.delivery import DeadReason
from service.domain.ids import Prefix, parse_typeid, to_typeid
from service.domain.outcome import Outcome
from service.ledger import dead_letters, redrives
from service.ledger.dead_letters import DeadFilter, Place, Selection
from service.ledger.redrives import Tally
from service.ledger.session import Row
from service.redrive import Order, Preview, UnknownDeliveries

router = APIRouter(tags=["dead letters"])

_redrive_decoder = msgspec.json.Decoder(RedriveRequest)
_discard_decoder = msgspec.json.Decoder(DiscardRequest)


def _json(kind: type[msgspec.Struct], description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema_of(kind)}}}


def _body(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema_of(kind)}}}}


@router.get(
    "/dlq",
    summary="List dead letters, latest first",
    dependencies=[Depends(each_known_once)],
    responses={200: _json(DeadLetterPage, "A page")},
)
async def list_dead_letters(
    request: Request,
    destination_id: DestinationId = None,
    reason: Annotated[DeadReason | None, Query()] = None,
    outcome: Annotated[Outcome | None, Query(description="The last attempt's.")] = None,
    event_type: Annotated[
        str | None, Query(min_length=1, max_length=limits.EVENT_TYPE_CHARS_MAX, pattern="^[!-~]+$")
    ] = None,
    dead_after: Instant = None,
    dead_before: Instant = None,
    limit: Limit = limits.PAGE_ITEMS_DEFAULT,
    cursor: Cursor = None,
) -> Response:
    """One page. No entry is lost or repeated while others die or are redriven."""
    wanted = DeadFilter(
        destination_id=destination_of(destination_id),
        reason=reason,
        outcome=outcome,
        event_type=event_type,
        dead_after=dead_after,
        dead_before=dead_before,
    )
    filters = {name: value for name, value in request.query_params.multi_items() if name not in ("cursor", "limit")}
    place = _place(decode_cursor(cursor, filters, 2))
    tenant = principal_of(request).tenant
    found = await dead_letters.list_page(state_of(request).ledger, tenant, wanted, after=place, limit=limit + 1)
    items = [_dead_letter(row) for row in found[:limit]]
    more = len(found) > limit
    next_cursor = encode_cursor(filters, [items[-1].dead_at.isoformat(), items[-1].delivery_id]) if more else None
    return answer(DeadLetterPage(items=items, next_cursor=next_cursor))


def _place(parts: list[str] | None) -> Place | None:
    if parts is None:
        return None
    delivery_id = parse_typeid(Prefix.DELIVERY, parts[1])
    try:
        dead_at = in_utc(dt.datetime.fromisoformat(parts[0]))
    except ValueError:
        raise malformed_cursor() from None
    if delivery_id is None or dead_at is None:
        raise malformed_cursor()
    return Place(dead_at, delivery_id)


@router.get(
    "/dlq/summary",
    summary="Count dead letters by destination and reason",
    responses={200: _json(DeadLetterSummary, "The largest groups first; the totals cover all")},
)
async def summarise_dead_letters(request: Request) -> Response:
    """The queue in numbers."""
    found = await dead_letters.summary(state_of(request).ledger, principal_of(request).tenant)
    groups = [
        DeadLetterCount(
            destination_id=to_typeid(Prefix.DESTINATION, row["destination_id"]),
            destination_name=row["destination_name"],
            owner=row["owner"],
            reason=row["dead_reason"],
            count=row["dead_count"],
            oldest_dead_at=row["oldest_dead_at"],
        )
        for row in found
    ]
    summary = DeadLetterSummary(
        total=found[0]["total_count"] if found else 0,
        oldest_dead_at=found[0]["oldest_of_all_at"] if found else None,
        oldest_age_seconds=max(0.0, found[0]["oldest_age_seconds"]) if found else None,
        groups=groups,
    )
    return answer(summary)


@router.post(
    "/dlq/redrive",
    status_code=202,
    summary="Redrive dead letters",
    openapi_extra={
        "parameters": [
            {
                "name": "Idempotency-Key",
                "in": "header",
                "required": False,
                "description": "Names this request: repeating it with the same key starts no second redrive.",
                "schema": {"type": "string", "minLength": 1, "maxLength": limits.IDEMPOTENCY_KEY_CHARS_MAX},
            }
        ],
        **_body(RedriveRequest),
    },
    responses={
        202: _json(RedriveView, "Committed: the dispatcher carries it out, within its bounds"),
        200: {
            "description": "A dry run, or the redrive that the key stands for",
            "content": {"application/json": {"schema": {"anyOf": [schema_of(RedriveDryRun), schema_of(RedriveView)]}}},
        },
    },
)
async def redrive_dead_letters(request: Request) -> Response:
    """Put dead deliveries back: same id and bytes, current URL and secret, a fresh budget and deadline."""
    state, principal = state_of(request), principal_of(request)
    key = idempotency_key(request, required=False)
    wanted = await read(request, _redrive_decoder)
    reason = recordable(wanted.reason, "/reason")
    selection = selection_of(wanted)
    if wanted.dry_run:
        preview = await _preview(request, wanted, selection)
        sample = [_dead_letter(row) for row in preview.sample]
        would_skip = {"destination-disabled": preview.disabled_count} if preview.disabled_count else {}
        return answer(RedriveDryRun(dry_run=True, selected=preview.dead_count, would_skip=would_skip, sample=sample))
    order = Order(selection, reason, wanted.rate_per_second, wanted.stop_after_same_reason)
    started = await redrive.start(state.ledger, principal.tenant, principal.actor, order, key=key, new_id=state.new_id)
    match started:
        case redrive.Started(redrive_id):
            view = await _view_of(request, redrive_id)
            return answer(view, 202, {"location": f"/dlq/redrives/{view.id}"})
        case redrive.Replayed(redrive_id):
            view = await _view_of(request, redrive_id)
            return answer(view, 200, {"location": f"/dlq/redrives/{view.id}", "idempotency-replayed": "true"})
        case redrive.KeyMismatch():
            raise ProblemError(
                Problem.IDEMPOTENCY_MISMATCH, "the key was used for a different redrive; use a new key for a new one"
            )
        case UnknownDeliveries(ids):
            raise no_such_deliveries(wanted, ids)
        case _:
            assert_never(started)


@router.get(
    "/dlq/redrives",
    summary="List redrives, newest first",
    dependencies=[Depends(each_known_once)],
    responses={200: _json(RedrivePage, "A page")},
)
async def list_redrives(request: Request, limit: Limit = limits.PAGE_ITEMS_DEFAULT, cursor: Cursor = None) -> Response:
    """One page."""
    place = decode_cursor(cursor, {}, 1)
    before = parse_typeid(Prefix.REDRIVE, place[0]) if place else None
    if place and before is None:
        raise malformed_cursor()
    tenant = principal_of(request).tenant
    found = await redrives.list_page(state_of(request).ledger, tenant, before=before, limit=limit + 1)
    items = [_redrive(row, tally) for row, tally in found[:limit]]
    more = len(found) > limit
    return answer(RedrivePage(items=items, next_cursor=encode_cursor({}, [items[-1].id]) if more else None))


@router.get(
    "/dlq/redrives/{redrive_id}",
    summary="Read a redrive",
    responses={200: _json(RedriveView, "The redrive and how it fares")},
)
async def read_redrive(request: Request, redrive_id: str) -> Response:
    """The redrive as it is now; its counts go on after it is completed, as deliveries end."""
    return answer(await _view_of(request, _redrive_id(redrive_id)))


@router.post(
    "/dlq/redrives/{redrive_id}/cancel",
    summary="Cancel a running redrive",
    responses={200: _json(RedriveView, "Cancelled: what was put back goes on, what waited stays dead")},
)
async def cancel_redrive(request: Request, redrive_id: str) -> Response:
    """Put nothing more back."""
    principal, known_id = principal_of(request), _redrive_id(redrive_id)
    cancelled = await redrive.cancel(state_of(request).ledger, principal.tenant, principal.actor, known_id)
    view = await _view_of(request, known_id)
    if not cancelled:
        raise ProblemError(Problem.STATE_CONFLICT, f"a redrive that is {view.state} cannot be cancelled")
    return answer(view)


@router.post(
    "/dlq/discard",
    summary="Discard dead letters",
    openapi_extra=_body(DiscardRequest),
    responses={200: _json(DiscardView, "How many were selected, and cancelled for good")},
)
async def discard_dead_letters(request: Request) -> Response:
    """Cancel dead deliveries for good."""
    principal = principal_of(request)
    wanted = await read(request, _discard_decoder)
    reason = recordable(wanted.reason, "/reason")
    selection = selection_of(wanted)
    if wanted.dry_run:
        preview = await _preview(request, wanted, selection)
        return answer(DiscardView(dry_run=True, selected=preview.dead_count, discarded=0))
    done = await redrive.discard(state_of(request).ledger, principal.tenant, principal.actor, selection, reason)
    if isinstance(done, UnknownDeliveries):
        raise no_such_deliveries(wanted, done.ids)
    return answer(DiscardView(dry_run=False, selected=done.selected_count, discarded=done.discarded_count))


async def _preview(request: Request, wanted: RedriveRequest | DiscardRequest, selection: Selection) -> Preview:
    preview = await redrive.preview(state_of(request).ledger, principal_of(request).tenant, selection)
    if isinstance(preview, UnknownDeliveries):
        raise no_such_deliveries(wanted, preview.ids)
    return preview


def _redrive_id(text: str) -> uuid.UUID:
    redrive_id = parse_typeid(Prefix.REDRIVE, text)
    if redrive_id is None:
        raise not_found("redrive")
    return redrive_id


async def _view_of(request: Request, redrive_id: uuid.UUID) -> RedriveView:
    found = await redrives.find(state_of(request).ledger, principal_of(request).tenant, redrive_id)
    if found is None:
        raise not_found("redrive")
    return _redrive(*found)


def _redrive(row: Row, tally: Tally) -> RedriveView:
    return RedriveView(
        id=to_typeid(Prefix.REDRIVE, row["id"]),
        state=row["state"],
        actor=row["actor"],
        reason=row["reason"],
        selected=row["selected_count"],
        requeued=tally.requeued_count,
        skipped=tally.skipped_count,
        delivered=tally.delivered_count,
        dead_again=tally.dead_again_count,
        outcomes=tally.outcomes,
        skipped_because=tally.skipped_because,
        rate_per_second=row["rate_per_second"],
        stop_after_same_reason=row["stop_after_same_reason"],
        stopped_because=row["stopped_because"],
        created_at=row["created_at"],
        completed_at=row["completed_at"],
    )


def _dead_letter(row: Row) -> DeadLetter:
    return DeadLetter(
        delivery_id=to_typeid(Prefix.DELIVERY, row["id"]),
        destination_id=to_typeid(Prefix.DESTINATION, row["destination_id"]),
        destination_name=row["destination_name"],
        owner=row["owner"],
        event_id=row["event_id"],
        event_type=row["event_type"],
        reason=row["dead_reason"],
        last_outcome=row["last_outcome"],
        last_status_code=row["last_status_code"],
        last_error=row["last_error"],
        attempt_count=row["attempt_count"],
        first_attempt_at=row["first_attempt_at"],
        last_attempt_at=row["last_attempt_at"],
        dead_at=row["completed_at"],
        may_have_been_delivered=row["may_have_been_delivered"],
        redrive_count=row["redrive_count"],
    )
