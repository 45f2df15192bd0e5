"""What a person does to one delivery: cancel, retry now, resolve. Each answers with the delivery as it is then.

A state that does not allow it is a 409 that names the state; every deed is on the audit record.
"""

from __future__ import annotations

import uuid
from typing import Any, assert_never

import msgspec
from fastapi import APIRouter, Request, Response

from service import reconcile
from service.api.auth import principal_of
from service.api.bodies import answer, read, schema_of
from service.api.deliveries import view_of
from service.api.problems import FieldError, Problem, ProblemError, invalid, not_found
from service.api.schemas import DeliveryView, ResolveRequest
from service.api.state import state_of
from service.domain.ids import Prefix, parse_typeid, to_typeid
from service.ledger import operating
from service.ledger.audit import Deed
from service.ledger.operating import Done, Result, UnknownDelivery, WrongState
from service.reconcile import Finding

router = APIRouter(tags=["deliveries"])

_resolve_decoder = msgspec.json.Decoder(ResolveRequest)


def _delivery(description: str) -> dict[int | str, dict[str, Any]]:
    return {200: {"description": description, "content": {"application/json": {"schema": schema_of(DeliveryView)}}}}


@router.post(
    "/deliveries/{delivery_id}/cancel",
    summary="Cancel a pending delivery",
    responses=_delivery("Cancelled: nothing is sent any more"),
)
async def cancel_delivery(request: Request, delivery_id: str) -> Response:
    """End a delivery that waits. While an attempt is under way it cannot be cancelled."""
    principal, known_id = principal_of(request), _delivery_id(delivery_id)
    deed = Deed(principal.tenant, principal.actor, "delivery.cancel", to_typeid(Prefix.DELIVERY, known_id))
    done = await operating.cancel(state_of(request).ledger, deed, known_id)
    return await _told(request, known_id, done, "cancelled")


@router.post(
    "/deliveries/{delivery_id}/retry",
    summary="Retry a pending delivery now",
    responses=_delivery("Due now"),
)
async def retry_delivery(request: Request, delivery_id: str) -> Response:
    """Make a delivery that waits due at once. At a paused destination it goes on waiting."""
    principal, known_id = principal_of(request), _delivery_id(delivery_id)
    deed = Deed(principal.tenant, principal.actor, "delivery.retry", to_typeid(Prefix.DELIVERY, known_id))
    done = await operating.retry(state_of(request).ledger, deed, known_id)
    return await _told(request, known_id, done, "retried")


@router.post(
    "/deliveries/{delivery_id}/resolve",
    summary="Resolve an ambiguous delivery",
    openapi_extra={
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema_of(ResolveRequest)}}}
    },
    responses=_delivery("Resolved as was said"),
)
async def resolve_delivery(request: Request, delivery_id: str) -> Response:
    """Say what became of a delivery whose result is unknown: it arrived, send it again, or let it be dead."""
    principal, known_id = principal_of(request), _delivery_id(delivery_id)
    wanted = await read(request, _resolve_decoder)
    note = recordable(wanted.note, "/note")
    ledger, finding = state_of(request).ledger, Finding(wanted.as_)
    done = await reconcile.resolve(ledger, principal.tenant, principal.actor, known_id, finding, note)
    return await _told(request, known_id, done, "resolved")


def recordable(text: str, pointer: str) -> str:
    """A reason that can be kept and that says something. Raises a 422."""
    if "\x00" in text or not text.strip():
        raise invalid(FieldError(pointer, "say why, in text"))
    return text


def _delivery_id(text: str) -> uuid.UUID:
    delivery_id = parse_typeid(Prefix.DELIVERY, text)
    if delivery_id is None:
        raise not_found("delivery")
    return delivery_id


async def _told(request: Request, delivery_id: uuid.UUID, result: Result, verb: str) -> Response:
    match result:
        case Done():
            return answer(await view_of(request, principal_of(request).tenant, delivery_id))
        case UnknownDelivery():
            raise not_found("delivery")
        case WrongState(state):
            raise ProblemError(Problem.STATE_CONFLICT, f"a delivery that is {state} cannot be {verb}")
        case _:
            assert_never(result)
