"""Idle connections, kept per destination.

The rule this module keeps: only idle connections are here. A busy one belongs to its exchange, so a
cancelled exchange has nothing to leak, nobody ever waits for a connection, and no destination can
take another's.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from service.domain.limits import (
    CONNECTION_SECONDS_MAX,
    KEPT_ALIVE_MARGIN_SECONDS,
    KEPT_ALIVE_MAX,
    KEPT_ALIVE_PER_DESTINATION_MAX,
    KEPT_ALIVE_SECONDS,
)
from service.egress.connection import Connection

PoolKey = tuple[str, str, str, int]  # the caller's key, scheme, host and port


class Pool:
    """Lends connections out and takes them back."""

    def __init__(self) -> None:
        self._idle: dict[PoolKey, list[Connection]] = {}
        self._by_age: OrderedDict[Connection, PoolKey] = OrderedDict()
        self._sweep: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._by_age)

    def take(self, key: PoolKey, now: float) -> Connection | None:
        """The connection of this key that was used last and is still good, if there is one."""
        idle = self._idle.get(key)
        while idle:
            connection = idle[-1]
            self._remove(connection)
            if connection.idle_until > now and connection.alive:
                return connection
            connection.abort()
        return None

    def put(self, key: PoolKey, connection: Connection, loop: asyncio.AbstractEventLoop) -> None:
        """Take a connection back after its exchange: keep it when it is fit for another, else end it."""
        now = loop.time()
        reader = connection.reader
        if reader is None or not connection.reusable or now - connection.made_at >= CONNECTION_SECONDS_MAX:
            connection.abort()
            return
        patience = KEPT_ALIVE_SECONDS
        if reader.idle_seconds_max is not None:
            patience = min(patience, reader.idle_seconds_max - KEPT_ALIVE_MARGIN_SECONDS)
        connection.rest()
        connection.idle_until = now + patience
        idle = self._idle.setdefault(key, [])
        idle.append(connection)
        self._by_age[connection] = key
        if len(idle) > KEPT_ALIVE_PER_DESTINATION_MAX:
            self._end(idle[0])
        if len(self._by_age) > KEPT_ALIVE_MAX:
            self._end(next(iter(self._by_age)))
        if self._sweep is None:
            self._sweep = loop.call_later(KEPT_ALIVE_SECONDS, self._end_expired, loop)

    def close(self) -> None:
        """End every idle connection."""
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        for connection in list(self._by_age):
            self._end(connection)

    def _remove(self, connection: Connection) -> None:
        key = self._by_age.pop(connection)
        idle = self._idle[key]
        idle.remove(connection)
        if not idle:
            del self._idle[key]

    def _end(self, connection: Connection) -> None:
        self._remove(connection)
        connection.close()

    def _end_expired(self, loop: asyncio.AbstractEventLoop) -> None:
        """Runs while anything is idle, so that an idle connection is ended at twice its time at most."""
        now = loop.time()
        for connection in [kept for kept in self._by_age if kept.idle_until <= now or not kept.alive]:
            self._end(connection)
        self._sweep = loop.call_later(KEPT_ALIVE_SECONDS, self._end_expired, loop) if self._by_age else None
