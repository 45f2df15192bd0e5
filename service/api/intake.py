"""From a request body to a `NewDelivery`: every rule of intake, in the order a client can mend them."""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import functools
import hashlib
import re
import uuid
from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import UNSET

from service.api.problems import FieldError, Problem, ProblemError, invalid
from service.api.schemas import DeliveryRequest
from service.api.times import in_utc
from service.domain import limits
from service.domain.address import AllowList, UrlProblem, judge_url, parse_url
from service.domain.headers import check_headers
from service.domain.ids import Prefix, parse_typeid
from service.ledger.accepting import NewDelivery

JSON_CONTENT_TYPE: Final = "application/json"
BYTES_CONTENT_TYPE: Final = "application/octet-stream"

_KEY: Final = re.compile(r'"(?P<quoted>(?:[\x21\x23-\x5b\x5d-\x7e]|\\["\\])*)"|(?P<bare>[\x21-\x7e]+)')
_PART: Final = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_CONTENT_TYPE: Final = re.compile(rf"{_PART}/{_PART}(?: *;(?:[\x20-\x7e]*[\x21-\x7e])?)?")


def parse_idempotency_key(values: list[str]) -> str:
    """The key in the `Idempotency-Key` headers of a request: bare, or a quoted structured-field string.

    Both forms of one key are the same key. Raises a 400.
    """
    if len(values) != 1:
        detail = "send an Idempotency-Key header" if not values else "send one Idempotency-Key header, not several"
        raise ProblemError(Problem.MALFORMED_REQUEST, detail)
    matched = _KEY.fullmatch(values[0].strip(" \t"))
    if matched is not None:
        quoted = matched["quoted"]
        key: str = re.sub(r"\\(.)", r"\1", quoted) if quoted is not None else matched["bare"]
        if 0 < len(key) <= limits.IDEMPOTENCY_KEY_CHARS_MAX and not _opens_a_quote(key, quoted):
            return key
    raise ProblemError(
        Problem.MALFORMED_REQUEST,
        f"an Idempotency-Key holds 1 to {limits.IDEMPOTENCY_KEY_CHARS_MAX} visible ASCII characters",
    )


def _opens_a_quote(key: str, quoted: str | None) -> bool:
    """A bare key that begins with a quote is a broken quoted one, not a key of its own."""
    return quoted is None and key.startswith('"')


def check_url(text: str, allow: AllowList, pointer: str = "/url") -> str:
    """The URL as submitted, if the service would send to it. Raises a 422."""
    url = parse_url(text)
    if isinstance(url, UrlProblem):
        raise invalid(FieldError(pointer, url.detail))
    reason = judge_url(url, allow)
    if reason is not None:
        raise invalid(FieldError(pointer, reason))
    return text


def check_custom_headers(headers: Mapping[str, str]) -> None:
    """Raise a 422 with a pointer to each header that may not be sent."""
    problems = check_headers(headers)
    if problems:
        raise invalid(*(FieldError(_headers_pointer(problem.name), problem.detail) for problem in problems))


def _headers_pointer(name: str) -> str:
    # RFC 6901: the two characters that mean something in a pointer are escaped.
    return "/headers" + (f"/{name.replace('~', '~0').replace('/', '~1')}" if name else "")


def named_destination(request: DeliveryRequest) -> uuid.UUID | None:
    """The destination that the request names by id; None when it names a URL. Raises a 422."""
    if (request.destination_id is None) == (request.url is None):
        raise invalid(FieldError("/destination_id", "give either destination_id or url"))
    if request.destination_id is None:
        return None
    destination_id = _destination_id(request.destination_id)
    if destination_id is None:
        raise unknown_destination()
    return destination_id


# Few destinations take most of the requests.
_destination_id = functools.lru_cache(limits.DESTINATION_IDS_KEPT_MAX)(
    functools.partial(parse_typeid, Prefix.DESTINATION)
)


def unknown_destination() -> ProblemError:
    """The tenant has no such destination, whoever else may."""
    return invalid(FieldError("/destination_id", "there is no such destination"))


def to_new_delivery(
    request: DeliveryRequest,
    *,
    delivery_id: uuid.UUID,
    tenant: str,
    key: str,
    destination_id: uuid.UUID,
    payload_bytes_max: int,
    now: dt.datetime,
) -> NewDelivery:
    """The ledger's row of a request. Raises a 422 or 413 that points at the field."""
    body, content_type = _payload(request)
    if len(body) > payload_bytes_max:
        raise ProblemError(Problem.TOO_LARGE, f"a payload may hold {payload_bytes_max} bytes, this has {len(body)}")
    if request.headers:
        check_custom_headers(request.headers)
    _check_metadata(request.metadata)
    due_at, deadline_at = instant(request.deliver_at, "/deliver_at"), instant(request.deadline_at, "/deadline_at")
    _check_times(request, due_at, deadline_at, now)
    body_sha256 = hashlib.sha256(body).digest()
    event_id = request.event_id if request.event_id is not None else key
    return NewDelivery(
        id=delivery_id,
        tenant=tenant,
        key=key,
        fingerprint=_fingerprint(
            destination_id, event_id, request, content_type, body_sha256, due_at=due_at, deadline_at=deadline_at
        ),
        destination_id=destination_id,
        event_id=event_id,
        event_type=request.event_type,
        content_type=content_type,
        headers=request.headers,
        metadata=request.metadata,
        body=body,
        body_sha256=body_sha256,
        due_at=due_at,
        delay_seconds=request.delay_seconds,
        deadline_at=deadline_at,
        deadline_seconds=request.deadline_seconds,
    )


def _payload(request: DeliveryRequest) -> tuple[bytes, str]:
    """The exact bytes to send, and their content type."""
    if (request.payload is UNSET) == (request.payload_base64 is None):
        raise invalid(FieldError("/payload", "give either payload or payload_base64"))
    content_type = request.content_type
    if content_type is not None and not _CONTENT_TYPE.fullmatch(content_type):
        raise invalid(FieldError("/content_type", "a content type reads type/subtype, with parameters after a ;"))
    if request.payload is not UNSET:
        if content_type is not None:
            raise invalid(FieldError("/content_type", "a JSON payload is sent as application/json"))
        body = bytes(request.payload)
        try:
            body.decode()
        except UnicodeDecodeError:
            raise invalid(FieldError("/payload", "the payload is not UTF-8, as JSON must be")) from None
        return body, JSON_CONTENT_TYPE
    assert request.payload_base64 is not None
    try:
        return base64.b64decode(request.payload_base64, validate=True), content_type or BYTES_CONTENT_TYPE
    except (binascii.Error, ValueError):
        raise invalid(FieldError("/payload_base64", "the text is not base64 (RFC 4648, with padding)")) from None


def _check_metadata(metadata: Mapping[str, str] | None) -> None:
    for name, value in (metadata or {}).items():
        # Postgres' jsonb cannot hold a NUL; refusing it here beats failing there.
        if "\x00" in name or "\x00" in value:
            raise invalid(FieldError("/metadata", "names and values may not hold a NUL"))


def instant(at: dt.datetime | None, pointer: str) -> dt.datetime | None:
    """A time of a body, in UTC. Raises a 422."""
    try:
        return in_utc(at)
    except ValueError as error:
        raise invalid(FieldError(pointer, str(error))) from None


def _check_times(
    request: DeliveryRequest, due_at: dt.datetime | None, deadline_at: dt.datetime | None, now: dt.datetime
) -> None:
    """Times that exclude each other, or lie beyond what is kept."""
    if due_at is not None and request.delay_seconds is not None:
        raise invalid(FieldError("/delay_seconds", "give either deliver_at or delay_seconds"))
    if deadline_at is not None and request.deadline_seconds is not None:
        raise invalid(FieldError("/deadline_seconds", "give either deadline_at or deadline_seconds"))
    farthest = now + dt.timedelta(seconds=limits.DELAY_SECONDS_MAX)
    begins_at = due_at or now + dt.timedelta(seconds=request.delay_seconds or 0)
    if begins_at > farthest:
        raise invalid(FieldError("/deliver_at", "deliver_at may lie 366 days ahead at most"))
    if deadline_at is not None:
        if due_at is not None and deadline_at <= due_at:
            raise _deadline_too_early()
        if deadline_at > farthest + dt.timedelta(seconds=limits.DEADLINE_SECONDS_MAX):
            raise invalid(FieldError("/deadline_at", "the deadline lies too far ahead"))


def too_late(delivery: NewDelivery, now: dt.datetime) -> ProblemError | None:
    """The 422 of a delivery whose deadline has passed before it could be due; a repetition is spared it."""
    begins_at = delivery.due_at or now + dt.timedelta(seconds=delivery.delay_seconds or 0)
    if delivery.deadline_at is None or delivery.deadline_at > max(begins_at, now):
        return None
    return _deadline_too_early()


def _deadline_too_early() -> ProblemError:
    return invalid(FieldError("/deadline_at", "the deadline must lie after the delivery's due time"))


def _fingerprint(
    destination_id: uuid.UUID,
    event_id: str,
    request: DeliveryRequest,
    content_type: str,
    body_sha256: bytes,
    *,
    due_at: dt.datetime | None,
    deadline_at: dt.datetime | None,
) -> bytes:
    """What makes two requests the same one: their meaning, not their spelling around the payload's bytes."""
    headers = {name.lower(): value for name, value in (request.headers or {}).items()}  # a name has no case
    meaning = (
        destination_id,
        event_id,
        request.event_type,
        content_type,
        body_sha256,
        due_at,
        request.delay_seconds,
        deadline_at,
        request.deadline_seconds,
        sorted(headers.items()),
        sorted((request.metadata or {}).items()),
    )
    # As JSON, so that no two lists of parts run together to the same text.
    return hashlib.sha256(msgspec.json.encode(meaning)).digest()
