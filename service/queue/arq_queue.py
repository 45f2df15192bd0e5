"""arq on Redis, kept behind this module: jobs that name deliveries, and nothing else.

arq may lose or repeat any job at any time, so nothing but latency depends on one. What is known of
arq 0.28 and answered here: its default serializer is pickle (ours is JSON, so a planted pickle does
not run); a kept result blocks a job id (none is kept, and ids are never reused); a worker polls
(the poll here is short), and steps over each job under way (which is set aside); a lost connection
ends its worker (ours is started again by `run_worker`); its RedisSettings show the password when
printed (they never are).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Final

from arq.connections import ArqRedis
from arq.utils import timestamp_ms
from arq.worker import Worker, func
from redis.asyncio import BlockingConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from service.domain import limits
from service.errors import QueueUnavailable

QUEUE_NAME: Final = "hookledger:hints"
HEALTH_KEY: Final = "hookledger:worker-health"
EPOCH_KEY: Final = "hookledger:epoch"
DOORBELL: Final = "hookledger:doorbell"
JOB_NAME: Final = "deliver"

_CONNECTIONS_MAX: Final = 10
_ANSWER_TIMEOUT_SECONDS: Final = 2.0
_POLL_SECONDS: Final = 0.5  # the fallback; the doorbell starts a job sooner
_LISTEN_SECONDS: Final = 5.0  # one wait for a ring; its end only starts the next
_CANCEL_AGAIN_SECONDS: Final = 0.5
_JOB_EXPIRY_SECONDS: Final = 300.0  # a hint older than this was given out again long ago
_JOB_ID: Final = re.compile(rb"[0-9a-f]{32}")  # as `hint` names jobs
_SKEW_MS_MAX: Final = 30_000  # between the clocks of two machines; less than any job is set aside for


def dumps(value: dict[str, Any]) -> bytes:
    """Write a job as JSON."""
    # A function that failed hands arq its exception, to be kept as a result we do not keep.
    return json.dumps(value, default=str).encode()


def loads(data: bytes) -> dict[str, Any]:
    """Read a job. Raises ValueError for anything but JSON."""
    value: dict[str, Any] = json.loads(data)
    return value


class ArqQueue:
    """The HintQueue on Redis."""

    def __init__(self, redis_url: str) -> None:
        self._redis = _connect(redis_url)

    async def hint(self, delivery_ids: Sequence[uuid.UUID]) -> None:
        """Enqueue jobs of up to HINT_IDS_MAX ids and ring the workers' doorbell."""
        with _translated():
            for start in range(0, len(delivery_ids), limits.HINT_IDS_MAX):
                ids = [str(delivery_id) for delivery_id in delivery_ids[start : start + limits.HINT_IDS_MAX]]
                await self._redis.enqueue_job(JOB_NAME, ids, _job_id=uuid.uuid4().hex, _expires=_JOB_EXPIRY_SECONDS)
            await self._redis.publish(DOORBELL, b"1")

    async def depth(self) -> int:
        """How many jobs wait for a worker; those under way are set aside."""
        with _translated():
            return int(await self._redis.zcount(QUEUE_NAME, 1, timestamp_ms() + _SKEW_MS_MAX))

    async def epoch_lost(self) -> bool:
        """Whether Redis lost its contents: the marker lives and dies with them."""
        with _translated():
            return not await self._redis.exists(EPOCH_KEY)

    async def mark_epoch(self) -> None:
        """Set the marker."""
        with _translated():
            await self._redis.set(EPOCH_KEY, b"1")

    async def eviction_policy(self) -> str | None:
        """`maxmemory-policy`, or None where the server does not tell. Hints need `noeviction`."""
        with _translated():
            try:
                return str((await self._redis.config_get("maxmemory-policy")).get("maxmemory-policy"))
            except (RedisConnectionError, RedisTimeoutError):
                raise
            except RedisError:
                return None

    async def close(self) -> None:
        """Close every connection."""
        await self._redis.aclose(close_connection_pool=True)


class DoorbellWorker(Worker):
    """arq's worker, whose wait between two polls ends when a hint rings.

    Polling alone means a choice between idle load and latency; with the bell the poll is only the
    fallback for a ring that was lost.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._rung = asyncio.Event()

    async def main(self) -> None:
        """Poll and wait, until told to stop and every job is acknowledged; raises what ends the connection."""
        listening = asyncio.create_task(self._listen())
        try:
            while self.allow_pick_jobs or self.tasks:
                self._rung.clear()
                await self._poll_iteration()
                if listening.done():
                    listening.result()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_SECONDS):
                        await self._rung.wait()
        finally:
            await end([listening])

    async def start_jobs(self, job_ids: list[bytes]) -> None:
        """Start those that are ours; what somebody else put into the queue is thrown out.

        arq would end at a name that is no text, and pass over a score of zero for ever, until such
        members fill the window that a poll reads.
        """
        foreign = [job_id for job_id in job_ids if not _JOB_ID.fullmatch(job_id)]
        if foreign:
            await self.pool.zrem(self.queue_name, *foreign)
        if len(job_ids) >= self.queue_read_limit:
            await self.pool.zremrangebyscore(self.queue_name, "-inf", 0)
        await super().start_jobs([job_id for job_id in job_ids if _JOB_ID.fullmatch(job_id)])

    async def set_aside(self, job_id: str) -> None:
        """Take a job that was begun out of every poll's sight until its time is up.

        arq leaves a job under way in the queue, and each poll of each worker asks for it in vain: a
        few hundred requests that hang would make everybody's next hint wait. It still stands there
        until it is acknowledged, so a worker that dies leaves it to be found again.
        """
        with contextlib.suppress(RedisError, OSError):  # only latency is at stake
            due_ms = timestamp_ms() + int(self.job_timeout_s * 1_000)
            await self.pool.zadd(self.queue_name, {job_id: due_ms}, xx=True)

    def stop_taking(self) -> None:
        """Start no more jobs; `main` returns when those that run have ended."""
        self.allow_pick_jobs = False
        self._rung.set()

    async def _listen(self) -> None:
        async with self.pool.pubsub() as subscription:
            await subscription.subscribe(DOORBELL)
            while True:
                if await subscription.get_message(ignore_subscribe_messages=True, timeout=_LISTEN_SECONDS):
                    self._rung.set()

    def _release_sem_dec_counter_on_complete(self) -> None:
        # Jobs may have been left in Redis for want of room here: nobody will ring for them again.
        # A stop waits for the last of them.
        if self.job_counter >= self.max_jobs or not self.allow_pick_jobs:
            self._rung.set()
        super()._release_sem_dec_counter_on_complete()


Deliver = Callable[[Sequence[uuid.UUID]], Awaitable[None]]


async def run_worker(
    redis_url: str, deliver: Deliver, *, stopping: asyncio.Event, jobs_max: int, job_timeout_seconds: float
) -> None:
    """Take jobs and hand their ids to `deliver`, until `stopping`. Raises QueueUnavailable when Redis goes."""

    async def run_job(ctx: dict[Any, Any], ids: list[str]) -> None:
        await asyncio.gather(deliver([uuid.UUID(text) for text in ids]), worker.set_aside(ctx["job_id"]))

    redis = _connect(redis_url)
    worker = DoorbellWorker(
        functions=[func(run_job, name=JOB_NAME, keep_result=0, timeout=job_timeout_seconds, max_tries=1)],
        queue_name=QUEUE_NAME,
        redis_pool=redis,
        max_jobs=jobs_max,
        job_timeout=job_timeout_seconds,
        keep_result=0,
        handle_signals=False,
        job_serializer=dumps,
        job_deserializer=loads,
        health_check_interval=10,
        health_check_key=HEALTH_KEY,
        retry_jobs=False,
        log_results=False,
    )

    async def stop_taking() -> None:
        await stopping.wait()
        worker.stop_taking()

    leaving = asyncio.create_task(stop_taking())
    try:
        with _translated():
            await worker.async_run()
    finally:
        await end([leaving, *worker.tasks.values()])  # attempts under way are not theirs and go on
        with contextlib.suppress(RedisError, OSError):
            await redis.aclose(close_connection_pool=True)


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


def _connect(redis_url: str) -> ArqRedis:
    """One pool with every timeout set. Connects lazily."""
    pool = BlockingConnectionPool.from_url(
        redis_url,
        max_connections=_CONNECTIONS_MAX,
        timeout=_ANSWER_TIMEOUT_SECONDS,
        socket_connect_timeout=_ANSWER_TIMEOUT_SECONDS,
        socket_timeout=_ANSWER_TIMEOUT_SECONDS,
        socket_keepalive=True,
        health_check_interval=5,
        retry=Retry(ExponentialBackoff(cap=0.2, base=0.02), 2),
        retry_on_error=[RedisConnectionError, RedisTimeoutError],
    )
    return ArqRedis(
        connection_pool=pool,
        job_serializer=dumps,
        job_deserializer=loads,
        default_queue_name=QUEUE_NAME,
    )


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (RedisError, OSError, TimeoutError) as error:
        raise QueueUnavailable(f"Redis did not answer ({type(error).__name__})") from error
