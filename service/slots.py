"""Slots: how many attempts a worker has in flight. Taken before a claim, so no claim waits for one."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class Slots:
    """Hands out as many as are free, up to what is wanted, in the order of asking."""

    def __init__(self, count: int) -> None:
        self._free_count = count
        self._turns: deque[tuple[int, asyncio.Future[int]]] = deque()
        self.on_room: Callable[[], None] = lambda: None

    @property
    def room_count(self) -> int:
        """How many nobody has or waits for."""
        return 0 if self._turns else self._free_count

    async def take(self, wanted_count: int, patience_seconds: float) -> int:
        """Take between one and `wanted_count`; 0 when none became free within the patience."""
        turn: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._turns.append((wanted_count, turn))
        self._serve()
        try:
            async with asyncio.timeout(patience_seconds):
                return await asyncio.shield(turn)
        except TimeoutError:
            return self._withdraw(wanted_count, turn)
        except asyncio.CancelledError:
            self.give(self._withdraw(wanted_count, turn))
            raise

    def give(self, count: int) -> None:
        """Give back, and say so when nobody here waits for it."""
        self._free_count += count
        self._serve()
        if self._free_count and count:
            self.on_room()

    def _serve(self) -> None:
        while self._free_count and self._turns:
            wanted_count, turn = self._turns.popleft()
            taken_count = min(wanted_count, self._free_count)
            self._free_count -= taken_count
            turn.set_result(taken_count)

    def _withdraw(self, wanted_count: int, turn: asyncio.Future[int]) -> int:
        """Leave the queue; what was handed over in the last moment is the caller's."""
        if turn.done():
            return turn.result()
        self._turns.remove((wanted_count, turn))
        return 0
