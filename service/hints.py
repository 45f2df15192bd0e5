"""Hints after the commit: collected while one is under way, dropped when the queue cannot take them.

Nobody waits for a hint and nothing depends on one: a dropped hint is repaired by the dispatcher
within the hint visibility.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence

from service.domain import limits
from service.domain.pace import gathering_seconds
from service.errors import QueueUnavailable
from service.ports import HintQueue
from service.telemetry import events
from service.telemetry.logging import log


class Hints:
    """One process's outgoing hints."""

    def __init__(self, queue: HintQueue, *, waiting_max: int = limits.HINTS_WAITING_MAX) -> None:
        self._queue = queue
        self._waiting_max = waiting_max
        self._waiting: list[uuid.UUID] = []
        self._sending: asyncio.Task[None] | None = None
        self._down = False

    def offer(self, delivery_ids: Sequence[uuid.UUID]) -> None:
        """Send the ids soon. Returns at once; beyond the limit the ids are left to the dispatcher."""
        room = self._waiting_max - len(self._waiting)
        self._waiting.extend(delivery_ids[:room])
        if self._waiting and (self._sending is None or self._sending.done()):
            self._sending = asyncio.create_task(self._send())

    async def drain(self) -> None:
        """Wait until what was offered is sent or given up."""
        if self._sending is not None:
            await self._sending

    async def _send(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                await self._queue.hint(batch)
                await asyncio.sleep(gathering_seconds(len(batch)))
            except QueueUnavailable as error:
                # Said once for an outage: under load it would be thousands of lines about nothing lost.
                if not self._down:
                    log.warning(events.QUEUE_DOWN, error=str(error))
                self._down = True
            else:
                if self._down:
                    log.info(events.QUEUE_BACK)
                self._down = False
