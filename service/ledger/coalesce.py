"""Group commit: while one flush is under way, what arrives collects, and the next flush takes it all.

There is no timer. At low load a batch is one row and costs one commit; under load it is dozens and
costs one commit. A batch that is refused for its data is retried row by row, so that nobody fails
for a stranger's row.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from service.domain import limits
from service.errors import HookledgerError, LedgerBusy, LedgerRefused

T = TypeVar("T")
R = TypeVar("R")


@dataclass(slots=True)
class _Waiting(Generic[T, R]):
    item: T
    bytes_count: int
    answer: asyncio.Future[R] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Coalescer(Generic[T, R]):
    """Collects items and hands them to `flush` in batches, at most `flushes_max` at a time.

    `flush` answers each item, in order. What it raises is raised to every submitter of the batch,
    but for LedgerRefused, which is narrowed down to the row that caused it.
    """

    def __init__(
        self,
        flush: Callable[[Sequence[T]], Awaitable[Sequence[R]]],
        *,
        rows_max: int = limits.FLUSH_ROWS_MAX,
        bytes_max: int = limits.FLUSH_BYTES_MAX,
        waiting_max: int = limits.FLUSH_WAITING_MAX,
        flushes_max: int = 1,
    ) -> None:
        self._flush = flush
        self._rows_max = rows_max
        self._bytes_max = bytes_max
        self._waiting_max = waiting_max
        self._flushes_max = flushes_max
        self._waiting: deque[_Waiting[T, R]] = deque()
        self._running_count = 0
        self._runners: set[asyncio.Task[None]] = set()  # asyncio itself holds tasks weakly

    async def submit(self, item: T, bytes_count: int = 0) -> R:
        """Wait for the flush that takes the item. Raises LedgerBusy when too many wait already."""
        return await self.offer(item, bytes_count)

    def offer(self, item: T, bytes_count: int = 0) -> asyncio.Future[R]:
        """The answer to come, for who offers many at once. Raises LedgerBusy when too many wait already."""
        if len(self._waiting) >= self._waiting_max:
            raise LedgerBusy("too many requests wait for the ledger")
        waiting: _Waiting[T, R] = _Waiting(item, bytes_count)
        self._waiting.append(waiting)
        if self._running_count < self._flushes_max:
            self._running_count += 1
            runner = asyncio.create_task(self._run())
            self._runners.add(runner)
            runner.add_done_callback(self._runners.discard)
        return waiting.answer

    async def _run(self) -> None:
        try:
            while self._waiting:
                await self._flush_batch(self._take())
        finally:
            # Counted down here and not in a callback: whoever submits next must find no runner that
            # has looked for the last time.
            self._running_count -= 1

    def _take(self) -> list[_Waiting[T, R]]:
        batch = [self._waiting.popleft()]
        bytes_count = batch[0].bytes_count
        while self._waiting and len(batch) < self._rows_max:
            bytes_count += self._waiting[0].bytes_count
            if bytes_count > self._bytes_max:
                break
            batch.append(self._waiting.popleft())
        return batch

    async def _flush_batch(self, batch: list[_Waiting[T, R]]) -> None:
        try:
            answers = await self._flush([waiting.item for waiting in batch])
        except LedgerRefused as error:
            if len(batch) == 1:
                _fail(batch, error)
                return
            for waiting in batch:
                await self._flush_batch([waiting])
        except HookledgerError as error:
            _fail(batch, error)
        except BaseException as error:
            # A bug of ours, or the end of the process: the submitters must not wait for ever.
            _fail(batch, error if isinstance(error, Exception) else LedgerBusy("the process is stopping"))
            raise
        else:
            for waiting, answer in zip(batch, answers, strict=True):
                if not waiting.answer.done():  # its submitter may have gone
                    waiting.answer.set_result(answer)


def _fail(batch: Sequence[_Waiting[T, R]], error: Exception) -> None:
    for waiting in batch:
        if not waiting.answer.done():
            waiting.answer.set_exception(error)
