"""A TCP proxy that fails on request: cuts, delays, drops an answer, goes silent, refuses.

The rule this module keeps: a fault is of the network, so it happens between two whole requests and
leaves the server to do what a server does. `CUT_AFTER` waits until the server has acted and answered,
and only then loses the answer: that is a commit whose client never hears of it.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from types import TracebackType
from typing import Final, Protocol, Self
from urllib.parse import urlsplit, urlunsplit

from tests.accepting import Accepting

CHUNK_BYTES: Final = 64 * 1024
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)
_SSL_REQUEST: Final = struct.pack("!ii", 8, 80877103)
_READY: Final = b"Z\x00\x00\x00\x05"  # Postgres: the answer is whole; one byte of state follows


class Fault(Enum):
    """What may happen to one request."""

    CUT_BEFORE = auto()  # the connection ends, and the server never hears of it
    CUT_AFTER = auto()  # the server acts, and the connection ends before its answer
    SILENCE = auto()  # nothing is forwarded any more in either direction, and nothing closed
    FAIL = auto()  # Postgres' own word for "not now": a serialization failure, and the server never hears of it


@dataclass(frozen=True, slots=True)
class Request:
    """What a client sent for one answer: its bytes, and what they ask for (empty: nothing that acts)."""

    raw: bytes
    asks: bytes


class Wire(Protocol):
    """Reads one connection's protocol, as far as faults need it."""

    def requests(self, data: bytes) -> list[Request]:
        """The requests that are whole now."""
        ...

    def answered(self, data: bytes) -> bool:
        """Whether an answer ends with these bytes."""
        ...

    def failure(self) -> bytes | None:
        """An answer that says "not now"; None where the protocol or the moment has none."""
        ...


class RawWire:
    """Any protocol whose requests are short: each piece that is read is one."""

    def requests(self, data: bytes) -> list[Request]:
        """The piece itself."""
        return [Request(data, data)]

    def answered(self, data: bytes) -> bool:
        """Any byte is an answer."""
        return bool(data)

    def failure(self) -> bytes | None:
        """There is none."""
        return None


class PostgresWire:
    """Postgres' protocol 3: a statement is asked for when it is executed, not when it is prepared.

    A prepared statement is executed by its name, so the names are kept with their text.
    """

    def __init__(self) -> None:
        self._buffer = b""
        self._pending = b""
        self._asks: list[bytes] = []
        self._statements: dict[bytes, bytes] = {}
        self._greeted = False
        self._state = b"I"  # idle, in a transaction, or in a failed one

    def requests(self, data: bytes) -> list[Request]:
        """Everything up to a Sync, a Flush or a simple query is one request."""
        self._buffer += data
        found: list[Request] = []
        while (end := self._end_of_first()) is not None:
            message, self._buffer = self._buffer[:end], self._buffer[end:]
            self._pending += message
            if self._note(message):
                found.append(Request(self._pending, b"\n".join(self._asks)))
                self._pending, self._asks = b"", []
        return found

    def _end_of_first(self) -> int | None:
        """Where the first message ends, if it is there whole. The first ones of all have no kind."""
        start = 1 if self._greeted else 0
        if len(self._buffer) < start + 4:
            return None
        end: int = start + struct.unpack_from("!i", self._buffer, start)[0]
        return end if len(self._buffer) >= end else None

    def _note(self, message: bytes) -> bool:
        """Learn from a message; answers whether it ends a request."""
        if not self._greeted:
            self._greeted = message != _SSL_REQUEST
            return True
        kind, body = message[:1], message[5:]
        if kind == b"P":
            name, text, _ = body.split(b"\0", 2)
            self._statements[name] = text
        elif kind == b"B":
            _, name, _ = body.split(b"\0", 2)
            self._asks.append(self._statements.get(name, b""))
        elif kind == b"Q":
            self._asks.append(body.rstrip(b"\0"))
        return kind not in (b"P", b"B", b"D", b"E", b"C")

    def answered(self, data: bytes) -> bool:
        """Postgres says so, and in which state it is."""
        if data[-6:-1] != _READY:
            return False
        self._state = data[-1:]
        return True

    def failure(self) -> bytes | None:
        """SQLSTATE 40001; None inside a transaction, which the server would have to know of."""
        if self._state != b"I":
            return None
        fields = b"SERROR\0VERROR\0C40001\0Mcould not serialize access (said the proxy)\0\0"
        return b"E" + struct.pack("!i", len(fields) + 4) + fields + _READY + b"I"


@dataclass(slots=True)
class _Rule:
    asks: bytes
    fault: Fault
    nth: int
    struck: asyncio.Event = field(default_factory=asyncio.Event)


Decide = Callable[[bytes], Fault | None]


class Proxy:
    """Forwards to the server of a URL while its block runs; `url` is the same URL by way of the proxy.

    `decide`, when set, is asked about every request that acts and that no rule of `on` has met.
    """

    def __init__(self, url: str, wire: Callable[[], Wire] = RawWire) -> None:
        self.decide: Decide | None = None
        self.delay_seconds = 0.0
        self.struck_count = 0
        self._url = url
        self._wire = wire
        self._rules: list[_Rule] = []
        self._links: set[_Link] = set()
        self._silent = False
        self._accepting = Accepting(self._serve)

    async def __aenter__(self) -> Self:
        await self.accept()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End every connection and accept no more."""
        await self.refuse()
        self.cut()
        await self._accepting.stop()

    @property
    def url(self) -> str:
        """The server's URL with the proxy's address."""
        parts = urlsplit(self._url)
        credentials, at, _ = parts.netloc.rpartition("@")
        return urlunsplit(parts._replace(netloc=f"{credentials}{at}127.0.0.1:{self._accepting.port}"))

    @property
    def connections_count(self) -> int:
        """How many connections go through."""
        return len(self._links)

    async def accept(self) -> None:
        """Take new connections, on the same port as ever."""
        if not self._accepting.is_accepting:
            self._accepting.start()

    async def refuse(self) -> None:
        """Refuse new connections; those that stand go on."""
        self._accepting.refuse()

    def cut(self) -> None:
        """Reset every connection."""
        for link in list(self._links):
            link.cut()

    def silence(self) -> None:
        """Half-open: take connections and bytes, forward none, close nothing."""
        self._silent = True
        for link in self._links:
            link.silence()

    def heal(self) -> None:
        """Cut what is silent, for nothing revives it, and forward whatever comes from now on."""
        self._silent = False
        self._rules.clear()
        self.decide = None
        for link in list(self._links):
            if link.is_silent:
                link.cut()

    def on(self, asks: bytes, fault: Fault, *, nth: int = 1) -> asyncio.Event:
        """Let it happen once: to the nth request from now that asks for these bytes. The event tells when it did."""
        rule = _Rule(asks, fault, nth)
        self._rules.append(rule)
        return rule.struck

    def fault_for(self, asks: bytes) -> Fault | None:
        """What shall happen to a request."""
        if not asks:
            return None
        for rule in self._rules:
            if rule.asks not in asks or rule.struck.is_set():
                continue
            rule.nth -= 1
            if rule.nth == 0:
                rule.struck.set()
                self.struck_count += 1
                return rule.fault
        fault = self.decide(asks) if self.decide is not None else None
        self.struck_count += fault is not None
        return fault

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parts = urlsplit(self._url)
        link = _Link(self, self._wire(), reader, writer)
        self._links.add(link)
        if self._silent:
            link.silence()
        try:
            await link.run(parts.hostname or "127.0.0.1", parts.port or 0)
        finally:
            self._links.discard(link)


class _Link:
    """One connection: the client's half and the server's."""

    def __init__(self, proxy: Proxy, wire: Wire, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._wire = wire
        self._client = reader, writer
        self._server: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._loses_answer = False
        self._over = asyncio.Event()

    @property
    def is_silent(self) -> bool:
        return not self._flowing.is_set()

    def silence(self) -> None:
        self._flowing.clear()

    def cut(self) -> None:
        self._over.set()

    async def run(self, host: str, port: int) -> None:
        """Forward until one side ends, or it is cut. A server that is away is an end as well."""
        tasks: list[asyncio.Task[object]] = [asyncio.create_task(self._over.wait())]
        try:
            self._server = await asyncio.open_connection(host, port)
            tasks += [asyncio.create_task(self._forward()), asyncio.create_task(self._back())]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        except OSError:
            pass
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            _reset(self._client[1])
            if self._server is not None:
                _reset(self._server[1])

    async def _forward(self) -> None:
        """From the client to the server, a request at a time."""
        assert self._server is not None
        while data := await self._client[0].read(CHUNK_BYTES):
            for request in self._wire.requests(data):
                if not await self._pass_on(request, self._server[1]):
                    return

    async def _pass_on(self, request: Request, server: asyncio.StreamWriter) -> bool:
        """Forward a request, or let its fault happen; False when that is the connection's end."""
        fault = self._proxy.fault_for(request.asks)
        if fault is Fault.FAIL:
            failure = self._wire.failure()
            if failure is not None:
                self._client[1].write(failure)
                return True
            fault = Fault.CUT_BEFORE
        if fault is Fault.CUT_BEFORE:
            return False
        if fault is Fault.SILENCE:
            self.silence()
        self._loses_answer = fault is Fault.CUT_AFTER
        await self._flowing.wait()
        if self._proxy.delay_seconds:
            await asyncio.sleep(self._proxy.delay_seconds)
        server.write(request.raw)
        await server.drain()
        return True

    async def _back(self) -> None:
        """From the server to the client."""
        assert self._server is not None
        while data := await self._server[0].read(CHUNK_BYTES):
            answered = self._wire.answered(data)
            if self._loses_answer:
                if answered:
                    return
                continue
            await self._flowing.wait()
            self._client[1].write(data)
            await self._client[1].drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    """End a connection as a crash does: with a reset, and without a word."""
    connection = writer.get_extra_info("socket")
    if connection is not None and connection.fileno() >= 0:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    writer.transport.abort()
