"""A producer's side of the API, by hand: an HTTP client library would be the slowest part of a test.

The rule this module keeps: whatever was answered is logged, and so is that nothing was.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import time
from dataclasses import dataclass
from typing import Any

from tests.faults.records import Asked

ANSWER_SECONDS = 30.0
_keys = itertools.count(time.time_ns())


class NoAnswer(Exception):
    """The connection could not be made, or ended before a whole answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One HTTP answer. Header names in lower case."""

    status: int
    headers: dict[str, str]
    content: bytes

    @property
    def json(self) -> Any:
        """The body."""
        return json.loads(self.content)


class Connection:
    """One keep-alive connection, made anew after it ended; one request at a time."""

    def __init__(self, port: int, api_key: str) -> None:
        self._port = port
        self._api_key = api_key
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._turn = asyncio.Lock()

    async def request(self, method: str, path: str, body: bytes = b"", key: str | None = None) -> Answer:
        """One request. Raises NoAnswer; whether it took effect is not known then."""
        async with self._turn:
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    return await self._exchange(method, path, body, key)
            except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
                await self._drop()
                raise NoAnswer(repr(error)) from error

    async def _exchange(self, method: str, path: str, body: bytes, key: str | None) -> Answer:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        lines = [f"{method} {path} HTTP/1.1", "host: test", f"authorization: Bearer {self._api_key}"]
        lines += [f"idempotency-key: {key}"] if key is not None else []
        lines += ["content-type: application/json", f"content-length: {len(body)}", "", ""]
        writer.write("\r\n".join(lines).encode() + body)
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])}
        content = await reader.readexactly(int(headers.get("content-length", 0)))
        if headers.get("connection", "") == "close":
            await self._drop()
        return Answer(int(head[0].split(" ")[1]), headers, content)

    async def _drop(self) -> None:
        if self._streams is not None:
            _, writer = self._streams
            self._streams = None
            writer.transport.abort()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def close(self) -> None:
        """End the connection."""
        await self._drop()


@dataclass(frozen=True, slots=True)
class Destination:
    """Where deliveries go."""

    id: str
    path: str
    secret: str


class Producer:
    """Posts deliveries over connections of its own, several at once, and logs each request in `log`."""

    def __init__(self, connections: list[Connection], log: list[Asked]) -> None:
        self._connections = connections
        self._log = log
        self._turn = itertools.cycle(connections)

    async def post(
        self, destination: Destination, payload: bytes = b"1", *, key: str | None = None, over: Connection | None = None
    ) -> Answer:
        """Ask for one delivery, once. Raises NoAnswer."""
        key = key or new_key()
        sha256 = hashlib.sha256(payload).hexdigest()
        body = b'{"destination_id":"%s","payload":%s}' % (destination.id.encode(), payload)
        try:
            answer = await (over or next(self._turn)).request("POST", "/deliveries", body, key)
        except NoAnswer:
            self._log.append(Asked(key, destination.id, sha256, None, None))
            raise
        delivery_id = answer.json["id"] if answer.status in (200, 202) else None
        self._log.append(Asked(key, destination.id, sha256, answer.status, delivery_id))
        return answer

    async def accepted(self, destination: Destination, payload: bytes = b"1") -> str:
        """Ask for one delivery, see it accepted, and return its id."""
        answer = await self.post(destination, payload)
        assert answer.status == 202, answer.content
        delivery_id: str = answer.json["id"]
        return delivery_id

    async def insist(self, destination: Destination, payload: bytes = b"1") -> str:
        """Ask under one key until it is answered with a delivery, as a producer should; its id."""
        key = new_key()
        while True:
            with contextlib.suppress(NoAnswer):
                answer = await self.post(destination, payload, key=key)
                if answer.status in (200, 202):
                    delivery_id: str = answer.json["id"]
                    return delivery_id
                assert answer.status == 503, answer.content
            await asyncio.sleep(0.05)  # a producer's pause before it repeats

    async def many(self, destination: Destination, count: int, payload: bytes = b"1") -> list[str]:
        """So many accepted deliveries, shared out over the connections."""
        numbers = iter(range(count))

        async def serve(connection: Connection) -> list[str]:
            found = []
            for _ in numbers:
                answer = await self.post(destination, payload, over=connection)
                assert answer.status == 202, answer.content
                found.append(answer.json["id"])
            return found

        return list(itertools.chain(*await asyncio.gather(*map(serve, self._connections))))


def new_key() -> str:
    """An idempotency key that nobody had."""
    return f"key-{next(_keys)}"
