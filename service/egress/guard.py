"""Opens connections, and only to addresses that were judged.

The rule this module keeps: a name is looked up once per connection, one denied answer denies them
all, and what is dialled is a numeric address that was judged. The name itself serves `Host`, TLS and
the pool only. Literal addresses take the same way; they just need no lookup.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum, auto
from ipaddress import IPv4Address, ip_address
from pathlib import Path
from typing import Final

import certifi

from service.domain.address import AllowList, DestinationUrl, IPAddress, judge
from service.domain.limits import TIMEOUT_SECONDS_MAX
from service.domain.outcome import Fault, Phase
from service.egress.connection import Connection
from service.egress.faults import WireError, connect_error, lookup_error, tls_error

LOOKUPS_MAX: Final = 512  # threads in the system's resolver, those that nobody waits for any more included
DIAL_PATIENCE_SECONDS: Final = 1.0  # for one address of a name while another waits to be tried
_TLS_SHUTDOWN_SECONDS: Final = 1.0

Resolve = Callable[[str, int], Awaitable[list[IPAddress]]]


class Stage(Enum):
    """What a connection being made waits for."""

    LOOKUP = auto()
    CONNECT = auto()
    HANDSHAKE = auto()


@dataclass(slots=True)
class Progress:
    """How far a connection being made came, for whoever has to give it up."""

    stage: Stage = Stage.LOOKUP

    def timeout(self) -> WireError:
        """What to report when the deadline passes now."""
        match self.stage:
            case Stage.LOOKUP:
                return WireError(Phase.NOT_SENT, Fault.DNS, "the name did not resolve in time")
            case Stage.CONNECT:
                return WireError(Phase.NOT_SENT, Fault.CONNECT_TIMEOUT, "the connection was not accepted in time")
            case Stage.HANDSHAKE:
                return WireError(Phase.NOT_SENT, Fault.TLS, "the TLS handshake did not finish in time")


def tls_context() -> ssl.SSLContext:
    """Verified TLS 1.2 or later, by the system's certificates, or certifi's where there are none.

    The system's store is found where this OpenSSL was built to look. `SSL_CERT_FILE`, `SSL_CERT_DIR`
    and `SSLKEYLOGFILE` have no effect, as they have with `ssl.create_default_context`.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    paths = ssl.get_default_verify_paths()
    file, folder = Path(paths.openssl_cafile), Path(paths.openssl_capath)
    if file.is_file():
        context.load_verify_locations(cafile=file)
    if folder.is_dir():
        context.load_verify_locations(capath=folder)
    if not file.is_file() and not (folder.is_dir() and any(folder.iterdir())):
        context.load_verify_locations(cafile=certifi.where())
    return context


class Guard:
    """Makes connections to judged addresses."""

    def __init__(self, allow: AllowList, tls: ssl.SSLContext, resolve: Resolve) -> None:
        self._allow = allow
        self._tls = tls
        self._resolve = resolve

    async def connect(self, url: DestinationUrl, progress: Progress) -> Connection:
        """Open a connection, TLS included, or raise WireError (always NOT_SENT)."""
        addresses = await self._judged(url)
        progress.stage = Stage.CONNECT
        sock = await _dial(addresses, url.port)
        progress.stage = Stage.HANDSHAKE
        loop = asyncio.get_running_loop()
        try:
            if url.tls:
                _, connection = await loop.create_connection(
                    lambda: Connection(loop),
                    sock=sock,
                    ssl=self._tls,
                    server_hostname=url.host,
                    ssl_handshake_timeout=TIMEOUT_SECONDS_MAX,
                    ssl_shutdown_timeout=_TLS_SHUTDOWN_SECONDS,
                )
            else:
                _, connection = await loop.create_connection(lambda: Connection(loop), sock=sock)
        except OSError as error:
            sock.close()
            raise (tls_error(error) if url.tls else connect_error(error)) from error
        except BaseException:
            sock.close()
            raise
        return connection

    async def _judged(self, url: DestinationUrl) -> list[IPAddress]:
        """The addresses a URL stands for, none of them denied."""
        try:
            addresses = [url.literal] if url.literal is not None else await self._resolve(url.host, url.port)
        except OSError as error:
            raise lookup_error(error) from error
        if not addresses:
            raise WireError(Phase.NOT_SENT, Fault.DNS, "the name has no address")
        for address in addresses:
            denied = judge(address, url.port, self._allow)
            if denied is not None:
                raise WireError(Phase.NOT_SENT, Fault.BLOCKED, f"{denied}; nothing was connected to")
        return addresses


async def _dial(addresses: list[IPAddress], port: int) -> socket.socket:
    """Connect to the first address that accepts, in the resolver's order. Raises WireError."""
    loop = asyncio.get_running_loop()
    failure: WireError | None = None
    for left, address in zip(range(len(addresses) - 1, -1, -1), addresses, strict=True):
        try:
            async with asyncio.timeout(DIAL_PATIENCE_SECONDS if left else None):
                return await _dial_one(loop, address, port)
        except OSError as error:  # TimeoutError is one
            failure = connect_error(error)
    assert failure is not None, "there is at least one address"
    raise failure


async def _dial_one(loop: asyncio.AbstractEventLoop, address: IPAddress, port: int) -> socket.socket:
    family = socket.AF_INET if isinstance(address, IPv4Address) else socket.AF_INET6
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, (str(address), port))
    except BaseException:
        sock.close()
        raise
    return sock


class SystemResolver:
    """The system's `getaddrinfo`, each lookup in a thread of its own.

    A thread in `getaddrinfo` cannot be stopped. In a shared pool a few names with a dead name server
    would make every other name wait; here each name has one thread at most, which all who want that
    name share, and an interpreter that exits does not wait for it.
    """

    def __init__(self) -> None:
        self._under_way: dict[tuple[str, int], asyncio.Future[list[IPAddress]]] = {}

    async def __call__(self, host: str, port: int) -> list[IPAddress]:
        """Every address of the name, in the system's order of preference. Raises OSError."""
        key = (host, port)
        future = self._under_way.get(key)
        if future is None:
            if len(self._under_way) >= LOOKUPS_MAX:
                raise WireError(Phase.NOT_SENT, Fault.INTERNAL, "too many names are being resolved at once")
            future = self._start(key)
        return await asyncio.shield(future)

    def _start(self, key: tuple[str, int]) -> asyncio.Future[list[IPAddress]]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[list[IPAddress]] = loop.create_future()

        def finish(answer: list[IPAddress] | Exception) -> None:
            del self._under_way[key]
            if isinstance(answer, Exception):
                future.set_exception(answer)
                future.exception()  # retrieved: everyone who asked may have given up
            else:
                future.set_result(answer)

        def look_up() -> None:
            answer = _getaddrinfo(*key)
            with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits
                loop.call_soon_threadsafe(finish, answer)

        threading.Thread(target=look_up, name="lookup", daemon=True).start()
        self._under_way[key] = future
        return future


def _getaddrinfo(host: str, port: int) -> list[IPAddress] | Exception:
    try:
        answers = socket.getaddrinfo(host.encode("ascii"), port, type=socket.SOCK_STREAM)
        return [ip_address(answer[4][0]) for answer in answers]
    except Exception as error:  # carried to whoever asked
        return error
