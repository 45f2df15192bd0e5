"""The demo receiver's server. It records and reports every request, and prints nothing itself."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import errno
import hashlib
import socket
import struct
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, assert_never

from service import ed25519
from service.domain import signing
from service.errors import StartError
from service.listen import answers, wire
from service.listen.answers import Answer, Misbehaviour, Respond
from service.listen.wire import Refused, Request

CONNECTIONS_MAX: Final = 500
RECEIVED_MAX: Final = 1_000  # requests kept in `Listener.received`,
RECEIVED_BYTES_MAX: Final = 64 * 1024 * 1024  # and their bodies; the newest is kept in any case
IDS_REMEMBERED_MAX: Final = 100_000
DRAIN_SECONDS: Final = 2.0  # how long a refused sender may go on sending, so that it reads the refusal
DRAIN_CHUNK_BYTES: Final = 64 * 1024

_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)  # SO_LINGER of no time: closing sends RST, not FIN
_GARBAGE: Final = b"\x00\xff\xfenot HTTP at all\x1b[31m\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Received:
    """One request and the answer it gets.

    `verdict` is None when there is no secret to check with. `seen_count` counts this request too,
    and is 0 without a webhook-id; `changed` says that the one before, of the same id, had other bytes.
    """

    at: dt.datetime
    request: Request
    sha256: str
    verdict: signing.Verdict | None
    seen_count: int
    changed: bool
    answer: Answer


class Listener:
    """A receiver on one port. Port 0 picks a free one.

    The callbacks are called on the event loop, before the answer is given.
    """

    def __init__(
        self,
        port: int,
        *,
        secret: str | None = None,
        answer: str = "200",
        host: str = "127.0.0.1",
        on_received: Callable[[Received], None] = lambda _: None,
        on_note: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Read the options. Raises StartError for one that is malformed."""
        self.script = _script(answer)
        self.received: deque[Received] = deque()
        self.received_count = 0
        self._keys = () if secret is None else (_key(secret),)
        self._host = host
        self._port = port
        self._on_received = on_received
        self._on_note = on_note
        self._seen: OrderedDict[bytes, tuple[int, str]] = OrderedDict()
        self._received_bytes = 0
        self._anonymous_count = 0
        self._arrived = asyncio.Condition()
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def checks_signatures(self) -> bool:
        """Whether there is a secret to check with."""
        return bool(self._keys)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{_authority(self._host, self._port)}"

    async def start(self) -> None:
        """Bind and listen. Raises StartError."""
        try:
            self._server = await asyncio.start_server(
                self._connected, self._host, self._port, limit=wire.HEAD_BYTES_MAX
            )
        except (OSError, OverflowError) as error:
            raise StartError(_why_not_bound(self._host, self._port, error)) from error
        self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close every connection and the port."""
        if self._server is None:
            return
        server, self._server = self._server, None
        server.close()
        connections = list(self._connections)
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        await server.wait_closed()

    async def arrivals(self, count: int) -> None:
        """Wait until this many requests have arrived since the start."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: self.received_count >= count)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Not a coroutine: until its first step, `stop` would know nothing of the connection.
        if self._server is None or len(self._connections) >= CONNECTIONS_MAX:
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(lambda _: self._ended(task, writer))

    def _ended(self, task: asyncio.Task[None], writer: asyncio.StreamWriter) -> None:
        # Also for a task that was cancelled before its first step, which runs nothing of its own.
        self._connections.discard(task)
        writer.transport.abort()  # does nothing to a connection that is closed

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._converse(reader, writer)
            writer.close()
            await writer.wait_closed()
        except (asyncio.IncompleteReadError, OSError):
            self._on_note("the sender's connection ended within a request or before the answer")

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        goes_on = True
        while goes_on:
            request = await wire.read_request(reader, writer)
            if request is None:
                return
            if isinstance(request, Refused):
                await self._refuse(request, reader, writer)
                return
            received = await self._record(request)
            self._on_received(received)
            goes_on = await self._answer(received, reader, writer)

    async def _refuse(self, refused: Refused, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._on_note(f"refused with {refused.status}: {refused.why}")
        writer.write(wire.response(Respond(refused.status), method="POST", keep_alive=False))
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(DRAIN_SECONDS):
                await writer.drain()
                await _drain(reader)

    async def _record(self, request: Request) -> Received:
        digest = hashlib.sha256(request.body).hexdigest()
        seen_count, changed = self._remember(request.header("webhook-id"), digest)
        now = dt.datetime.now(dt.UTC)
        received = Received(
            at=now,
            request=request,
            sha256=digest,
            verdict=self._verify(request, now) if self._keys else None,
            seen_count=seen_count,
            changed=changed,
            answer=answers.nth(self.script, seen_count or self._anonymous_count),
        )
        self.received.append(received)
        self._received_bytes += len(request.body)
        while len(self.received) > 1 and (
            len(self.received) > RECEIVED_MAX or self._received_bytes > RECEIVED_BYTES_MAX
        ):
            self._received_bytes -= len(self.received.popleft().request.body)
        async with self._arrived:
            self.received_count += 1
            self._arrived.notify_all()
        return received

    def _remember(self, webhook_id: str | None, digest: str) -> tuple[int, bool]:
        if not webhook_id:
            self._anonymous_count += 1  # requests without an id go through the script together
            return 0, False
        key = hashlib.sha256(webhook_id.encode()).digest()  # an id may be as long as a head
        count, last = self._seen.pop(key, (0, digest))
        self._seen[key] = count + 1, digest
        if len(self._seen) > IDS_REMEMBERED_MAX:
            self._seen.popitem(last=False)
        return count + 1, last != digest

    def _verify(self, request: Request, now: dt.datetime) -> signing.Verdict:
        return signing.verify(
            request.header("webhook-id"),
            request.header("webhook-timestamp"),
            request.header("webhook-signature"),
            request.body,
            keys=self._keys,
            now_unix_seconds=now.timestamp(),
        )

    async def _answer(self, received: Received, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Give the answer; whether the connection may carry another request."""
        answer = received.answer
        match answer:
            case Respond():
                return await self._respond(answer, received.request, writer)
            case Misbehaviour.HANG:
                await _drain(reader)
                waited = (dt.datetime.now(dt.UTC) - received.at).total_seconds()
                self._on_note(f"the sender gave up after {waited:.1f} s without an answer")
            case Misbehaviour.RESET:
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                writer.transport.abort()
            case Misbehaviour.CLOSE:
                pass  # the caller closes
            case Misbehaviour.GARBAGE:
                writer.write(_GARBAGE)
                await writer.drain()
            case _:
                assert_never(answer)
        return False

    async def _respond(self, answer: Respond, request: Request, writer: asyncio.StreamWriter) -> bool:
        if answer.after_seconds:
            await asyncio.sleep(answer.after_seconds)
        keep_alive = request.keep_alive and ("connection", "close") not in answer.headers
        writer.write(wire.response(answer, method=request.method, keep_alive=keep_alive))
        await writer.drain()
        return keep_alive


async def _drain(reader: asyncio.StreamReader) -> None:
    """Read to the end of the connection and forget it."""
    with contextlib.suppress(ConnectionError):
        while await reader.read(DRAIN_CHUNK_BYTES):
            pass


def _script(answer: str) -> answers.Script:
    script = answers.parse_script(answer)
    if script is None:
        raise StartError(f"--answer takes {answers.FORMS}.")
    return script


def _key(secret: str) -> bytes | signing.Ed25519Verify:
    key = signing.parse_secret(secret)
    if key is not None:
        return key
    public = signing.parse_public_key(secret)
    if public is None:  # the sentence does not repeat it: it may be a secret with a typing error
        raise StartError(
            "--secret takes `whsec_` and the base64 of 24 to 64 bytes, as a destination's creation or rotation shows,"
            " or the `whpk_…` of a destination that signs with v1a."
        )
    return ed25519.verifier(public)


def _authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _why_not_bound(host: str, port: int, error: OSError | OverflowError) -> str:
    where = _authority(host, port)
    if isinstance(error, OverflowError):
        return f"Port {port} is not a port: --port takes a number from 0 to 65535."
    if error.errno == errno.EADDRINUSE:
        return f"Another process already listens on {where}: choose another --port."
    if error.errno == errno.EACCES:
        return f"There is no permission to listen on {where}: choose a --port above 1023."
    return f"Cannot listen on {where}: {error.strerror or error}."
