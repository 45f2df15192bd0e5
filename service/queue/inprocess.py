"""A queue in memory: for stories told without Redis. It keeps the promise of the real one, which is none."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from service.errors import QueueUnavailable


class InProcessQueue:
    """The HintQueue of the tests: can be down, and can lose everything."""

    def __init__(self) -> None:
        self.hinted: list[uuid.UUID] = []
        self.up = True
        self._epoch = False

    async def hint(self, delivery_ids: Sequence[uuid.UUID]) -> None:
        """Keep the ids."""
        self._answer()
        self.hinted.extend(delivery_ids)

    async def depth(self) -> int:
        """How many ids wait."""
        self._answer()
        return len(self.hinted)

    async def epoch_lost(self) -> bool:
        """Whether `lose_everything` was called since the marker was set."""
        self._answer()
        return not self._epoch

    async def mark_epoch(self) -> None:
        """Set the marker."""
        self._answer()
        self._epoch = True

    async def close(self) -> None:
        """Nothing to close."""

    def take_all(self) -> list[uuid.UUID]:
        """What a worker would find now."""
        taken, self.hinted = self.hinted, []
        return taken

    def lose_everything(self) -> None:
        """What FLUSHALL does."""
        self.hinted = []
        self._epoch = False

    def _answer(self) -> None:
        if not self.up:
            raise QueueUnavailable("the queue is down")
