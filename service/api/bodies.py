"""Bodies in and out: read within a limit, decoded once, with problems that point at the field."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from service.api.problems import FieldError, Problem, ProblemError, invalid, json_pointer
from service.domain import limits

T = TypeVar("T")
RawHeaders = Iterable[tuple[bytes, bytes]]  # as ASGI gives them: names in lower case

_MSGSPEC_AT = re.compile(r"^(?P<detail>.*) - at (?:`key` in )?`(?P<path>\$[^`]*)`$", re.DOTALL)
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_UTF_8 = re.compile(r"(?:charset=\"?(?:utf-8|us-ascii)\"?)?;?", re.IGNORECASE)
_JSON_TYPE = re.compile(r"application/(?:[a-z0-9.+-]+\+)?json", re.IGNORECASE)


async def read_body(headers: RawHeaders, receive: Receive, bytes_max: int) -> bytes:
    """The body, refused with 415 when it is not JSON and with 413 before it is buffered.

    Raises ClientDisconnect when the client leaves before its request is whole.
    """
    content_type, declared = "", ""
    for name, value in headers:
        if name == b"content-type":
            content_type = value.decode("latin-1")
        elif name == b"content-length":
            declared = value.decode("latin-1")
    if content_type != "application/json":
        _check_content_type(content_type)
    if declared.isdigit() and (len(declared) > 15 or int(declared) > bytes_max):
        raise _too_large(bytes_max)
    body, more = await _chunk(receive)
    if not more and len(body) <= bytes_max:
        return body  # all at once, as nearly always
    whole = bytearray(body)
    while more and len(whole) <= bytes_max:
        body, more = await _chunk(receive)
        whole += body
    if len(whole) > bytes_max:
        raise _too_large(bytes_max)
    return bytes(whole)


def _check_content_type(content_type: str) -> None:
    media_type, _, parameters = content_type.partition(";")
    if not _JSON_TYPE.fullmatch(media_type.strip()) or not _UTF_8.fullmatch(parameters.strip()):
        raise ProblemError(Problem.UNSUPPORTED_MEDIA_TYPE, "send the body as application/json, in UTF-8")


async def _chunk(receive: Receive) -> tuple[bytes, bool]:
    """The next part of the body, and whether there are more."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    return message.get("body", b""), message.get("more_body", False)


def _too_large(bytes_max: int) -> ProblemError:
    # The rest of the body is not read, so the connection cannot be used again.
    return ProblemError(Problem.TOO_LARGE, f"the body may hold {bytes_max} bytes", headers={"connection": "close"})


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """The body as its schema. Raises a 422 with a pointer to the first field that is wrong."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        matched = _MSGSPEC_AT.match(str(error))
        if matched is None:
            raise invalid(FieldError("", str(error))) from None
        raise invalid(FieldError(json_pointer(matched["path"]), matched["detail"])) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(FieldError("", _not_json(body, error))) from None
    except RecursionError:
        raise invalid(FieldError("", "the body is nested too deeply")) from None


def _not_json(body: bytes, error: Exception) -> str:
    if not body:
        return "the body is empty"
    if _ESCAPED_SURROGATE.search(body):
        # Half a character is no text, and what would be made of it differs from receiver to receiver (RFC 7493).
        return "the body is not JSON: a \\u escape may stand for half a character (a surrogate without its pair)"
    return f"the body is not JSON: {error}"


async def read(request: Request, decoder: msgspec.json.Decoder[T]) -> T:
    """The body of anything but an intake: small."""
    return decode(decoder, await read_body(request.scope["headers"], request.receive, limits.REQUEST_BYTES_MAX))


encode = msgspec.json.Encoder().encode


def answer(body: msgspec.Struct, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(encode(body), status, headers, "application/json")


def schema_of(kind: Any) -> dict[str, str]:
    """The reference by which openapi.json names a body."""
    return {"$ref": f"#/components/schemas/{kind.__name__}"}
