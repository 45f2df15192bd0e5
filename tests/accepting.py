"""A listening socket that leaves no connection open behind it, whatever had just come in.

Asyncio's own server takes a few turns of the loop from an accepted connection to the protocol that hears of it.
One that is closed in between (before Python 3.12) or cancelled before its first step leaves a socket behind, which
fails another test, whenever the collector finds it. So connections are accepted here, and each is somebody's from the
moment that it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

Take = Callable[[socket.socket], None]
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

BACKLOG = 2_048
TURNS = 20


async def turns() -> None:
    """Let the loop finish what it has begun: an aborted transport closes its socket in the next turn."""
    for _ in range(TURNS):
        await asyncio.sleep(0)


class Listening:
    """Gives each connection to a free port (or `port`, or `sock`) to `take` between `start` and `refuse`."""

    def __init__(self, take: Take, *, port: int = 0, sock: socket.socket | None = None) -> None:
        self.port = port
        self._take = take
        self._given = sock
        self._sock: socket.socket | None = None

    @property
    def is_accepting(self) -> bool:
        return self._sock is not None

    def start(self) -> None:
        """Listen, and on the same port as before when it refused since."""
        sock = self._given or socket.create_server(("127.0.0.1", self.port), backlog=BACKLOG)
        self._given = None
        sock.setblocking(False)
        sock.listen(BACKLOG)
        self.port = sock.getsockname()[1]
        self._sock = sock
        asyncio.get_running_loop().add_reader(sock, self._accept, sock)

    def refuse(self) -> None:
        """Accept no more; the connections that stand go on."""
        if self._sock is not None:
            asyncio.get_running_loop().remove_reader(self._sock)
            self._sock.close()
            self._sock = None

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            while True:
                connection, _ = listener.accept()
                connection.setblocking(False)
                self._take(connection)


class Accepting:
    """Runs `serve` for each connection while its block runs."""

    def __init__(
        self,
        serve: Serve,
        *,
        sock: socket.socket | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._serve = serve
        self._tls = tls
        self._listening = Listening(self._take, sock=sock)
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    @property
    def port(self) -> int:
        return self._listening.port

    @property
    def is_accepting(self) -> bool:
        return self._listening.is_accepting

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def start(self) -> None:
        """Accept connections, and on the same port as before when it refused since."""
        self._listening.start()

    def refuse(self) -> None:
        """Accept no more; the connections that stand go on."""
        self._listening.refuse()

    async def stop(self) -> None:
        """Refuse, and close every connection."""
        self.refuse()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            # Also one that is closing, which may wait for a peer that does not read; but before Python
            # 3.11.4, one under TLS cannot be told twice.
            if self._tls is None or not writer.transport.is_closing():
                writer.transport.abort()
        await turns()

    def _take(self, connection: socket.socket) -> None:
        task = asyncio.get_running_loop().create_task(self._run(connection))
        self._tasks.add(task)
        task.add_done_callback(lambda _: self._ended(task, connection))

    def _ended(self, task: asyncio.Task[None], connection: socket.socket) -> None:
        self._tasks.discard(task)
        if task.cancelled():  # before its first step, or while it made the transport: nobody else has the socket
            connection.close()

    async def _run(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(loop=loop)
        connected: list[asyncio.StreamWriter] = []
        # With a callback it is the server's side, which `start_tls` asks for.
        protocol = asyncio.StreamReaderProtocol(reader, lambda _, writer: connected.append(writer), loop=loop)
        try:
            await loop.connect_accepted_socket(lambda: protocol, connection, ssl=self._tls)
        except OSError:  # a handshake that failed, or was never begun
            connection.close()
            return
        [writer] = connected
        self._writers.append(writer)
        with contextlib.suppress(asyncio.CancelledError):  # only the end of the block cancels
            await self._serve(reader, writer)
        writer.close()
