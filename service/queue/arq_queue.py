"""arq on Redis, kept behind this package: jobs that name deliveries, and nothing else.

arq may lose or repeat any job at any time, so nothing but latency depends on one. What is known of
arq 0.28 and answered here: its default serializer is pickle (ours is JSON, so a planted pickle does
not run); a kept result blocks a job id (none is kept, and ids are never reused); to enqueue takes it
three round trips, and each costs more than the accept that it follows (ours takes one, of the same
keys in the same form); its RedisSettings show the password when printed (they never are).
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Final

from arq.connections import ArqRedis
from arq.constants import job_key_prefix
from arq.jobs import serialize_job
from arq.utils import timestamp_ms
from redis.asyncio import BlockingConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from service.domain import limits
from service.errors import QueueUnavailable

QUEUE_NAME: Final = "hookledger:hints"
EPOCH_KEY: Final = "hookledger:epoch"
DOORBELL: Final = "hookledger:doorbell"
JOB_NAME: Final = "deliver"
JOB_PREFIX: Final = job_key_prefix

_CONNECTIONS_MAX: Final = 10
_ANSWER_TIMEOUT_SECONDS: Final = 2.0
_JOB_EXPIRY_SECONDS: Final = 300  # a hint older than this was given out again long ago
_SKEW_MS_MAX: Final = 30_000  # between the clocks of two machines; less than any job is set aside for

# As arq's `enqueue_job`, for many jobs at once, and the ring that ends a worker's wait.
_HINT: Final = f"""
for i = 4, #ARGV, 2 do
    redis.call('SET', '{JOB_PREFIX}' .. ARGV[i], ARGV[i + 1], 'EX', ARGV[2])
    redis.call('ZADD', KEYS[1], ARGV[1], ARGV[i])
end
redis.call('PUBLISH', ARGV[3], '1')
"""


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
        self._redis = connect(redis_url)
        self._hint = self._redis.register_script(_HINT)

    async def hint(self, delivery_ids: Sequence[uuid.UUID]) -> None:
        """Enqueue jobs of up to HINT_IDS_MAX ids and ring the workers' doorbell: one round trip."""
        now_ms = timestamp_ms()
        arguments: list[Any] = [now_ms, _JOB_EXPIRY_SECONDS, DOORBELL]
        for start in range(0, len(delivery_ids), limits.HINT_IDS_MAX):
            ids = [str(delivery_id) for delivery_id in delivery_ids[start : start + limits.HINT_IDS_MAX]]
            arguments += (uuid.uuid4().hex, serialize_job(JOB_NAME, (ids,), {}, None, now_ms, serializer=dumps))
        with translated():
            await self._hint(keys=[QUEUE_NAME], args=arguments)

    async def depth(self) -> int:
        """How many jobs wait for a worker; those under way are set aside."""
        with translated():
            return int(await self._redis.zcount(QUEUE_NAME, 1, timestamp_ms() + _SKEW_MS_MAX))

    async def epoch_lost(self) -> bool:
        """Whether Redis lost its contents: the marker lives and dies with them."""
        with translated():
            return not await self._redis.exists(EPOCH_KEY)

    async def mark_epoch(self) -> None:
        """Set the marker."""
        with translated():
            await self._redis.set(EPOCH_KEY, b"1")

    async def eviction_policy(self) -> str | None:
        """`maxmemory-policy`, or None where the server does not tell. Hints need `noeviction`."""
        with translated():
            try:
                return str((await self._redis.config_get("maxmemory-policy")).get("maxmemory-policy"))
            except (RedisConnectionError, RedisTimeoutError):
                raise
            except RedisError:
                return None

    async def close(self) -> None:
        """Close every connection."""
        await self._redis.aclose(close_connection_pool=True)


def connect(redis_url: str) -> ArqRedis:
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
def translated() -> Iterator[None]:
    """Turn Redis' failures into ours."""
    try:
        yield
    except (RedisError, OSError, TimeoutError) as error:
        raise QueueUnavailable(f"Redis did not answer ({type(error).__name__})") from error
