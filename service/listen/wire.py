"""HTTP/1.1 as the demo receiver reads and writes it: strict, bounded, one request at a time."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from service.domain import limits
from service.listen.answers import Respond

HEAD_BYTES_MAX: Final = 64 * 1024  # also of one chunk-size line; the limit of the StreamReader
BODY_BYTES_MAX: Final = limits.PAYLOAD_BYTES_MAX
TRAILER_LINES_MAX: Final = 100

_TLS_HANDSHAKE: Final = b"\x16"
_REQUEST_LINE: Final = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+) ([\x21-\x7e\x80-\xff]+) HTTP/1\.([01])")
_HEADER: Final = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)")
_LENGTH: Final = re.compile("[0-9]{1,18}")
_CHUNK_SIZE: Final = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?\r\n")


@dataclass(frozen=True, slots=True)
class Request:
    """One request as received. Header names are lower case; text is the Latin-1 reading of the bytes."""

    method: str
    target: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    keep_alive: bool

    def header(self, name: str) -> str | None:
        """The first header of this lower-case name."""
        return next((value for given, value in self.headers if given == name), None)


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that is not read to its end: the status to say so with, and why."""

    status: int
    why: str


async def read_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Request | Refused | None:
    """The next request of a connection, or None when it ended between two requests.

    Raises asyncio.IncompleteReadError or OSError when the connection ends within one.
    """
    try:
        first = await reader.readexactly(1)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    if first == _TLS_HANDSHAKE:  # it would wait for our half of it until its timeout
        return Refused(400, "the sender speaks TLS, and this is plain HTTP: its URL should begin with http://")
    try:
        head = first + await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        return Refused(431, f"the request's head is larger than {HEAD_BYTES_MAX:,} bytes")
    parsed = _parse_head(head)
    if isinstance(parsed, Refused):
        return parsed
    if (parsed.header("expect") or "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = await _read_body(parsed, reader)
    if isinstance(body, Refused):
        return body
    return Request(parsed.method, parsed.target, parsed.headers, body, parsed.keep_alive)


def response(answer: Respond, *, method: str, keep_alive: bool) -> bytes:
    """The bytes of a response, with a line of text for a body where one may stand."""
    reason = _reason(answer.status)
    bodiless = answer.status in {204, 304}
    body = b"" if bodiless else f"{answer.status} {reason}".rstrip().encode() + b"\n"
    given = {name for name, _ in answer.headers}
    headers = list(answer.headers)
    if not bodiless:
        headers += [("content-length", str(len(body)))]
        headers += [("content-type", "text/plain; charset=utf-8")] if "content-type" not in given else []
    if not keep_alive and "connection" not in given:
        headers += [("connection", "close")]
    lines = [f"HTTP/1.1 {answer.status} {reason}", *(f"{name}: {value}" for name, value in headers), "", ""]
    return "\r\n".join(lines).encode() + (b"" if method == "HEAD" else body)


def _reason(status: int) -> str:
    return HTTPStatus(status).phrase if status in list(HTTPStatus) else ""


def _parse_head(head: bytes) -> Request | Refused:
    first, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    start = _REQUEST_LINE.fullmatch(first)
    if start is None:
        return Refused(400, "the first line is not that of an HTTP/1.1 request")
    headers = []
    for line in lines:
        match = _HEADER.fullmatch(line)
        if match is None:
            return Refused(400, "a header line is malformed")
        headers.append((match[1].lower(), match[2].rstrip(" \t")))
    options = {option.strip().lower() for name, value in headers if name == "connection" for option in value.split(",")}
    keep_alive = "close" not in options and (start[3] == "1" or "keep-alive" in options)
    return Request(start[1], start[2], tuple(headers), b"", keep_alive)


async def _read_body(request: Request, reader: asyncio.StreamReader) -> bytes | Refused:
    lengths = [value for name, value in request.headers if name == "content-length"]
    encodings = [value.lower() for name, value in request.headers if name == "transfer-encoding"]
    if encodings:
        # Both at once is how requests are smuggled; a second encoding is nothing a sender needs.
        if lengths or encodings != ["chunked"]:
            return Refused(400, "the body's framing is ambiguous or not known")
        return await _read_chunks(reader)
    if not lengths:
        return b""
    if len(lengths) > 1 or _LENGTH.fullmatch(lengths[0]) is None:
        return Refused(400, "the content-length is not one number")
    length = int(lengths[0])
    return await reader.readexactly(length) if length <= BODY_BYTES_MAX else _too_large()


async def _read_chunks(reader: asyncio.StreamReader) -> bytes | Refused:
    body = bytearray()
    try:
        while True:
            size_line = _CHUNK_SIZE.fullmatch(await reader.readuntil(b"\r\n"))
            if size_line is None:
                return Refused(400, "a chunk's size is malformed")
            size = int(size_line[1], 16)
            if size == 0:
                break
            if len(body) + size > BODY_BYTES_MAX:
                return _too_large()
            body += await reader.readexactly(size)
            if await reader.readexactly(2) != b"\r\n":
                return Refused(400, "a chunk is longer than its size")
        for _ in range(TRAILER_LINES_MAX):
            if await reader.readuntil(b"\r\n") == b"\r\n":
                return bytes(body)
    except asyncio.LimitOverrunError:
        pass
    return Refused(400, "a line of the chunked body is too long, or its trailers are")


def _too_large() -> Refused:
    return Refused(413, f"the body is larger than {BODY_BYTES_MAX:,} bytes")
