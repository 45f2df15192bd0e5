"""A receiver that answers each path by its script and keeps every request. Cheap enough for thousands."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from tests.accepting import Accepting

SIGNALS_WITHIN_SECONDS = 60.0
HANG = "hang"


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request, as it came."""

    at: float
    headers: dict[str, str]
    body: bytes

    @property
    def webhook_id(self) -> str:
        return self.headers["webhook-id"]


class ScriptedReceiver:
    """Listens on a free port. `scripts[path]` is answered line by line, its last line again and again."""

    def __init__(self) -> None:
        self.scripts: defaultdict[str, list[str]] = defaultdict(lambda: ["200"])
        self.arrivals: defaultdict[str, list[Arrival]] = defaultdict(list)
        self.released = asyncio.Event()
        self._changed = asyncio.Condition()
        self._accepting = Accepting(self._connected)

    async def __aenter__(self) -> Self:
        self._accepting.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._accepting.stop()

    def url(self, path: str) -> str:
        """The URL of a path."""
        return f"http://127.0.0.1:{self._accepting.port}{path}"

    async def wait_for(self, path: str, count: int, *, distinct: bool = False) -> list[Arrival]:
        """Wait until so many requests came, or requests for so many deliveries."""

        def enough() -> bool:
            arrivals = self.arrivals[path]
            return (len({arrival.webhook_id for arrival in arrivals}) if distinct else len(arrivals)) >= count

        async with self._changed, asyncio.timeout(SIGNALS_WITHIN_SECONDS):
            await self._changed.wait_for(enough)
        return self.arrivals[path]

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await self._exchange(reader, writer)

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        path = head[0].split(" ")[1]
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        body = await reader.readexactly(int(headers["content-length"]))
        script = self.scripts[path]
        answer = script.pop(0) if len(script) > 1 else script[0]
        async with self._changed:
            self.arrivals[path].append(Arrival(time.monotonic(), headers, body))
            self._changed.notify_all()
        if answer == HANG:
            await self.released.wait()
            answer = "200"
        writer.write(f"HTTP/1.1 {answer} As scripted\r\ncontent-length: 2\r\n\r\nok".encode())
        await writer.drain()
