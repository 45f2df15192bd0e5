"""Connects sockets to numeric addresses.

The rule this module keeps: it is given addresses, never a name. Who calls it has judged them, or
has them from the operator.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from ipaddress import IPv4Address

from service.domain.address import IPAddress
from service.domain.limits import DIAL_PATIENCE_SECONDS
from service.egress.faults import WireError, connect_error

Resolve = Callable[[str, int], Awaitable[list[IPAddress]]]


async def dial(addresses: list[IPAddress], port: int) -> socket.socket:
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
