"""The destination routes: create, read, list, change, rotate the secret, pause, resume, enable."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable
from typing import Any, assert_never

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from msgspec import UNSET

from service.api import intake
from service.api.auth import principal_of
from service.api.bodies import answer, read, schema_of
from service.api.paging import decode_cursor, encode_cursor, malformed_cursor
from service.api.problems import FieldError, Problem, ProblemError, invalid, not_found
from service.api.queries import Cursor, Limit, each_known_once
from service.api.schemas import (
    DestinationPage,
    DestinationPatch,
    DestinationRequest,
    DestinationView,
    DestinationWithSecret,
    RetrySpec,
    RetryView,
    RotateRequest,
    SecretView,
)
from service.api.state import state_of
from service.destinations import Created, Destinations, SigningSecret, name_of, read_secret
from service.domain import limits
from service.domain.ids import Prefix, parse_typeid, to_typeid
from service.domain.signing import Scheme
from service.ledger.destinations import StoredDestination, StoredSecret, TooManySecrets

router = APIRouter(tags=["destinations"])

_request_decoder = msgspec.json.Decoder(DestinationRequest)
_patch_decoder = msgspec.json.Decoder(DestinationPatch)
_rotate_decoder = msgspec.json.Decoder(RotateRequest)

_UNSTORED = {"cache-control": "no-store"}  # what lies between may keep no answer that tells a secret


def _json(kind: type[msgspec.Struct], description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema_of(kind)}}}


def _body(kind: type[msgspec.Struct], *, required: bool = True) -> dict[str, Any]:
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": schema_of(kind)}}}}


@router.post(
    "/destinations",
    status_code=201,
    summary="Create a destination",
    openapi_extra=_body(DestinationRequest),
    responses={201: _json(DestinationWithSecret, "Created; the secret is told this once")},
)
async def create_destination(request: Request) -> Response:
    """Write a destination; keep the secret that comes back."""
    state, principal = state_of(request), principal_of(request)
    wanted = await read(request, _request_decoder)
    url = intake.check_url(wanted.url, state.allow)
    secret = _secret(state.destinations, wanted.secret, wanted.signature, Scheme.V1)
    values: dict[str, Any] = {
        "url": url,
        "name": wanted.name or name_of(url),
        "owner": wanted.owner,
        "headers": wanted.headers or {},
        "timeout_seconds": wanted.timeout_seconds,
        "on_ambiguous": wanted.on_ambiguous,
        "response_rules": wanted.response_rules or {},
        **_retry_columns(wanted.retry),
    }
    _check_texts(name=wanted.name, owner=wanted.owner)
    intake.check_custom_headers(values["headers"])
    created = await state.destinations.create(principal.tenant, principal.actor, values, secret)
    view = DestinationWithSecret(**_fields(created.destination), secret=created.secret)
    return answer(view, 201, {"location": f"/destinations/{view.id}", **_UNSTORED})


def _secret(destinations: Destinations, own: str | None, signature: str | None, otherwise: Scheme) -> SigningSecret:
    """The secret brought along, or a new one of the kind that is asked for. Raises a 422."""
    if own is None:
        return destinations.new_secret(Scheme(signature or otherwise))
    secret = read_secret(own)
    if secret is None:
        raise invalid(
            FieldError(
                "/secret",
                "a secret reads whsec_ and the base64 of 24 to 64 bytes,"
                " or whsk_ and the base64 of an Ed25519 seed and its public key",
            )
        )
    if signature not in {None, secret.scheme}:
        raise invalid(FieldError("/signature", f"the secret is one for {secret.scheme.value}"))
    return secret


def _check_texts(*, name: str | None, owner: str | None) -> None:
    for pointer, text in (("/name", name), ("/owner", owner)):
        if text is not None and not text.isprintable():
            raise invalid(FieldError(pointer, "names and owners are printable text on one line"))


def _retry_columns(retry: RetrySpec | None) -> dict[str, Any]:
    """The columns that a retry policy sets; what it leaves out keeps its default."""
    if retry is None:
        return {}
    doubling = retry.base_seconds is not None or retry.cap_seconds is not None
    if isinstance(retry.schedule_seconds, list) and doubling:
        raise invalid(FieldError("/retry", "give either schedule_seconds or base_seconds and cap_seconds"))
    columns: dict[str, Any] = {
        "attempts_max": retry.max_attempts,
        "deadline_seconds": retry.deadline_seconds,
        "base_seconds": retry.base_seconds,
        "cap_seconds": retry.cap_seconds,
    }
    columns = {name: value for name, value in columns.items() if value is not None}
    if isinstance(retry.schedule_seconds, list):
        columns["schedule_seconds"] = retry.schedule_seconds
        # A schedule of n delays is n + 1 attempts, unless it is told otherwise.
        columns.setdefault("attempts_max", min(len(retry.schedule_seconds) + 1, limits.ATTEMPTS_MAX))
    elif doubling or retry.schedule_seconds is None:
        columns["schedule_seconds"] = None
    base_seconds, cap_seconds = columns.get("base_seconds"), columns.get("cap_seconds")
    if base_seconds is not None and cap_seconds is not None and base_seconds > cap_seconds:
        raise invalid(FieldError("/retry/base_seconds", "base_seconds may not exceed cap_seconds"))
    return columns


@router.get(
    "/destinations",
    summary="List destinations, newest first",
    dependencies=[Depends(each_known_once)],
    responses={200: _json(DestinationPage, "A page")},
)
async def list_destinations(
    request: Request,
    limit: Limit = limits.PAGE_ITEMS_DEFAULT,
    cursor: Cursor = None,
) -> Response:
    """One page."""
    place = decode_cursor(cursor, {}, 1)
    before = parse_typeid(Prefix.DESTINATION, place[0]) if place else None
    if place and before is None:
        raise malformed_cursor()
    tenant = principal_of(request).tenant
    found = await state_of(request).destinations.list_page(tenant, before=before, limit=limit + 1)
    items = [_view(destination) for destination in found[:limit]]
    more = len(found) > limit
    return answer(DestinationPage(items=items, next_cursor=encode_cursor({}, [items[-1].id]) if more else None))


@router.get(
    "/destinations/{destination_id}",
    summary="Read a destination",
    responses={200: _json(DestinationView, "The destination, without its secret")},
)
async def read_destination(request: Request, destination_id: str) -> Response:
    """The destination as it is now."""
    found = await state_of(request).destinations.find(principal_of(request).tenant, _destination_id(destination_id))
    if found is None:
        raise not_found("destination")
    return answer(_view(found))


@router.patch(
    "/destinations/{destination_id}",
    summary="Change a destination",
    openapi_extra=_body(DestinationPatch),
    responses={200: _json(DestinationView, "The destination as changed; what waits is sent by the new values")},
)
async def change_destination(request: Request, destination_id: str) -> Response:
    """Set the fields that are given."""
    state, principal = state_of(request), principal_of(request)
    wanted = await read(request, _patch_decoder)
    known_id = _destination_id(destination_id)
    current = await state.destinations.find(principal.tenant, known_id)
    if current is None:
        raise not_found("destination")
    changes = _changes(wanted, current)
    if wanted.url is not UNSET:
        changes["url"] = intake.check_url(wanted.url, state.allow)
        if current.ad_hoc and changes["url"] != current.url:
            raise ProblemError(Problem.STATE_CONFLICT, "this destination is its URL; create one to change it")
    changed = (
        await state.destinations.change(principal.tenant, principal.actor, known_id, changes) if changes else current
    )
    if changed is None:
        raise not_found("destination")
    return answer(_view(changed))


def _changes(wanted: DestinationPatch, current: StoredDestination) -> dict[str, Any]:
    """The columns that a patch sets. Raises a 422."""
    changes: dict[str, Any] = {}
    for name in ("name", "owner", "headers", "timeout_seconds", "on_ambiguous", "response_rules"):
        value = getattr(wanted, name)
        if value is not UNSET:
            changes[name] = value
    _check_texts(name=changes.get("name"), owner=changes.get("owner"))
    if "headers" in changes:
        intake.check_custom_headers(changes["headers"])
    if wanted.retry is not UNSET:
        changes |= _retry_columns(wanted.retry)
        base_seconds = changes.get("base_seconds", current.base_seconds)
        if base_seconds > changes.get("cap_seconds", current.cap_seconds):
            named = "base_seconds" if "base_seconds" in changes else "cap_seconds"
            raise invalid(FieldError(f"/retry/{named}", f"base_seconds ({base_seconds:g}) may not exceed cap_seconds"))
    return changes


@router.post(
    "/destinations/{destination_id}/rotate-secret",
    summary="Give a destination a new signing secret",
    openapi_extra=_body(RotateRequest, required=False),
    responses={200: _json(DestinationWithSecret, "Rotated; the new secret is told this once")},
)
async def rotate_secret(request: Request, destination_id: str) -> Response:
    """Sign with a new secret, and along with the old one until the overlap is over."""
    state, principal = state_of(request), principal_of(request)
    wanted = await read(request, _rotate_decoder) if _has_body(request) else RotateRequest()
    known_id = _destination_id(destination_id)
    current = await state.destinations.find(principal.tenant, known_id)
    if current is None:
        raise not_found("destination")
    secret = _secret(state.destinations, wanted.secret, wanted.signature, _scheme_of(current.secrets[0]))
    rotated = await state.destinations.rotate(
        principal.tenant, principal.actor, known_id, secret, wanted.overlap_seconds
    )
    match rotated:
        case Created(destination, text):
            return answer(DestinationWithSecret(**_fields(destination), secret=text), 200, _UNSTORED)
        case TooManySecrets(ends_at):
            raise ProblemError(
                Problem.STATE_CONFLICT,
                f"{limits.SECRETS_MAX} secrets are in force, the first until {ends_at:%Y-%m-%dT%H:%M:%SZ};"
                " wait for that, or end all of them with overlap_seconds 0",
            )
        case None:
            raise not_found("destination")
        case _:
            assert_never(rotated)


def _has_body(request: Request) -> bool:
    # A body declares itself by one of these (RFC 9112); a type declared without one is refused as empty.
    declared = ("content-type", "transfer-encoding")
    return any(name in request.headers for name in declared) or request.headers.get("content-length", "0") != "0"


@router.post(
    "/destinations/{destination_id}/pause",
    summary="Pause a destination",
    responses={200: _json(DestinationView, "Paused: deliveries are accepted and wait")},
)
async def pause_destination(request: Request, destination_id: str) -> Response:
    """Send nothing until it is resumed."""
    return await _moved(request, destination_id, state_of(request).destinations.pause, "paused")


@router.post(
    "/destinations/{destination_id}/resume",
    summary="Resume a paused destination",
    responses={200: _json(DestinationView, "Active: what waited is sent, oldest first")},
)
async def resume_destination(request: Request, destination_id: str) -> Response:
    """Send again."""
    return await _moved(request, destination_id, state_of(request).destinations.resume, "resumed")


@router.post(
    "/destinations/{destination_id}/enable",
    summary="Enable a disabled destination",
    responses={200: _json(DestinationView, "Active: deliveries are accepted again")},
)
async def enable_destination(request: Request, destination_id: str) -> Response:
    """Accept again. What died meanwhile is in the dead-letter queue, to be redriven."""
    return await _moved(request, destination_id, state_of(request).destinations.enable, "enabled")


_Move = Callable[[str, str, uuid.UUID], Awaitable[StoredDestination | None]]


async def _moved(request: Request, destination_id: str, move: _Move, verb: str) -> Response:
    principal = principal_of(request)
    known_id = _destination_id(destination_id)
    moved = await move(principal.tenant, principal.actor, known_id)
    if moved is None:
        current = await state_of(request).destinations.find(principal.tenant, known_id)
        if current is None:
            raise not_found("destination")
        raise ProblemError(Problem.STATE_CONFLICT, f"a destination that is {current.state} cannot be {verb}")
    return answer(_view(moved))


def _destination_id(text: str) -> uuid.UUID:
    destination_id = parse_typeid(Prefix.DESTINATION, text)
    if destination_id is None:
        raise not_found("destination")
    return destination_id


def _view(destination: StoredDestination) -> DestinationView:
    return DestinationView(**_fields(destination))


def _fields(destination: StoredDestination) -> dict[str, Any]:
    return {
        "id": to_typeid(Prefix.DESTINATION, destination.id),
        "name": destination.name,
        "url": destination.url,
        "owner": destination.owner,
        "state": destination.state,
        "disabled_reason": destination.disabled_reason,
        "ad_hoc": destination.ad_hoc,
        "headers": dict(destination.headers),
        "timeout_seconds": destination.timeout_seconds,
        "retry": RetryView(
            max_attempts=destination.attempts_max,
            deadline_seconds=destination.deadline_seconds,
            schedule_seconds=destination.schedule_seconds,
            base_seconds=destination.base_seconds,
            cap_seconds=destination.cap_seconds,
        ),
        "on_ambiguous": destination.on_ambiguous,
        "response_rules": dict(destination.response_rules),
        "secrets": [
            SecretView(
                signature=_scheme_of(secret).value,
                public_key=secret.public_key,
                created_at=secret.created_at,
                expires_at=secret.expires_at,
            )
            for secret in destination.secrets
        ],
        "created_at": destination.created_at,
        "updated_at": destination.updated_at,
    }


def _scheme_of(secret: StoredSecret) -> Scheme:
    return Scheme.V1 if secret.public_key is None else Scheme.V1A
