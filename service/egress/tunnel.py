"""Reaches destinations through the one egress proxy of a network that requires it.

The rule this module keeps: the proxy is given a numeric address that was judged, never a name, and
whatever goes wrong before the tunnel stands is the proxy's fault, so ours, and nothing was sent.
What happens inside a tunnel that stands is the destination's, as on any other way to it.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Final

from service.domain.address import EgressProxy, IPAddress
from service.domain.limits import DIAL_PATIENCE_SECONDS, PROXY_CHECK_SECONDS
from service.domain.outcome import Fault, Phase
from service.egress.dial import Resolve, dial
from service.egress.faults import WireError, lookup_error
from service.egress.response import NotHttp, ResponseReader

_READ_BYTES: Final = 4_096
# The proxy works and did not come through to this address: another address of the name may do.
_NOT_REACHED: Final = frozenset({502, 503, 504})


class _NotReachedError(WireError):
    """The proxy did not come through to one address."""


class Tunnels:
    """Opens tunnels through a proxy, by CONNECT."""

    def __init__(self, proxy: EgressProxy, resolve: Resolve) -> None:
        self._proxy = proxy
        self._resolve = resolve

    async def open(self, addresses: list[IPAddress], port: int) -> socket.socket:
        """A socket that leads to the first address that the proxy reaches. Raises WireError."""
        failure: WireError | None = None
        for left, address in zip(range(len(addresses) - 1, -1, -1), addresses, strict=True):
            try:
                async with asyncio.timeout(DIAL_PATIENCE_SECONDS if left else None):
                    return await self._tunnel(address, port)
            except TimeoutError:
                failure = proxy_error("did not come through in time")
            except _NotReachedError as error:
                failure = error
        assert failure is not None, "there is at least one address"
        raise failure

    async def problem(self) -> str | None:
        """Why the proxy accepts no connection, or nothing. It is asked for no tunnel."""
        try:
            async with asyncio.timeout(PROXY_CHECK_SECONDS):
                (await self._dial()).close()
        except TimeoutError:
            return proxy_error("did not accept a connection in time").detail
        except WireError as error:
            return error.detail
        return None

    async def _tunnel(self, address: IPAddress, port: int) -> socket.socket:
        sock = await self._dial()
        try:
            status_code = await _ask(sock, _connect_request(self._proxy, address, port))
        except BaseException:
            sock.close()
            raise
        if 200 <= status_code <= 299:
            return sock
        sock.close()
        if status_code == 407:
            raise proxy_error("wants other credentials than EGRESS_PROXY has: it answered 407")
        kind = _NotReachedError if status_code in _NOT_REACHED else WireError
        raise kind(Phase.NOT_SENT, Fault.PROXY, f"the egress proxy answered {status_code} instead of connecting")

    async def _dial(self) -> socket.socket:
        """A connection to the proxy itself, which the operator chose and nobody judges."""
        proxy = self._proxy
        try:
            try:
                addresses = (
                    [proxy.literal] if proxy.literal is not None else await self._resolve(proxy.host, proxy.port)
                )
            except OSError as error:
                raise lookup_error(error) from error
            if not addresses:
                raise proxy_error("has a name without an address")
            return await dial(addresses, proxy.port)
        except WireError as error:
            if error.fault in (Fault.INTERNAL, Fault.PROXY):
                raise
            raise proxy_error(f"cannot be reached: {error.detail}") from error


def proxy_error(what: str) -> WireError:
    """No tunnel: what the egress proxy did, as the end of a sentence that begins with it."""
    return WireError(Phase.NOT_SENT, Fault.PROXY, f"the egress proxy {what}")


async def _ask(sock: socket.socket, request: bytes) -> int:
    """Send the CONNECT and read the status of its answer. Raises WireError."""
    loop = asyncio.get_running_loop()
    reader = ResponseReader()
    try:
        await loop.sock_sendall(sock, request)
        while reader.head is None:
            data = await loop.sock_recv(sock, _READ_BYTES)
            if not data:
                raise proxy_error("closed the connection before it answered")
            reader.feed(data)
    except NotHttp as error:
        raise proxy_error(f"does not speak HTTP: {error}") from error
    except OSError as error:
        raise proxy_error("cut the connection before it answered") from error
    if 200 <= reader.head.status_code <= 299 and reader.body_bytes_count:
        # Nothing was asked of the destination yet: these bytes would be taken for its answer.
        raise proxy_error("sent more than its answer")
    return reader.head.status_code


def _connect_request(proxy: EgressProxy, address: IPAddress, port: int) -> bytes:
    where = f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"
    lines = [f"CONNECT {where} HTTP/1.1", f"Host: {where}"]
    if proxy.authorization is not None:
        lines.append(f"Proxy-Authorization: {proxy.authorization}")
    return "\r\n".join([*lines, "", ""]).encode("ascii")
