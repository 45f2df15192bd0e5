"""The Sender: one POST, and the facts of what became of it.

The rule this module keeps: every failure is a value and only cancellation is raised. What is sent is
exactly what the ledger holds: this URL, these headers, these bytes, once.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
from typing import Final
from urllib.parse import urlsplit

import httpx

from service.domain.address import AllowList, EgressProxy, UrlProblem, parse_url
from service.domain.headers import wire_problem
from service.domain.limits import ERROR_CHARS_MAX, HOST_CHARS_MAX
from service.domain.outcome import Exchange, Fault, Phase
from service.egress.dial import Resolve
from service.egress.faults import WireError
from service.egress.guard import Guard, SystemResolver, tls_context
from service.egress.transport import NOTE, ROUTE, Route, WireTransport
from service.ports import OutboundRequest

_NOT_MODIFIED: Final = 304


class HttpSender:
    """Sends over HTTP/1.1, to public addresses and those of the allow-list, directly or through a proxy."""

    def __init__(
        self,
        allow: AllowList,
        *,
        proxy: EgressProxy | None = None,
        tls: ssl.SSLContext | None = None,
        resolve: Resolve | None = None,
    ) -> None:
        """`tls` and `resolve` replace the system's certificates and resolver."""
        guard = Guard(allow, tls if tls is not None else tls_context(), resolve or SystemResolver(), proxy)
        self._transport = WireTransport(guard)

    async def send(self, request: OutboundRequest) -> Exchange:
        """Send once. Every failure is a value; only cancellation is raised."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        phase = Phase.NOT_SENT
        try:
            prepared = _prepare(request, started + request.timeout_seconds)
            phase = Phase.WRITTEN  # the transport says itself how far it came; a bug after it is not "not sent"
            response = await self._transport.handle_async_request(prepared)
            return await _facts(response, _milliseconds(loop.time() - started))
        except WireError as error:
            latency_ms = _milliseconds(loop.time() - started)
            return Exchange(error.phase, latency_ms, fault=error.fault, error=_one_line(error.detail))
        except Exception as bug:
            latency_ms = _milliseconds(loop.time() - started)
            return Exchange(phase, latency_ms, fault=Fault.INTERNAL, error=f"the sender failed: {type(bug).__name__}")

    async def close(self) -> None:
        """Close every connection; what is under way ends with Fault.SHUTDOWN."""
        await self._transport.aclose()


def _prepare(request: OutboundRequest, deadline: float) -> httpx.Request:
    """The request as httpx knows one. Raises WireError when the ledger's row may not be sent as it is."""
    url = _parse_url(request.url)
    if isinstance(url, UrlProblem):
        raise WireError(Phase.NOT_SENT, Fault.BLOCKED, f"the URL is not allowed: {url.detail}")
    problem = wire_problem(request.headers)
    if problem is not None:
        raise WireError(Phase.NOT_SENT, Fault.BLOCKED, problem)
    headers = [(b"Host", url.host_header.encode("ascii"))]
    headers += [(name.encode("ascii"), value.encode("ascii")) for name, value in request.headers]
    headers += [(b"Content-Length", b"%d" % len(request.body)), (b"Accept-Encoding", b"identity")]
    return httpx.Request(
        "POST",
        _origin(url.origin),
        headers=headers,
        stream=httpx.ByteStream(request.body),  # given as a stream, httpx adds no header of its own
        extensions={ROUTE: Route(url, request.pool_key, deadline, request.may_write)},
    )


_parse_url = functools.lru_cache(maxsize=1_024)(parse_url)


@functools.lru_cache(maxsize=1_024)
def _origin(origin: str) -> httpx.URL:
    """What httpx may know of a URL. The rest it would spell its own way, and show in its messages."""
    return httpx.URL(origin)


async def _facts(response: httpx.Response, latency_ms: int) -> Exchange:
    assert isinstance(response.stream, httpx.AsyncByteStream), "the transport is an asynchronous one"
    status_code = response.status_code
    note: str | None = response.extensions[NOTE]
    headers = {name.lower(): value for name, value in reversed(response.headers.raw)}  # of two, the first counts
    if status_code // 100 == 3 and status_code != _NOT_MODIFIED:
        note = _redirect(status_code, headers.get(b"location"))
    return Exchange(
        Phase.RESPONDED,
        latency_ms,
        status_code=status_code,
        error=None if note is None else _one_line(note),
        retry_after=headers[b"retry-after"].decode("latin-1") if b"retry-after" in headers else None,
        excerpt=b"".join([part async for part in response.stream]),
    )


def _redirect(status_code: int, location: bytes | None) -> str:
    """Where a redirect points, by host alone: its path and query may carry a secret."""
    if location is None:
        return f"{status_code} without a Location"
    host = _host_of(location.decode("latin-1"))
    where = "a Location without a valid host" if host is None else host
    return f"{status_code} to {where}; redirects are not followed"


def _host_of(location: str) -> str | None:
    """For people: nothing goes there, so a reference that could not be sent to is read as well."""
    try:
        host = urlsplit(location).hostname
    except ValueError:
        return None
    return host[:HOST_CHARS_MAX] if host and host.isascii() else None


def _one_line(text: str) -> str:
    return " ".join(text.split())[:ERROR_CHARS_MAX]


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1_000)
