"""Reads one HTTP/1.x response out of whatever arrives, without I/O.

The rule this module keeps: a complete head decides, and everything after it is bounded. A head is
read forgivingly, because an answer taken for garbage is a request sent again; a connection is kept
only after a body whose end was beyond doubt. Nothing is ever decompressed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from service.domain.limits import (
    CHUNK_LINE_BYTES_MAX,
    EXCERPT_BYTES_MAX,
    RESPONSE_BYTES_MAX,
    RESPONSE_CHUNK_LINES_MAX,
    RESPONSE_HEADER_BYTES_KEPT_MAX,
    RESPONSE_HEADERS_BYTES_MAX,
)

_VERSION = b"HTTP/1."
_HEAD_END = re.compile(rb"\n\r?\n")
_STATUS_LINE = re.compile(rb"HTTP/1\.([0-9]) ([1-9][0-9][0-9])(?: .*)?", re.DOTALL)
_HEADER = re.compile(rb"^([!#$%&'*+\-.^_`|~0-9A-Za-z]+):([^\x00\r\n]*)\r?$", re.MULTILINE)
# What is looked at. A head may hold ten thousand headers; kept, they would take a megabyte for each exchange.
_LOOKED_AT: Final = frozenset(
    {b"connection", b"content-length", b"keep-alive", b"location", b"retry-after", b"transfer-encoding"}
)
_LENGTH = re.compile(rb"[0-9]{1,18}")
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?", re.DOTALL)
_KEEP_ALIVE_TIMEOUT = re.compile(rb"(?:^|[, ])timeout=([0-9]{1,6})(?:$|[, ])")
_SWITCHING_PROTOCOLS: Final = 101
_BODILESS: Final = frozenset({_SWITCHING_PROTOCOLS, 204, 304})


class NotHttp(Exception):
    """What arrived is not the head of an HTTP/1.x response. The message is one short line."""


@dataclass(frozen=True, slots=True)
class Head:
    """A complete status line, and those headers that are looked at, as they came."""

    status_code: int
    headers: list[tuple[bytes, bytes]]


class _Body(Enum):
    """How the end of the body is found."""

    LENGTH = auto()
    CHUNKED = auto()
    TO_THE_END = auto()  # of the connection
    UNREADABLE = auto()  # the head contradicts itself: only what came with it is taken


class _Chunk(Enum):
    """What comes next in a chunked body."""

    SIZE = auto()
    DATA = auto()
    DATA_END = auto()
    TRAILER = auto()


class ResponseReader:
    """Fed with a connection's bytes until `done`.

    `head` is set as soon as it is complete; interim responses are passed over. `excerpt` holds the
    first bytes of the raw body. `note` says in one short line how the body went wrong, if it did.
    `reusable` tells whether the connection may carry another request, `idle_seconds_max` how long
    the receiver said it would wait for one.
    """

    __slots__ = (
        "_body",
        "_body_bytes",
        "_chunk",
        "_chunk_lines_count",
        "_head_bytes",
        "_heads_bytes",
        "_left",
        "_pending",
        "done",
        "excerpt",
        "head",
        "idle_seconds_max",
        "note",
        "reusable",
    )

    def __init__(self) -> None:
        self.head: Head | None = None
        self.excerpt = bytearray()
        self.note: str | None = None
        self.done = False
        self.reusable = False
        self.idle_seconds_max: int | None = None
        self._pending = b""  # the start of a head, or of a line of a chunked body
        self._head_bytes = 0  # that arrived before the final head was complete
        self._heads_bytes = 0  # of all heads that were read: interim ones must not go on for ever
        self._chunk_lines_count = 0
        self._body = _Body.LENGTH
        self._body_bytes = 0
        self._left = 0  # bytes of the body, or of this chunk, still to come
        self._chunk = _Chunk.SIZE

    @property
    def started(self) -> bool:
        """Whether any byte of a response arrived."""
        return self._head_bytes > 0

    @property
    def body_bytes_count(self) -> int:
        """How many bytes arrived behind the head."""
        return self._body_bytes

    def feed(self, data: bytes) -> bool:
        """Take the next bytes; true when the response is over. Raises NotHttp."""
        if self.done:
            self.reusable = False  # more than the response: nobody asked for it
            return True
        if self.head is None:
            rest = self._feed_head(data)
            if rest is None:
                return False
            data = rest
        return self._feed_body(data)

    def feed_eof(self) -> bool:
        """The connection ended; true when a head had arrived, whatever became of the body."""
        if self.head is None:
            return False
        if not self.done:
            self.cut(None if self._body is _Body.TO_THE_END else "the response body ended early")
        return True

    def cut(self, note: str | None) -> None:
        """End the response here."""
        self.done = True
        self.reusable = False
        self.note = self.note or note

    def _feed_head(self, data: bytes) -> bytes | None:
        """Read heads up to the final one; what follows it, or nothing when more must come."""
        buffer = self._pending + data if self._pending else data
        searched = max(0, len(self._pending) - 2)  # an end may straddle the seam
        self._head_bytes += len(data)
        while True:
            if not buffer.startswith(_VERSION) and not _VERSION.startswith(buffer[: len(_VERSION)]):
                raise NotHttp("the answer is not HTTP/1")
            end = _HEAD_END.search(buffer, searched)
            if end is None:
                if self._head_bytes > RESPONSE_HEADERS_BYTES_MAX:
                    raise NotHttp(f"the response head is longer than {RESPONSE_HEADERS_BYTES_MAX} bytes")
                self._pending = buffer
                return None
            self._heads_bytes += end.end()
            if self._heads_bytes > RESPONSE_HEADERS_BYTES_MAX:
                raise NotHttp(f"the response head is longer than {RESPONSE_HEADERS_BYTES_MAX} bytes")
            final = self._read_head(buffer[: end.start()])
            buffer = buffer[end.end() :]
            searched = 0
            if final:
                self._pending = b""
                return buffer

    def _read_head(self, block: bytes) -> bool:
        """Read one head; false when it is an interim one."""
        first, _, rest = block.partition(b"\n")
        status_line = _STATUS_LINE.fullmatch(first.rstrip(b"\r"))
        if status_line is None:
            raise NotHttp("the answer has no valid status line")
        status_code = int(status_line[2])
        if status_code < 200 and status_code != _SWITCHING_PROTOCOLS:
            return False
        found = _HEADER.findall(rest)
        malformed = bool(rest) and len(found) != rest.count(b"\n") + 1
        headers = [
            (name, value.strip(b" \t")[:RESPONSE_HEADER_BYTES_KEPT_MAX])
            for name, value in found
            if name.lower() in _LOOKED_AT
        ]
        self.head = Head(status_code, headers)
        self.reusable = status_line[1] != b"0"
        self._frame(status_code, headers, malformed)
        return True

    def _frame(self, status_code: int, headers: list[tuple[bytes, bytes]], malformed: bool) -> None:
        """Decide how the body ends (RFC 9112, 6.3), and on any doubt that it is not waited for."""
        lengths, codings = self._read_framing(headers)
        if malformed:
            self._give_up_on_body("a response header is malformed; the body was not read to its end")
        elif status_code in _BODILESS:
            # One that announces a body all the same may send it, and the next answer would be read from there.
            self.reusable = self.reusable and status_code != _SWITCHING_PROTOCOLS and not lengths and not codings
        elif codings:
            # A length beside a coding is how responses are split: read, but never trusted again.
            self.reusable = self.reusable and not lengths
            self._body = _Body.CHUNKED if codings[-1] == b"chunked" else _Body.TO_THE_END
        elif not lengths:
            self._body = _Body.TO_THE_END
        elif len(lengths) > 1 or _LENGTH.fullmatch(value := next(iter(lengths))) is None:
            self._give_up_on_body("the response has no single valid Content-Length; the body was not read to its end")
        else:
            self._left = int(value)

    def _read_framing(self, headers: list[tuple[bytes, bytes]]) -> tuple[set[bytes], list[bytes]]:
        """The lengths and codings a head announces; what it says of the connection is noted here."""
        lengths: set[bytes] = set()
        codings: list[bytes] = []
        for name, value in headers:
            match name.lower():
                case b"content-length":
                    lengths.add(value)
                case b"transfer-encoding":
                    codings += [coding.strip(b" \t").lower() for coding in value.split(b",")]
                case b"connection":
                    self.reusable = self.reusable and b"close" not in value.lower()
                case b"keep-alive" if timeout := _KEEP_ALIVE_TIMEOUT.search(value.lower()):
                    self.idle_seconds_max = int(timeout[1])
        return lengths, codings

    def _give_up_on_body(self, note: str) -> None:
        self._body = _Body.UNREADABLE
        self.reusable = False
        self.note = note

    def _feed_body(self, data: bytes) -> bool:
        room = RESPONSE_BYTES_MAX - self._body_bytes
        self._body_bytes += len(data)
        if len(data) > room:
            data = data[:room]  # what lies beyond is not even looked at
        match self._body:
            case _Body.LENGTH:
                self._feed_length(data)
            case _Body.CHUNKED:
                self._feed_chunked(data)
            case _Body.TO_THE_END:
                self._keep(data)
            case _Body.UNREADABLE:
                self._keep(data)
                self.done = True
        if not self.done and self._body_bytes > RESPONSE_BYTES_MAX:
            self.cut(f"the response body was not read beyond {RESPONSE_BYTES_MAX} bytes")
        return self.done

    def _keep(self, data: bytes) -> None:
        room = EXCERPT_BYTES_MAX - len(self.excerpt)
        if room > 0:
            self.excerpt += data[:room]

    def _feed_length(self, data: bytes) -> None:
        if len(data) > self._left:
            self.reusable = False  # more than the response: nobody asked for it
            data = data[: self._left]
        self._keep(data)
        self._left -= len(data)
        self.done = self._left == 0

    def _feed_chunked(self, data: bytes) -> None:
        buffer = self._pending + data if self._pending else data
        self._pending = b""
        position = 0
        while not self.done:
            if self._chunk is _Chunk.DATA:
                piece = buffer[position : position + self._left]
                self._keep(piece)
                position += len(piece)
                self._left -= len(piece)
                if self._left:
                    return
                self._chunk = _Chunk.DATA_END
            end = buffer.find(b"\n", position)
            if end < 0:
                self._pending = buffer[position:]
                if len(self._pending) > CHUNK_LINE_BYTES_MAX:
                    self.cut("the chunked response body is malformed")
                return
            self._read_chunk_line(buffer[position:end].rstrip(b"\r"))
            position = end + 1
        if position < len(buffer):
            self.reusable = False  # more than the response: nobody asked for it

    def _read_chunk_line(self, line: bytes) -> None:
        self._chunk_lines_count += 1
        if self._chunk_lines_count > 2 * RESPONSE_CHUNK_LINES_MAX:  # of each chunk, the size and the end
            self.cut(f"the response body was not read beyond {RESPONSE_CHUNK_LINES_MAX} chunks")
            return
        match self._chunk:
            case _Chunk.SIZE if size := _CHUNK_SIZE.fullmatch(line):
                self._left = int(size[1], 16)
                self._chunk = _Chunk.DATA if self._left else _Chunk.TRAILER
            case _Chunk.DATA_END if not line:
                self._chunk = _Chunk.SIZE
            case _Chunk.TRAILER:
                self.done = not line
            case _:
                self.cut("the chunked response body is malformed")
