"""Opens connections, and only to addresses that were judged.

The rule this module keeps: a name is looked up once per connection, one denied answer denies them
all, and what is dialled is a numeric address that was judged. The name itself serves `Host`, TLS and
the pool only. Literal addresses take the same way; they just need no lookup. With an egress proxy
the judged address is what the proxy is told to connect to, and nothing else is dialled but the proxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from dataclasses import dataclass
from enum import Enum, auto
from ipaddress import ip_address
from pathlib import Path

import certifi

from service.domain.address import AllowList, DestinationUrl, EgressProxy, IPAddress, judge
from service.domain.limits import LOOKUPS_MAX, TIMEOUT_SECONDS_MAX, TLS_SHUTDOWN_SECONDS
from service.domain.outcome import Fault, Phase
from service.egress.connection import Connection
from service.egress.dial import Resolve, dial
from service.egress.faults import WireError, connect_error, lookup_error, tls_error
from service.egress.tunnel import Tunnels, proxy_error


class Stage(Enum):
    """What a connection being made waits for."""

    LOOKUP = auto()
    CONNECT = auto()
    TUNNEL = auto()
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
            case Stage.TUNNEL:
                return proxy_error("did not come through in time")
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

    def __init__(
        self, allow: AllowList, tls: ssl.SSLContext, resolve: Resolve, proxy: EgressProxy | None = None
    ) -> None:
        self._allow = allow
        self._tls = tls
        self._resolve = resolve
        self._tunnels = None if proxy is None else Tunnels(proxy, resolve)

    async def connect(self, url: DestinationUrl, progress: Progress) -> Connection:
        """Open a connection, TLS included, or raise WireError (always NOT_SENT)."""
        addresses = await self._judged(url)
        if self._tunnels is None:
            progress.stage = Stage.CONNECT
            sock = await dial(addresses, url.port)
        else:
            progress.stage = Stage.TUNNEL
            sock = await self._tunnels.open(addresses, url.port)
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
                    ssl_shutdown_timeout=TLS_SHUTDOWN_SECONDS,
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
