"""Group commit: what arrives during a flush goes with the next one, and nobody fails for a stranger."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from service.errors import LedgerBusy, LedgerRefused, LedgerUnavailable
from service.ledger.coalesce import Coalescer


class Flushes:
    """A flush that waits to be let go, and answers each item with its double."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.begun = asyncio.Event()
        self.go = asyncio.Event()
        self.go.set()

    async def __call__(self, batch: Sequence[int]) -> list[int]:
        self.batches.append(list(batch))
        self.begun.set()
        await self.go.wait()
        if any(item < 0 for item in batch):
            raise LedgerRefused("a bad row", "22000")
        return [item * 2 for item in batch]


async def test_one_request_is_one_flush_without_waiting_for_others() -> None:
    flushes = Flushes()
    assert await Coalescer(flushes).submit(1) == 2
    assert flushes.batches == [[1]]


async def test_one_after_the_other_each_finds_a_flush() -> None:
    flushes = Flushes()
    coalescer = Coalescer(flushes)
    async with asyncio.timeout(5):
        assert [await coalescer.submit(number) for number in range(100)] == [number * 2 for number in range(100)]


async def test_what_arrives_during_a_flush_goes_with_the_next() -> None:
    flushes = Flushes()
    flushes.go.clear()
    coalescer = Coalescer(flushes)
    first = asyncio.create_task(coalescer.submit(1))
    await flushes.begun.wait()
    others = [asyncio.create_task(coalescer.submit(number)) for number in (2, 3, 4)]
    await asyncio.sleep(0)
    flushes.go.set()
    assert await asyncio.gather(first, *others) == [2, 4, 6, 8]
    assert flushes.batches == [[1], [2, 3, 4]]


async def test_a_batch_is_bounded_by_rows_and_by_bytes() -> None:
    flushes = Flushes()
    by_rows = Coalescer(flushes, rows_max=2)
    await asyncio.gather(*(by_rows.submit(number) for number in range(5)))
    assert [len(batch) for batch in flushes.batches] == [2, 2, 1]
    flushes.batches.clear()
    by_bytes = Coalescer(flushes, bytes_max=10)
    await asyncio.gather(*(by_bytes.submit(number, 6) for number in range(3)))
    assert [len(batch) for batch in flushes.batches] == [1, 1, 1]


async def test_a_refused_row_fails_alone() -> None:
    coalescer = Coalescer(Flushes())
    answers = await asyncio.gather(*(coalescer.submit(item) for item in (1, -1, 2)), return_exceptions=True)
    assert answers[0] == 2
    assert isinstance(answers[1], LedgerRefused)
    assert answers[2] == 4


async def test_a_ledger_that_is_away_fails_the_batch_and_not_the_next() -> None:
    calls = 0

    async def flush(batch: Sequence[int]) -> list[int]:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise LedgerUnavailable("away")
        return list(batch)

    coalescer = Coalescer(flush)
    with pytest.raises(LedgerUnavailable):
        await coalescer.submit(1)
    assert await coalescer.submit(2) == 2


async def test_beyond_its_limit_a_request_is_refused_at_once() -> None:
    flushes = Flushes()
    flushes.go.clear()
    coalescer = Coalescer(flushes, waiting_max=1)
    tasks = [asyncio.create_task(coalescer.submit(number)) for number in (1, 2)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    refused = [task for task in tasks if task.done() and isinstance(task.exception(), LedgerBusy)]
    flushes.go.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert len(refused) == 1


async def test_a_submitter_that_left_does_not_disturb_the_others() -> None:
    flushes = Flushes()
    flushes.go.clear()
    coalescer = Coalescer(flushes)
    gone, stays = asyncio.create_task(coalescer.submit(1)), asyncio.create_task(coalescer.submit(2))
    await flushes.begun.wait()
    gone.cancel()
    flushes.go.set()
    assert await stays == 4
