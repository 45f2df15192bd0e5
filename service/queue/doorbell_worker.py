"""arq's worker, with a doorbell: it takes hints by the batch, and its wait ends when a hint rings.

What is known of arq 0.28 and answered here: a worker polls, so idle load and latency pull against each
other (ours hears of each hint, and polls only against a ring that was lost); it takes each job by six
round trips and steps over those under way (ours takes what it has room for in one, and sets it aside in
the same moment); a lost connection ends it (`run_worker` is called again); a member of its queue that is
no job ends it or is passed over for ever (it is thrown out).
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from arq.connections import ArqRedis
from arq.jobs import DeserializationError, deserialize_job_raw
from arq.utils import timestamp_ms
from arq.worker import Worker, func
from redis.exceptions import RedisError

from service.domain import limits
from service.domain.pace import gathering_seconds
from service.queue.arq_queue import DOORBELL, JOB_NAME, JOB_PREFIX, QUEUE_NAME, connect, dumps, loads, translated

HEALTH_KEY: Final = "hookledger:worker-health"

_POLL_SECONDS: Final = 0.5  # the fallback; the doorbell starts a job sooner
_LISTEN_SECONDS: Final = 5.0  # one wait for a ring; its end only starts the next
_CANCEL_AGAIN_SECONDS: Final = 0.5
_DONE_MAX: Final = 1_000  # acknowledged by one look

# Takes out what has been done. Then takes the oldest jobs, until they name as many deliveries as are wanted, out of
# every worker's sight until the time by which they must have ended: they stand in the queue until they are
# acknowledged, so that those of a worker that dies are found again. What is no job is thrown out.
_LOOK: Final = f"""
for place = 5, #ARGV do
    redis.call('ZREM', KEYS[1], ARGV[place])
    redis.call('UNLINK', '{JOB_PREFIX}' .. ARGV[place])
end
local taken, ids = {{}}, 0
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[1], 'LIMIT', 0, ARGV[4])) do
    if ids >= tonumber(ARGV[3]) then break end
    local job = redis.call('GET', '{JOB_PREFIX}' .. member)
    local read, value = pcall(cjson.decode, job or '')
    if read and type(value) == 'table' and type(value.a) == 'table' and type(value.a[1]) == 'table' then
        ids = ids + #value.a[1]
        redis.call('ZADD', KEYS[1], ARGV[2], member)
        taken[#taken + 1] = {{member, job}}
    else
        redis.call('ZREM', KEYS[1], member)
    end
end
return taken
"""


class Deliveries(Protocol):
    """Who makes the attempts: `service.deliver.Deliverer`."""

    async def deliver(self, delivery_ids: Sequence[uuid.UUID]) -> None:
        """Attempt those of the ids that are due; return when all are settled."""
        ...

    @property
    def room_count(self) -> int:
        """How many more attempts could begin now."""
        ...

    def on_room(self, call: Callable[[], None]) -> None:
        """Call whenever there is more room."""
        ...


@dataclass(frozen=True, slots=True)
class Hint:
    """A job that was taken."""

    member: bytes
    delivery_ids: list[uuid.UUID]


class DoorbellWorker(Worker):
    """Takes as many hints as there is room for, each time that one rings or an attempt ends."""

    def __init__(self, deliveries: Deliveries, aside_seconds: float, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._deliveries = deliveries
        self._aside_ms = int(aside_seconds * 1_000)
        self._rung = asyncio.Event()
        self._script = self.pool.register_script(_LOOK)
        self._more = False  # whether the last look left hints behind
        self._batches_count = 0
        self._done: list[bytes] = []  # and not acknowledged yet
        self._failed: asyncio.Task[None] | None = None  # by a bug: it ends this worker

    async def main(self) -> None:
        """Look and wait, until told to stop and every hint is acknowledged; raises what ends it."""
        listening = asyncio.create_task(self._listen())
        self._deliveries.on_room(self._note_room)
        try:
            while self.allow_pick_jobs or self.tasks or self._done:
                self._rung.clear()
                hints = await self.look()
                self._start(hints)
                await self.heart_beat()
                await asyncio.sleep(gathering_seconds(sum(len(hint.delivery_ids) for hint in hints)))
                if self._failed is not None:
                    self._failed.result()
                if listening.done():
                    listening.result()
                if self.allow_pick_jobs or self.tasks:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_POLL_SECONDS):
                            await self._rung.wait()
        finally:
            self._deliveries.on_room(lambda: None)
            await end([listening])

    async def look(self) -> list[Hint]:
        """Acknowledge what has been done, and take and set aside as many hints as there is room for.

        An acknowledgement is in no hurry: it goes with the next look, or with the poll. One that Redis never
        hears of comes back into sight in time, and finds nothing due.
        """
        room_count = self._deliveries.room_count if self.allow_pick_jobs else 0
        done, self._done = self._done[:_DONE_MAX], self._done[_DONE_MAX:]
        if room_count <= 0 and not done:
            self._more = True
            return []
        now_ms = timestamp_ms()
        hints_max = limits.HINTS_TAKEN_MAX if room_count > 0 else 0
        arguments: list[int | bytes] = [now_ms, now_ms + self._aside_ms, room_count, hints_max, *done]
        taken: list[tuple[bytes, bytes]] = await self._script(keys=[self.queue_name], args=arguments)
        hints = [Hint(member, _delivery_ids(job)) for member, job in taken]
        # As many as were asked for, or more: there may be others behind them.
        self._more = len(taken) == limits.HINTS_TAKEN_MAX or sum(len(each.delivery_ids) for each in hints) >= room_count
        return hints

    def stop_taking(self) -> None:
        """Take no more; `main` returns when what was taken has ended and is acknowledged."""
        self.allow_pick_jobs = False
        self._rung.set()

    def _note_room(self) -> None:
        if self._more:
            self._rung.set()

    def _start(self, hints: Sequence[Hint]) -> None:
        if hints:
            self._batches_count += 1
            name = str(self._batches_count)
            task = asyncio.create_task(self._run(hints))
            self.tasks[name] = task
            task.add_done_callback(lambda _: self._end(name, task))

    def _end(self, name: str, task: asyncio.Task[None]) -> None:
        del self.tasks[name]
        if not task.cancelled() and task.exception() is not None:
            self._failed = task
        if self._failed or not self.allow_pick_jobs:
            self._rung.set()

    async def _run(self, hints: Sequence[Hint]) -> None:
        await self._deliveries.deliver([each for hint in hints for each in hint.delivery_ids])
        self.jobs_complete += len(hints)
        self._done += [hint.member for hint in hints]

    async def _listen(self) -> None:
        async with self.pool.pubsub() as subscription:
            await subscription.subscribe(DOORBELL)
            while True:
                if await subscription.get_message(ignore_subscribe_messages=True, timeout=_LISTEN_SECONDS):
                    self._rung.set()


def _delivery_ids(job: bytes) -> list[uuid.UUID]:
    """The deliveries that a job names; none for one of somebody else's making."""
    try:
        name, arguments, _, _, _ = deserialize_job_raw(job, deserializer=loads)
        return [uuid.UUID(text) for text in arguments[0]] if name == JOB_NAME else []
    except (DeserializationError, ValueError, TypeError, AttributeError, IndexError):
        return []


def make_worker(redis: ArqRedis, deliveries: Deliveries, aside_seconds: float) -> DoorbellWorker:
    """A worker on this connection; a hint that it takes is out of sight for so long."""
    return DoorbellWorker(
        deliveries,
        aside_seconds,
        functions=[func(_never, name=JOB_NAME, keep_result=0, max_tries=1)],
        queue_name=QUEUE_NAME,
        redis_pool=redis,
        handle_signals=False,
        job_serializer=dumps,
        job_deserializer=loads,
        health_check_interval=10,
        health_check_key=HEALTH_KEY,
        log_results=False,
    )


async def run_worker(redis_url: str, deliveries: Deliveries, *, stopping: asyncio.Event, aside_seconds: float) -> None:
    """Take hints and hand their ids on, until `stopping`. Raises QueueUnavailable when Redis goes.

    A hint that is not acknowledged within `aside_seconds` comes back into sight.
    """
    redis = connect(redis_url)
    worker = make_worker(redis, deliveries, aside_seconds)

    async def stop_taking() -> None:
        await stopping.wait()
        worker.stop_taking()

    leaving = asyncio.create_task(stop_taking())
    try:
        with translated():
            await worker.async_run()
    finally:
        await end([leaving, *worker.tasks.values()])  # attempts under way are not theirs and go on
        with contextlib.suppress(RedisError, OSError):
            await redis.aclose(close_connection_pool=True)


async def _never(ctx: dict[Any, Any], ids: list[str]) -> None:
    """What arq would call for one job; ours are run by the batch."""
    raise AssertionError("jobs are run by DoorbellWorker")


async def end(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel the tasks until they have ended.

    Once is not enough: Python 3.11's `wait_for`, through which redis-py writes, loses a cancellation
    that comes at the same moment as what it waits for.
    """
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        await asyncio.wait(pending, timeout=_CANCEL_AGAIN_SECONDS)
    await asyncio.gather(*tasks, return_exceptions=True)
