"""A receiver that answers byte for byte, and remembers every byte it was sent.

The rule this module keeps: it knows no HTTP but the end of a request. Whatever an answer does, well
formed or not, is written in the test that plays it.

    async with Receiver(send(b"HTTP/1.1 500 Oh\\r\\n\\r\\n") + close(), ok()) as receiver:
        ...                                       # to receiver.url
        await receiver.wait_for_requests(2)
        receiver.requests[0].body

Each request takes the next answer, whatever connection it comes on; the last answer is repeated.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, cast

from tests.accepting import Accepting

PATIENCE_SECONDS = 10.0
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class Received:
    """One request as it came. Header names and values are the raw bytes, in order."""

    connection: int  # counted from 0
    method: bytes
    target: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes

    def values(self, name: str) -> list[bytes]:
        """Every value of a header, in order."""
        return [value for key, value in self.headers if key.lower() == name.lower().encode()]


@dataclass(slots=True)
class Wire:
    """One accepted connection."""

    number: int
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    raw: bytearray = field(default_factory=bytearray)  # every byte that was read
    ended: bool = False  # the peer has closed or reset it

    async def read(self) -> bytes:
        """The next bytes, or none when the peer has ended the connection."""
        try:
            data = await self.reader.read(65_536)
        except OSError:
            data = b""
        self.raw += data
        self.ended = not data
        return data

    async def write(self, data: bytes) -> None:
        """Send, as far as the peer takes it."""
        if self.writer.is_closing():
            raise ConnectionResetError
        self.writer.write(data)
        await self.writer.drain()

    def reset(self) -> None:
        """End the connection with an RST."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.writer.transport.abort()


Step = Callable[[Wire], Awaitable[None]]


class Answer:
    """Steps taken one after the other. `+` joins two answers."""

    def __init__(self, *steps: Step) -> None:
        self.steps = steps

    def __add__(self, other: Answer) -> Answer:
        return Answer(*self.steps, *other.steps)


def send(data: bytes) -> Answer:
    """These bytes; the connection stays open."""
    return Answer(lambda wire: wire.write(data))


def ok(body: bytes = b"ok", status: str = "200 OK", *headers: str) -> Answer:
    """A proper response that keeps the connection."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return send("\r\n".join(lines).encode("latin-1") + body)


def close() -> Answer:
    """End the connection properly (FIN)."""

    async def step(wire: Wire) -> None:
        wire.writer.close()

    return Answer(step)


def reset() -> Answer:
    """End the connection with an RST."""

    async def step(wire: Wire) -> None:
        wire.reset()

    return Answer(step)


def hang() -> Answer:
    """Say nothing more until the peer ends the connection."""

    async def step(wire: Wire) -> None:
        while await wire.read():
            pass

    return Answer(step)


def deaf() -> Answer:
    """Read nothing, so that the peer's writes fill every buffer on the way."""

    async def step(wire: Wire) -> None:
        cast("asyncio.Transport", wire.writer.transport).pause_reading()
        await asyncio.Event().wait()

    return Answer(step)


def drip(data: bytes, every_seconds: float) -> Answer:
    """These bytes again and again, until the peer ends the connection."""

    async def step(wire: Wire) -> None:
        peer = asyncio.ensure_future(wire.read())
        while not peer.done():
            await wire.write(data)
            await asyncio.wait({peer}, timeout=every_seconds)

    return Answer(step)


def flood(data: bytes) -> Answer:
    """These bytes again and again as fast as they are taken, until the peer ends the connection."""

    async def step(wire: Wire) -> None:
        while True:
            await wire.write(data)

    return Answer(step)


def after_reading(count: int) -> Answer:
    """Wait until so many bytes of the next request have come (for `at_connect` and races)."""

    async def step(wire: Wire) -> None:
        before = len(wire.raw)
        while len(wire.raw) - before < count and await wire.read():
            pass

    return Answer(step)


def signal(event: asyncio.Event) -> Answer:
    """Tell the test that this step was reached."""

    async def step(wire: Wire) -> None:
        event.set()

    return Answer(step)


def wait_for(event: asyncio.Event) -> Answer:
    """Go on when the test says so."""

    async def step(wire: Wire) -> None:
        await event.wait()

    return Answer(step)


class Receiver:
    """Listens on a free port of the loopback while its block runs."""

    def __init__(
        self,
        *answers: Answer,
        at_connect: Answer | None = None,
        tls: ssl.SSLContext | None = None,
        host: str = "127.0.0.1",
        receive_buffer_bytes: int | None = None,
    ) -> None:
        """`at_connect` is played on each connection before anything is read from it."""
        self.requests: list[Received] = []
        self.wires: list[Wire] = []
        self.port = 0
        self._answers = answers or (ok(),)
        self._at_connect = at_connect or Answer()
        self._tls = tls
        self._host = host
        self._receive_buffer_bytes = receive_buffer_bytes
        self._changed = asyncio.Condition()

    @property
    def url(self) -> str:
        """Where it listens, with a path."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{'https' if self._tls else 'http'}://{host}:{self.port}/hook"

    @property
    def connections(self) -> int:
        """How many connections were accepted so far (with TLS: whose handshake succeeded)."""
        return len(self.wires)

    async def wait_for_requests(self, count: int) -> None:
        """Until so many requests have come in whole."""
        await self._until(lambda: len(self.requests) >= count)

    async def wait_for_ended(self, count: int) -> None:
        """Until the sender has ended so many connections."""
        await self._until(lambda: sum(wire.ended for wire in self.wires) >= count)

    async def _until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_SECONDS), self._changed:
            await self._changed.wait_for(holds)

    async def __aenter__(self) -> Self:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if self._receive_buffer_bytes is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_buffer_bytes)
        listener.bind((self._host, 0))
        self.port = listener.getsockname()[1]
        self._accepting = Accepting(self._serve, sock=listener, tls=self._tls)
        self._accepting.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._accepting.stop()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = Wire(len(self.wires), reader, writer)
        self.wires.append(wire)
        try:
            await self._play(self._at_connect, wire)
            while (request := await _read_request(wire)) is not None:
                answer = self._answers[min(len(self.requests), len(self._answers) - 1)]
                self.requests.append(request)
                await self._notify()
                await self._play(answer, wire)
        except OSError:
            wire.ended = True
        if wire.ended:
            writer.transport.abort()
        else:
            writer.close()
        await self._notify()

    async def _play(self, answer: Answer, wire: Wire) -> None:
        for step in answer.steps:
            await step(wire)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


async def _read_request(wire: Wire) -> Received | None:
    """The next request of a connection, or none when it ends first."""
    buffer = b""
    while b"\r\n\r\n" not in buffer:
        data = await wire.read() if not wire.writer.is_closing() else b""
        if not data:
            return None
        buffer += data
    head, _, body = buffer.partition(b"\r\n\r\n")
    request_line, *lines = head.split(b"\r\n")
    method, target, _ = request_line.split(b" ")
    headers = [(name, value) for name, _, value in (line.partition(b": ") for line in lines)]
    length = next(int(value) for name, value in headers if name.lower() == b"content-length")
    parts = [body]
    missing = length - len(body)
    while missing > 0:
        data = await wire.read()
        if not data:
            return None
        parts.append(data)
        missing -= len(data)
    body = b"".join(parts)
    assert len(body) == length, "a sender never pipelines"
    return Received(wire.number, method, target, headers, body)
