"""An httpx transport that says how far a request came.

The rule this module keeps: one call is one request on one connection under one deadline. Whatever
interrupts it ends the connection; a response whose head arrived is a response, however its body went.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import httpx

from service.domain.address import DestinationUrl
from service.domain.outcome import Fault, Phase
from service.egress.connection import Connection
from service.egress.faults import WireError
from service.egress.guard import Guard, Progress
from service.egress.pool import Pool
from service.egress.response import ResponseReader
from service.ports import always

ROUTE: Final = "route"  # the request extension that carries a Route
NOTE: Final = "note"  # the response extension that says how the body went wrong, or None


@dataclass(frozen=True, slots=True)
class Route:
    """What a request needs to know beyond httpx's own fields.

    The request's own URL serves httpx alone: it would spell the target its way.
    """

    url: DestinationUrl
    pool_key: str
    deadline: float  # by the event loop's clock
    may_write: Callable[[], bool] = always  # asked last, before the first byte


class WireTransport(httpx.AsyncBaseTransport):
    """Sends requests that carry a Route. Responses come back whole: a status, headers, and an excerpt."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._pool = Pool()
        self._busy: set[Connection] = set()
        self._closed = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send once. Raises WireError when no complete response head arrived, and CancelledError."""
        route: Route = request.extensions[ROUTE]
        phase = Phase.NOT_SENT
        try:
            head = _head(request, route.url)
            body = await _body(request)
            connection = await self._connection(route)
            phase = Phase.WRITTEN
            reader = await self._exchange(connection, head, body, route)
            return _response(reader)
        except WireError:
            raise
        except Exception as bug:
            raise WireError(phase, Fault.INTERNAL, f"the sender failed: {type(bug).__name__}") from bug

    async def aclose(self) -> None:
        """End every connection; an exchange under way reports SHUTDOWN."""
        self._closed = True
        self._pool.close()
        for connection in list(self._busy):
            connection.shut_down()

    async def _connection(self, route: Route) -> Connection:
        """An idle connection or a new one; nothing may be awaited between this and the exchange."""
        kept = self._pool.take(_pool_key(route), asyncio.get_running_loop().time())
        if kept is not None:
            return kept
        progress = Progress()
        try:
            async with asyncio.timeout_at(route.deadline):
                return await self._guard.connect(route.url, progress)
        except TimeoutError as error:
            raise progress.timeout() from error

    async def _exchange(self, connection: Connection, head: bytes, body: bytes, route: Route) -> ResponseReader:
        self._busy.add(connection)
        try:
            if self._closed:
                raise WireError(Phase.NOT_SENT, Fault.SHUTDOWN, "the sender stopped before the request was written")
            if not route.may_write():
                raise WireError(Phase.NOT_SENT, Fault.INTERNAL, "the process was paused before the request was written")
            return await connection.exchange(head, body, route.deadline)
        finally:  # a cancelled exchange too: its connection is not fit to be kept, and ends here
            self._busy.discard(connection)
            if self._closed:
                connection.abort()
            else:
                self._pool.put(_pool_key(route), connection, asyncio.get_running_loop())


def _pool_key(route: Route) -> tuple[str, str, str, int]:
    return (route.pool_key, route.url.scheme, route.url.host, route.url.port)


def _head(request: httpx.Request, url: DestinationUrl) -> bytes:
    lines = [f"{request.method} {url.target} HTTP/1.1".encode("ascii")]
    lines += [b": ".join(header) for header in request.headers.raw]
    return b"\r\n".join(lines) + b"\r\n\r\n"


async def _body(request: httpx.Request) -> bytes:
    """The whole body. `Request.aread` would ask a `typing` class about the stream, for 10 µs."""
    assert isinstance(request.stream, httpx.AsyncByteStream), "the request is an asynchronous one"
    return b"".join([part async for part in request.stream])


def _response(reader: ResponseReader) -> httpx.Response:
    assert reader.head is not None, "an exchange without an error ends with a head"
    return httpx.Response(
        reader.head.status_code,
        headers=reader.head.headers,
        stream=httpx.ByteStream(bytes(reader.excerpt)),
        extensions={NOTE: reader.note},
    )
