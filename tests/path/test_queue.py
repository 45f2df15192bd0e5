"""The queue on a real Redis: hints by the batch, taken once, acknowledged together."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress

import pytest
from arq.connections import ArqRedis
from arq.utils import timestamp_ms

from service.domain import limits
from service.queue.arq_queue import JOB_PREFIX, QUEUE_NAME, ArqQueue, connect
from service.queue.doorbell_worker import DoorbellWorker, end, make_worker

ASIDE_SECONDS = 60.0
SIGNALS_WITHIN_SECONDS = 10.0


class Attempts:
    """Has room for so many, and ends when it is told to."""

    def __init__(self, room_count: int) -> None:
        self.room_count = room_count
        self.given: list[list[uuid.UUID]] = []
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.say_room: Callable[[], None] = lambda: None

    async def deliver(self, delivery_ids: Sequence[uuid.UUID]) -> None:
        self.given.append(list(delivery_ids))
        await self.may_end.wait()

    def on_room(self, call: Callable[[], None]) -> None:
        self.say_room = call


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[ArqRedis]:
    client = connect(redis_url)
    yield client
    await client.aclose(close_connection_pool=True)


@pytest.fixture
async def queue(redis_url: str) -> AsyncIterator[ArqQueue]:
    made = ArqQueue(redis_url)
    yield made
    await made.close()


def ids(count: int) -> list[uuid.UUID]:
    return [uuid.uuid4() for _ in range(count)]


async def taken(worker: DoorbellWorker) -> list[uuid.UUID]:
    return [each for hint in await worker.look() for each in hint.delivery_ids]


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(SIGNALS_WITHIN_SECONDS):
        while not holds():  # noqa: ASYNC110 - what holds is Redis' and the worker's, who set no event
            await asyncio.sleep(0)


async def test_a_hint_of_many_is_several_jobs_in_one_call_and_each_is_taken_once(
    queue: ArqQueue, redis: ArqRedis
) -> None:
    hinted = ids(2 * limits.HINT_IDS_MAX + 1)
    await queue.hint(hinted)
    assert await queue.depth() == 3
    both = [make_worker(redis, Attempts(1_000), ASIDE_SECONDS) for _ in range(2)]
    parts = await asyncio.gather(*map(taken, both))
    assert sorted(parts[0] + parts[1]) == sorted(hinted)
    assert await queue.depth() == 0, "what is taken is set aside"
    assert await redis.zcard(QUEUE_NAME) == 3, "and stands there until it is acknowledged"


async def test_no_more_is_taken_than_there_is_room_for_and_the_oldest_first(queue: ArqQueue, redis: ArqRedis) -> None:
    first, second, third = ids(2), ids(2), ids(2)
    for hinted in (first, second, third):
        await queue.hint(hinted)
        await redis.zincrby(QUEUE_NAME, -1_000, (await redis.zrange(QUEUE_NAME, -1, -1))[0])  # apart in time
    attempts = Attempts(3)
    worker = make_worker(redis, attempts, ASIDE_SECONDS)
    assert len(await taken(worker)) == 4, "a job is taken whole, and none after the room is full"
    attempts.room_count = 0
    assert await taken(worker) == []
    assert await queue.depth() == 1


async def test_what_its_worker_did_not_acknowledge_comes_back_into_sight(queue: ArqQueue, redis: ArqRedis) -> None:
    hinted = ids(3)
    await queue.hint(hinted)
    assert await taken(make_worker(redis, Attempts(10), 0.0)) == hinted
    started_ms = timestamp_ms()
    await until(lambda: timestamp_ms() > started_ms)
    assert await taken(make_worker(redis, Attempts(10), ASIDE_SECONDS)) == hinted


async def test_what_is_no_job_is_thrown_out(queue: ArqQueue, redis: ArqRedis) -> None:
    await redis.zadd(QUEUE_NAME, {b"\xff\xfe": 1, b"without a job": 1, b"of another form": 1, b"no JSON": 0})
    await redis.set(f"{JOB_PREFIX}of another form", b'{"a": 1}')
    await redis.set(f"{JOB_PREFIX}no JSON", b"\x80\x04pickle")
    hinted = ids(1)
    await queue.hint(hinted)
    assert await taken(make_worker(redis, Attempts(10), ASIDE_SECONDS)) == hinted
    assert await redis.zcard(QUEUE_NAME) == 1


async def test_hints_left_behind_are_taken_when_there_is_room_and_all_are_acknowledged_before_the_stop(
    queue: ArqQueue, redis: ArqRedis
) -> None:
    attempts = Attempts(1)
    attempts.may_end.clear()
    worker = make_worker(redis, attempts, ASIDE_SECONDS)
    working = asyncio.create_task(worker.main())
    try:
        await queue.hint(first := ids(1))
        await until(lambda: attempts.given == [first])
        attempts.room_count = 0
        await queue.hint(second := ids(1))
        await until(lambda: worker._more)
        attempts.room_count = 1
        attempts.say_room()
        await until(lambda: attempts.given == [first, second])
        worker.stop_taking()
        attempts.may_end.set()
        await asyncio.wait_for(working, SIGNALS_WITHIN_SECONDS)
        assert await redis.zcard(QUEUE_NAME) == 0
        assert not await redis.keys(f"{JOB_PREFIX}*")
    finally:
        with suppress(Exception):
            await end([working])


async def test_a_bug_in_a_batch_ends_the_worker_and_is_raised(queue: ArqQueue, redis: ArqRedis) -> None:
    attempts = Attempts(1)

    async def broken(_: Sequence[uuid.UUID]) -> None:
        raise ZeroDivisionError

    attempts.deliver = broken  # type: ignore[method-assign, assignment]
    working = asyncio.create_task(make_worker(redis, attempts, ASIDE_SECONDS).main())
    await queue.hint(ids(1))
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(working, SIGNALS_WITHIN_SECONDS)
