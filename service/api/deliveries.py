"""The delivery routes: create, read, list."""

from __future__ import annotations

import functools
import uuid
from dataclasses import dataclass
from typing import Annotated, Any, assert_never, cast

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from starlette.types import Receive

from service import accept
from service.accept import Accepted, Answer
from service.api import intake
from service.api.auth import Principal, principal_of
from service.api.bodies import RawHeaders, answer, decode, encode, read_body, schema_of
from service.api.failures import as_response
from service.api.paging import decode_cursor, encode_cursor, malformed_cursor
from service.api.problems import Problem, ProblemError, Told, not_found
from service.api.queries import (
    METADATA,
    Cursor,
    DestinationId,
    Instant,
    Limit,
    destination_of,
    each_known_once_or_metadata,
)
from service.api.schemas import AttemptView, DeliveryPage, DeliveryRequest, DeliverySummary, DeliveryView
from service.api.state import AppState, state_of
from service.domain import limits
from service.domain.delivery import DeadReason, State
from service.domain.ids import Prefix, parse_typeid, to_typeid
from service.domain.outcome import Outcome
from service.ledger import views
from service.ledger.accepting import Inserted, NewDelivery
from service.ledger.session import Row
from service.ledger.views import DeliveryFilter

router = APIRouter(tags=["deliveries"])

_decoder = msgspec.json.Decoder(DeliveryRequest)

_ONE = {"description": "The delivery", "content": {"application/json": {"schema": schema_of(DeliveryView)}}}
_KEY_HEADER = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": True,
    "description": "Names this request: repeating it with the same key makes no second delivery.",
    "schema": {"type": "string", "minLength": 1, "maxLength": limits.IDEMPOTENCY_KEY_CHARS_MAX},
}


@router.post(
    "/deliveries",
    status_code=202,
    summary="Accept a webhook for delivery",
    openapi_extra={
        "parameters": [_KEY_HEADER],
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema_of(DeliveryRequest)}}},
    },
    responses={
        202: {**_ONE, "description": "Committed: the delivery is durable"},
        200: {**_ONE, "description": "The delivery existed: replayed by its key, or a duplicate by its event"},
    },
)
async def create_delivery(request: Request) -> Response:
    """Commit the delivery to the ledger; the answer is given after the commit."""
    # The lane (api.lane) takes the same way, and takes it first.
    told = await take_delivery(state_of(request), principal_of(request), request.scope["headers"], request.receive)
    return as_response(told)


async def take_delivery(state: AppState, principal: Principal, headers: RawHeaders, receive: Receive) -> Told:
    """Commit the delivery of a request to the ledger; the answer is given after the commit.

    Raises a problem, LedgerUnavailable, or ClientDisconnect.
    """
    key = intake.parse_idempotency_key(
        [value.decode("latin-1") for name, value in headers if name == b"idempotency-key"]
    )
    delivery_request = decode(_decoder, await read_body(headers, receive, state.intake_bytes_max))
    delivery = await new_delivery(state, principal, key, delivery_request)
    standing = await stand(state, delivery, await accepted(state, delivery))
    answer_headers = [_JSON, (b"location", b"/deliveries/%b" % standing.view.id.encode())]
    if standing.replayed:
        answer_headers.append((b"idempotency-replayed", b"true"))
    return Told(standing.status, answer_headers, encode(standing.view))


_JSON = (b"content-type", b"application/json")


async def accepted(state: AppState, delivery: NewDelivery) -> Answer:
    """The ledger's answer to a request. Raises a 422 for one that comes too late, and LedgerUnavailable."""
    late = intake.too_late(delivery, state.clock.now())
    if late is None:
        return await state.intake.accept(delivery)
    # A repetition is answered as what it repeats, however late it comes.
    standing = await state.intake.standing(delivery)
    if standing is None:
        raise late
    return standing


async def new_delivery(
    state: AppState, principal: Principal, key: str, delivery_request: DeliveryRequest
) -> NewDelivery:
    """The ledger's row of a request, its ad-hoc destination made if need be. Raises a 422 or 413."""
    destination_id = intake.named_destination(delivery_request)
    if destination_id is None:
        url = intake.check_url(cast("str", delivery_request.url), state.allow)
        destination_id = await state.destinations.ad_hoc(principal.tenant, principal.actor, url)
    return intake.to_new_delivery(
        delivery_request,
        delivery_id=state.new_id(),
        tenant=principal.tenant,
        key=key,
        destination_id=destination_id,
        payload_bytes_max=state.settings.payload_bytes_max,
        now=state.clock.now(),
    )


@dataclass(frozen=True, slots=True)
class Stands:
    """What a request stands for: a delivery, of its own or of another."""

    status: int
    view: DeliveryView
    replayed: bool = False


async def stand(state: AppState, delivery: NewDelivery, given: Answer) -> Stands:
    """The identity table (docs/api.md). Raises its refusals."""
    match given:
        case Accepted(row):
            return Stands(202, _fresh_view(delivery, row, to_typeid(Prefix.DELIVERY, row.id)))
        case accept.Replayed(delivery_id):
            view = await _existing(state, delivery.tenant, delivery_id, duplicate=False)
            return Stands(200, view, replayed=True)
        case accept.Duplicate(delivery_id):
            return Stands(200, await _existing(state, delivery.tenant, delivery_id, duplicate=True))
        case accept.KeyMismatch():
            raise ProblemError(
                Problem.IDEMPOTENCY_MISMATCH, "the key was used for a different request; use a new key for a new one"
            )
        case accept.EventConflict(delivery_id):
            text = to_typeid(Prefix.DELIVERY, delivery_id)
            raise ProblemError(
                Problem.EVENT_CONFLICT, f"the event is {text} already, with a different payload", existing_id=text
            )
        case accept.UnknownDestination():
            raise intake.unknown_destination()
        case accept.DisabledDestination():
            raise ProblemError(Problem.DESTINATION_DISABLED, "the destination takes no deliveries until it is enabled")
        case _:
            assert_never(given)


async def _existing(state: AppState, tenant: str, delivery_id: uuid.UUID, *, duplicate: bool) -> DeliveryView:
    view = await _view(state, tenant, delivery_id)
    if view is None:
        raise ProblemError(Problem.UNAVAILABLE, "the delivery is not readable yet")
    return msgspec.structs.replace(view, duplicate=duplicate)


_destination_text = functools.lru_cache(limits.DESTINATION_IDS_KEPT_MAX)(
    functools.partial(to_typeid, Prefix.DESTINATION)
)


def _fresh_view(delivery: NewDelivery, row: Inserted, text: str) -> DeliveryView:
    """A delivery that was committed a moment ago, told without reading it back."""
    return DeliveryView(
        id=text,
        destination_id=_destination_text(delivery.destination_id),
        event_id=delivery.event_id,
        event_type=delivery.event_type,
        state="pending",
        attempt_count=0,
        max_attempts=row.attempts_max,
        redrive_count=0,
        next_attempt_at=row.next_attempt_at,
        deadline_at=row.deadline_at,
        created_at=row.created_at,
        completed_at=None,
        last_outcome=None,
        last_status_code=None,
        last_error=None,
        dead_reason=None,
        may_have_been_delivered=False,
        payload_bytes=len(delivery.body),
        payload_sha256=delivery.body_sha256.hex(),
        metadata=dict(delivery.metadata or {}),
        duplicate=False,
        waiting_for=("paused" if row.paused else "schedule" if row.next_attempt_at > row.created_at else "worker"),
        attempts=[],
    )


@router.get(
    "/deliveries/{delivery_id}",
    summary="Read a delivery with its attempts",
    responses={200: _ONE},
)
async def read_delivery(request: Request, delivery_id: str) -> Response:
    """The delivery as it is now."""
    return answer(await view_of(request, principal_of(request).tenant, _delivery_id(delivery_id)))


@router.get(
    "/deliveries/{delivery_id}/payload",
    summary="Read the exact bytes",
    responses={200: {"description": "The bytes that are sent, in their own content type", "content": {"*/*": {}}}},
)
async def read_payload(request: Request, delivery_id: str) -> Response:
    """The payload, byte for byte as it was accepted; never as something a browser would run."""
    found = await views.find_payload(state_of(request).ledger, principal_of(request).tenant, _delivery_id(delivery_id))
    if found is None:
        raise not_found("delivery")
    content_type, body = found
    safe = {"content-disposition": "attachment", "x-content-type-options": "nosniff"}
    return Response(body, 200, {**safe, "content-type": content_type})


@router.get(
    "/deliveries",
    summary="List deliveries, newest first",
    dependencies=[Depends(each_known_once_or_metadata)],
    responses={
        200: {"description": "A page", "content": {"application/json": {"schema": schema_of(DeliveryPage)}}},
    },
    openapi_extra={
        "parameters": [
            {
                "name": "metadata",
                "in": "query",
                "description": "`metadata.KEY=VALUE` narrows to deliveries with this metadata; several may stand.",
                "style": "form",
                "explode": True,
                "schema": {"type": "object", "additionalProperties": {"type": "string"}},
            }
        ]
    },
)
async def list_deliveries(
    request: Request,
    state: Annotated[State | None, Query()] = None,
    destination_id: DestinationId = None,
    event_id: Annotated[str | None, Query(max_length=limits.EVENT_ID_CHARS_MAX)] = None,
    event_type: Annotated[str | None, Query(max_length=limits.EVENT_TYPE_CHARS_MAX)] = None,
    dead_reason: Annotated[DeadReason | None, Query()] = None,
    outcome: Annotated[Outcome | None, Query(description="The last attempt's.")] = None,
    created_after: Instant = None,
    created_before: Instant = None,
    limit: Limit = limits.PAGE_ITEMS_DEFAULT,
    cursor: Cursor = None,
) -> Response:
    """One page. No row is lost or repeated while rows are inserted or change."""
    wanted = DeliveryFilter(
        state=state,
        destination_id=destination_of(destination_id),
        event_id=_storable(event_id),
        event_type=_storable(event_type),
        dead_reason=dead_reason.value if dead_reason else None,
        outcome=outcome.value if outcome else None,
        metadata=_metadata_filter(request),
        created_after=created_after,
        created_before=created_before,
    )
    filters = {name: value for name, value in request.query_params.multi_items() if name not in ("cursor", "limit")}
    place = decode_cursor(cursor, filters, 1)
    before = parse_typeid(Prefix.DELIVERY, place[0]) if place else None
    if place and before is None:
        raise malformed_cursor()
    found = await views.list_deliveries(
        state_of(request).ledger, principal_of(request).tenant, wanted, before=before, limit=limit + 1
    )
    items = [DeliverySummary(**_summary(row)) for row in found[:limit]]
    more = len(found) > limit
    return answer(DeliveryPage(items=items, next_cursor=encode_cursor(filters, [items[-1].id]) if more else None))


def _storable(text: str | None) -> str | None:
    """A filter text the ledger can compare with. Raises a 400 for what no row can hold."""
    if text is not None and ("\x00" in text or not text.isprintable()):
        raise ProblemError(Problem.MALFORMED_REQUEST, "a filter holds characters that no value can have")
    return text


def _metadata_filter(request: Request) -> dict[str, str]:
    wanted = {
        name.removeprefix(METADATA): value
        for name, value in request.query_params.multi_items()
        if name.startswith(METADATA)
    }
    for name, value in wanted.items():
        _storable(name)
        if "\x00" in value or len(value) > limits.METADATA_VALUE_CHARS_MAX:
            raise ProblemError(Problem.MALFORMED_REQUEST, "a metadata filter holds what no value can have")
    return wanted


def _delivery_id(text: str) -> uuid.UUID:
    """The id in a path; one that cannot be is one that is not there."""
    delivery_id = parse_typeid(Prefix.DELIVERY, text)
    if delivery_id is None:
        raise not_found("delivery")
    return delivery_id


async def view_of(request: Request, tenant: str, delivery_id: uuid.UUID) -> DeliveryView:
    """A delivery of the tenant. Raises a 404."""
    view = await _view(state_of(request), tenant, delivery_id)
    if view is None:
        raise not_found("delivery")
    return view


def idempotency_key(request: Request, *, required: bool) -> str | None:
    """The `Idempotency-Key` of a request. Raises a 400."""
    values = request.headers.getlist("idempotency-key")
    return intake.parse_idempotency_key(values) if values or required else None


async def _view(state: AppState, tenant: str, delivery_id: uuid.UUID) -> DeliveryView | None:
    found = await views.find_delivery(state.ledger, tenant, delivery_id)
    if found is None:
        return None
    row, attempt_rows = found
    attempts = [_attempt(attempt_row) for attempt_row in attempt_rows]
    if row["state"] == State.DELIVERING:
        attempts.append(_under_way(row))
    return DeliveryView(**_summary(row), attempts=attempts)


def _summary(row: Row) -> dict[str, Any]:
    pending = row["state"] == State.PENDING
    return {
        "id": to_typeid(Prefix.DELIVERY, row["id"]),
        "destination_id": to_typeid(Prefix.DESTINATION, row["destination_id"]),
        "event_id": row["event_id"],
        "event_type": row["event_type"],
        "state": row["state"],
        "attempt_count": row["attempt_count"],
        "max_attempts": row["attempts_max"],
        "redrive_count": row["redrive_count"],
        "next_attempt_at": row["next_attempt_at"] if pending else None,
        "deadline_at": row["deadline_at"],
        "created_at": row["created_at"],
        "completed_at": row["completed_at"],
        "last_outcome": row["last_outcome"],
        "last_status_code": row["last_status_code"],
        "last_error": row["last_error"],
        "dead_reason": row["dead_reason"],
        "may_have_been_delivered": row["may_have_been_delivered"],
        "payload_bytes": row["body_bytes"],
        "payload_sha256": row["body_sha256"].hex(),
        "metadata": row["metadata"] or {},
        "duplicate": False,
        "waiting_for": _waiting_for(row) if pending else None,
    }


def _waiting_for(row: Row) -> str:
    """Why a pending delivery has not been sent."""
    if row["destination_state"] == "paused":
        return "paused"
    if row["waits"]:
        return "backoff" if row["attempt_count"] else "schedule"
    return "worker"


def _attempt(row: Row) -> AttemptView:
    excerpt = row["response_excerpt"]
    return AttemptView(
        **{name: row[name] for name in _ATTEMPT_COLUMNS},
        completed_at=row["attempt_completed_at"],
        response_excerpt=excerpt.decode("utf-8", "replace") if excerpt is not None else None,
    )


_ATTEMPT_COLUMNS = tuple(
    name for name in AttemptView.__struct_fields__ if name not in ("completed_at", "response_excerpt")
)


def _under_way(row: Row) -> AttemptView:
    """The attempt whose intent is committed and whose outcome is not."""
    return AttemptView(
        number=row["attempt_count"],
        trigger=row["next_trigger"],
        scheduled_at=row["next_attempt_at"],
        started_at=row["claimed_at"],
        completed_at=None,
        outcome=None,
        phase=None,
        status_code=None,
        error=None,
        latency_ms=None,
        response_excerpt=None,
        late_result=None,
    )
