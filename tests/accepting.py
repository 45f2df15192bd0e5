"""A listening socket that leaves no connection open behind it, whatever had just come in.

Asyncio takes a few turns of the loop from an accepted connection to the protocol that hears of it, and a task
that is cancelled before its first step runs none of its own clean-up. A server that forgets either leaves a
transport behind, which fails another test, whenever the collector finds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

BACKLOG = 2_048
TURNS = 20  # accepting alone takes four, and on a busy machine they need not follow each other


async def turns() -> None:
    """Let the loop finish what it has begun: to announce a connection, to close an aborted one's socket."""
    for _ in range(TURNS):
        await asyncio.sleep(0)


class Accepting:
    """Runs `serve` for each connection to a free port (or `port`, or `sock`) while its block runs."""

    def __init__(
        self,
        serve: Serve,
        *,
        port: int = 0,
        sock: socket.socket | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.port = port
        self._serve = serve
        self._sock = sock
        self._tls = tls
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None

    @property
    def is_accepting(self) -> bool:
        return self._server is not None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen, and on the same port as before when it refused since."""
        sock = self._sock or socket.create_server(("127.0.0.1", self.port), backlog=BACKLOG)
        self._sock = None
        self.port = sock.getsockname()[1]
        self._server = await asyncio.start_server(self._accepted, sock=sock, backlog=BACKLOG, ssl=self._tls)

    async def refuse(self) -> None:
        """Accept no more; the connections that stand go on."""
        if self._server is not None:
            self._server.close()
            self._server = None
            await turns()

    async def stop(self) -> None:
        """Refuse, and close every connection."""
        await self.refuse()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            # Also one that is closing, which may wait for a peer that does not read; but before Python
            # 3.11.4, one under TLS cannot be told twice.
            if self._tls is None or not writer.transport.is_closing():
                writer.transport.abort()
        await turns()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Not a coroutine: a connection that is accepted as the block ends would be missed until its first step.
        self._writers.append(writer)
        task = asyncio.get_running_loop().create_task(self._run(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.CancelledError):  # only the end of the block cancels
            await self._serve(reader, writer)
        writer.close()
