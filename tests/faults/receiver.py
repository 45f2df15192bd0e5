"""A receiver that answers each delivery by its path's script, and logs every request it was sent.

The rule this module keeps: what is logged as answered was written whole, and an answer that was
meant and not written is not logged. Cheap enough for thousands of requests beside what it receives.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import socket
import struct
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, cast

from tests.accepting import Listening, turns

PATIENCE_SECONDS = 40.0
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class Reply:
    """What to answer. `held`: not before `Receiver.release()`. Without a status: reset the connection."""

    status: int | None = 200
    retry_after_seconds: int | None = None
    held: bool = False


OK = Reply()
RESET = Reply(None)
HELD = Reply(held=True)


@dataclass(slots=True)
class Request:
    """One request, as it came, and what was answered; `answered` stays None when nothing was."""

    at: dt.datetime
    path: str
    headers: dict[str, str]
    body: bytes
    reply: Reply = OK
    answered: int | None = None
    witnessed: int | None = None  # the attempt that the ledger showed while this was not yet answered

    @property
    def webhook_id(self) -> str:
        """The delivery."""
        return self.headers["webhook-id"]

    @property
    def attempt(self) -> int:
        """The attempt's number, as the sender gives it."""
        return int(self.headers["hookledger-attempt"])


Witness = Callable[[str], Awaitable[int | None]]


@dataclass(slots=True)
class Receiver:
    """Listens on a free port of the loopback while its block runs.

    `scripts[path]` is played from its beginning for each delivery, its last line again and again;
    `decide`, when set, answers instead. `witness` is asked about a delivery before it is answered.
    """

    scripts: defaultdict[str, list[Reply]] = field(default_factory=lambda: defaultdict(lambda: [OK]))
    decide: Callable[[Request], Reply] | None = None
    witness: Witness | None = None
    requests: list[Request] = field(default_factory=list)
    _by_path: defaultdict[str, list[Request]] = field(default_factory=lambda: defaultdict(list))
    _times: Counter[tuple[str, str]] = field(default_factory=Counter)
    _distinct: Counter[str] = field(default_factory=Counter)
    _held: list[tuple[Request, _Connection]] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _asking: set[asyncio.Task[None]] = field(default_factory=set)
    _connections: set[_Connection] = field(default_factory=set)
    _opening: set[asyncio.Task[object]] = field(default_factory=set)
    _listening: Listening = field(init=False)

    async def __aenter__(self) -> Self:
        self._listening = Listening(self._accepted)
        self._listening.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listening.refuse()
        for task in self._asking:
            task.cancel()
        await asyncio.gather(*self._asking, *self._opening, return_exceptions=True)
        for connection in list(self._connections):
            connection.transport.abort()
        await turns()

    def _accepted(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        opening = loop.create_task(loop.connect_accepted_socket(lambda: _Connection(self), connection))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)

    def url(self, path: str) -> str:
        """The URL of a path."""
        return f"http://127.0.0.1:{self._listening.port}{path}"

    def at(self, path: str) -> list[Request]:
        """The requests that came to a path, in order."""
        return self._by_path[path]

    def release(self) -> None:
        """Answer every request that is held, with its status; those whose sender is gone stay unanswered."""
        held, self._held = self._held, []
        for request, connection in held:
            connection.write(request)

    async def wait_for(self, path: str, count: int, *, distinct: bool = False) -> list[Request]:
        """Wait until so many requests came to the path, or requests for so many deliveries."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while (self._distinct[path] if distinct else len(self._by_path[path])) < count:
                self._changed.clear()
                await self._changed.wait()
        return self._by_path[path]

    def take(self, request: Request, connection: _Connection) -> None:
        """Log a request that came in whole, and answer it."""
        earlier = self._times[request.path, request.webhook_id]
        self._times[request.path, request.webhook_id] += 1
        self._distinct[request.path] += not earlier
        self.requests.append(request)
        self._by_path[request.path].append(request)
        script = self.scripts[request.path]
        request.reply = self.decide(request) if self.decide is not None else script[min(earlier, len(script) - 1)]
        self._changed.set()
        if self.witness is None:
            self._answer(request, connection)
        else:
            asking = asyncio.create_task(self._ask_and_answer(self.witness, request, connection))
            self._asking.add(asking)
            asking.add_done_callback(self._asking.discard)

    async def _ask_and_answer(self, witness: Witness, request: Request, connection: _Connection) -> None:
        request.witnessed = await witness(request.webhook_id)
        self._answer(request, connection)

    def _answer(self, request: Request, connection: _Connection) -> None:
        if request.reply.held:
            self._held.append((request, connection))
        else:
            connection.write(request)

    def note(self, connection: _Connection, *, open_: bool) -> None:
        """Keep account of a connection that began or ended."""
        (self._connections.add if open_ else self._connections.discard)(connection)


class _Connection(asyncio.Protocol):
    """One accepted connection. A sender never pipelines, so one request is under way at most."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._receiver.note(self, open_=True)

    def connection_lost(self, exc: Exception | None) -> None:
        self._receiver.note(self, open_=False)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if (end := self._buffer.find(b"\r\n\r\n")) < 0:
            return
        line, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (each.partition(": ") for each in lines)}
        whole = end + 4 + int(headers["content-length"])
        if len(self._buffer) < whole:
            return
        body = bytes(self._buffer[end + 4 : whole])
        del self._buffer[:whole]
        self._receiver.take(Request(dt.datetime.now(dt.UTC), line.split(" ")[1], headers, body), self)

    def write(self, request: Request) -> None:
        """Answer as the reply says, unless the sender is gone."""
        if self.transport.is_closing():
            return
        reply = request.reply
        if reply.status is None:
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            self.transport.abort()
            return
        again = f"retry-after: {reply.retry_after_seconds}\r\n" if reply.retry_after_seconds is not None else ""
        self.transport.write(f"HTTP/1.1 {reply.status} As scripted\r\n{again}content-length: 2\r\n\r\nok".encode())
        request.answered = reply.status
