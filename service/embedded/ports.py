"""Free TCP ports on the loopback address, the last used one first, so that URLs survive a restart."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterable

# Below the range that systems give to outgoing connections (from 32768 on Linux, 49152 on macOS),
# so that the port of a server that restarts has not become some client's in between; and above
# every port that a locally installed Postgres or Redis is configured for.
SERVER_PORTS = range(20_000, 32_768)
TRIES = 200


def is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: TIME_WAIT is no reason
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def first_free(host: str, candidates: Iterable[int]) -> int | None:
    """The first candidate that is free."""
    return next((port for port in candidates if is_free(host, port)), None)


def choose(last_used: int | None, avoid: frozenset[int] = frozenset()) -> int:
    """A port for an embedded server. Another process may still take it first: starting is then tried again."""
    wanted = [] if last_used is None else [last_used]
    candidates = (port for port in (*wanted, *random.sample(SERVER_PORTS, TRIES)) if port not in avoid)
    port = first_free("127.0.0.1", candidates)
    if port is None:
        raise RuntimeError(f"none of {TRIES} ports on 127.0.0.1 is free")
    return port
