"""Slots are handed out in order, and none is lost to whoever stops waiting."""

from __future__ import annotations

import asyncio

import pytest

from service.slots import Slots


async def test_as_many_as_are_free_are_taken_at_once() -> None:
    slots = Slots(3)
    assert await slots.take(2, 1.0) == 2
    assert await slots.take(5, 1.0) == 1


async def test_nothing_is_taken_when_the_patience_ends() -> None:
    slots = Slots(1)
    assert await slots.take(1, 1.0) == 1
    assert await slots.take(1, 0.01) == 0
    slots.give(1)
    assert await slots.take(1, 1.0) == 1


async def test_whoever_waits_longest_is_served_first() -> None:
    slots = Slots(1)
    await slots.take(1, 1.0)
    first = asyncio.create_task(slots.take(1, 5.0))
    await asyncio.sleep(0)
    second = asyncio.create_task(slots.take(1, 5.0))
    await asyncio.sleep(0)
    slots.give(1)
    assert await first == 1
    assert not second.done()
    slots.give(1)
    assert await second == 1


async def test_a_cancelled_waiter_takes_no_slot_with_it() -> None:
    slots = Slots(1)
    await slots.take(1, 1.0)
    waiting = asyncio.create_task(slots.take(1, 5.0))
    await asyncio.sleep(0)
    slots.give(1)  # handed over, and then cancelled before it could run
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await slots.take(1, 1.0) == 1
