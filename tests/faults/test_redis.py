"""The rows of "Redis" that test_lost_servers.py does not have: hints are lost, kept too long, or stuck."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
import redis.asyncio
from arq.constants import job_key_prefix

from service import bootstrap, worker
from service.deliver import Deliverer
from service.queue.arq_queue import QUEUE_NAME
from service.queue.doorbell_worker import run_worker
from service.settings import Settings
from service.tallies import Tallies
from service.telemetry import events
from tests.faults.crash_points import Crash, Point
from tests.faults.harness import SETTINGS, Stack, until
from tests.faults.proxy import Fault
from tests.faults.receiver import HELD

pytestmark = [pytest.mark.slow]

QUICK_RETRY = b'"retry":{"base_seconds":0.1}'
FLOWS_AGAIN_WITHIN_SECONDS = 5
KILLED_TIMES = 6


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis.asyncio.Redis.from_url(stack.servers.redis_url, decode_responses=True) as made:
        yield made


async def test_flushall_with_work_running_hinted_and_waiting_sends_nothing_twice(stack: Stack) -> None:
    """FLUSHALL with work hinted, running and waiting."""
    await stack.start("api", "dispatcher")
    [worker] = await stack.start("worker", WORKER_SLOTS="10")
    stack.receiver.scripts["/running"] = [HELD]
    running, hinted = await stack.destination("/running"), await stack.destination("/hinted")
    paused = await stack.destination("/paused")
    await stack.call("POST", f"/destinations/{paused.id}/pause")
    producer = stack.producer(connections_count=8)
    await producer.many(running, 10)
    await stack.receiver.wait_for("/running", 10)
    await producer.many(hinted, 50)  # no slot is free
    await producer.many(paused, 50)
    await stack.flush_redis()
    await stack.call("POST", f"/destinations/{paused.id}/resume")
    stack.receiver.release()
    started = time.monotonic()
    await asyncio.gather(*(stack.receiver.wait_for(path, 50, distinct=True) for path in ("/hinted", "/paused")))
    seconds = time.monotonic() - started
    print(f"100 arrived {seconds:.1f} s after the flush")
    assert seconds < FLOWS_AGAIN_WITHIN_SECONDS
    history = await stack.judged()
    assert len(history.arrivals) == 110
    assert worker.exit_code is None


async def test_a_half_open_redis_costs_no_202_and_no_process_and_everything_flows_when_it_is_back(stack: Stack) -> None:
    """Half-open: connections stand and take commands, and nothing ever answers."""
    proxy = await stack.redis_proxy()
    roles = await stack.start("api", "worker", "dispatcher", REDIS_URL=proxy.url)
    destination = await stack.destination("/hook")
    producer = stack.producer(connections_count=8)
    await producer.many(destination, 20)
    await stack.receiver.wait_for("/hook", 20)
    proxy.silence()
    await producer.many(destination, 100)  # asserts each 202
    for role in roles:
        await until(lambda role=role: role.said(events.QUEUE_DOWN), f"{role.role} to miss Redis")  # type: ignore[misc]
    await producer.many(destination, 100)
    proxy.heal()
    started = time.monotonic()
    await stack.receiver.wait_for("/hook", 220, distinct=True)
    seconds = time.monotonic() - started
    print(f"200 arrived {seconds:.1f} s after Redis answered again")
    assert seconds < FLOWS_AGAIN_WITHIN_SECONDS
    history = await stack.judged()
    assert len(history.arrivals) == 220
    assert [role.exit_code for role in roles] == [None] * 3


async def test_a_worker_whose_doorbell_alone_is_dead_still_takes_every_hint(stack: Stack) -> None:
    """Half-open, the subscription alone: the poll is what is left."""
    proxy = await stack.redis_proxy()
    subscribed = proxy.on(b"SUBSCRIBE", Fault.SILENCE)
    await stack.start("api", "dispatcher")
    await stack.start("worker", REDIS_URL=proxy.url)
    await until(subscribed.is_set, "the worker's subscription")
    await stack.producer(connections_count=8).many(await stack.destination("/hook"), 100)
    history = await stack.judged()
    assert len(history.arrivals) == 100


async def test_a_job_whose_key_is_gone_is_dropped_and_its_deliveries_are_hinted_again(
    stack: Stack, client: redis.asyncio.Redis
) -> None:
    """A job key deleted alone: the queue names a job that is not there."""
    await stack.start("api")
    await stack.producer(connections_count=8).many(await stack.destination("/hook"), 50)

    async def hinted() -> bool:
        return bool(await stack.jobs_in_redis())

    await until(hinted, "the hints")
    jobs = await client.zrange(QUEUE_NAME, 0, -1)
    assert await client.delete(*(job_key_prefix + job for job in jobs)) == len(jobs)
    await stack.start("worker", "dispatcher")
    history = await stack.judged()
    assert len(history.arrivals) == 50


async def test_a_job_that_outlives_its_time_is_seen_again_and_takes_no_request_with_it(stack: Stack) -> None:
    """A job that outlives `job_timeout`: no setting makes one so short, so the worker runs in the test's process."""
    await stack.start("api", "dispatcher")
    stack.receiver.scripts["/slow"] = [HELD]
    values = {"database_url": stack.database_url, "redis_url": stack.servers.redis_url}
    settings = Settings.model_validate({**{name.lower(): value for name, value in SETTINGS.items()}, **values})
    ledger = bootstrap.ledger_of(settings, "worker")
    deliverer, sender = bootstrap.deliverer_of(settings, ledger, Tallies(ledger), "in the test")
    hinted: list[uuid.UUID] = []

    class Watched(Deliverer):
        async def deliver(self, delivery_ids: Sequence[uuid.UUID]) -> None:
            hinted.extend(delivery_ids)
            await super().deliver(delivery_ids)

    deliverer.__class__ = Watched
    stopping = asyncio.Event()
    working = [
        asyncio.create_task(worker._tick(deliverer)),
        asyncio.create_task(
            run_worker(settings.redis_url.get_secret_value(), deliverer, stopping=stopping, aside_seconds=0.5)
        ),
    ]
    delivery_id = await stack.producer().accepted(await stack.destination("/slow"))
    await stack.receiver.wait_for("/slow", 1)
    await until(lambda: len(hinted) > 1, "the job's coming back")
    stack.receiver.release()
    view = await stack.reached(delivery_id, "delivered")
    assert [attempt["outcome"] for attempt in view["attempts"]] == ["success"]
    await stack.judged()
    stopping.set()
    await working[1]
    working[0].cancel()
    await sender.close()
    await ledger.close()


async def test_a_job_that_kills_six_workers_is_brought_back_each_time(stack: Stack) -> None:
    """A worker killed six times mid-job: each holds the job, and none comes as far as a claim."""
    await stack.start("api", "dispatcher")
    workers = await stack.start(*["worker"] * KILLED_TIMES, crash=Crash(Point.WORKER_BEFORE_CLAIM))
    delivery_id = await stack.producer().accepted(await stack.destination("/hook", QUICK_RETRY))
    await asyncio.gather(*(worker.crashed() for worker in workers))
    await stack.start("worker")
    view = await stack.reached(delivery_id, "delivered")
    assert [attempt["outcome"] for attempt in view["attempts"]] == ["success"]
    await stack.judged()


async def test_a_redis_that_may_evict_is_warned_of_at_the_start(stack: Stack, client: redis.asyncio.Redis) -> None:
    """An eviction policy other than `noeviction`. (Told by the dispatcher's log; nothing else is refused.)"""
    await client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        _, _, dispatcher = await stack.start("api", "worker", "dispatcher")
    finally:
        await client.config_set("maxmemory-policy", "noeviction")
    assert dispatcher.said(events.QUEUE_EVICTS)
    delivery_id = await stack.producer().accepted(await stack.destination("/hook"))
    await stack.reached(delivery_id, "delivered")
    await stack.judged()


async def test_a_redis_restarted_from_an_old_snapshot_repeats_nothing_and_loses_nothing(
    stack: Stack, tmp_path: Path
) -> None:
    """Restarted from an old snapshot: its jobs are long done, and what came since is not in it."""
    await stack.start("api", "dispatcher")
    destination = await stack.destination("/hook")
    producer = stack.producer(connections_count=8)
    await producer.many(destination, 50)

    async def hinted() -> bool:
        return bool(await stack.jobs_in_redis())

    await until(hinted, "the hints")
    stack.servers.keep_redis(tmp_path / "snapshot")
    [worker] = await stack.start("worker")
    await stack.receiver.wait_for("/hook", 50)
    await stack.drained()
    stack.servers.kill_redis()
    await producer.many(destination, 50)
    stack.servers.start_redis(snapshot=tmp_path / "snapshot")
    assert await stack.jobs_in_redis() > 0, "the snapshot holds jobs"
    started = time.monotonic()
    await stack.receiver.wait_for("/hook", 100, distinct=True)
    seconds = time.monotonic() - started
    print(f"50 arrived {seconds:.1f} s after Redis was back")
    assert seconds < FLOWS_AGAIN_WITHIN_SECONDS
    history = await stack.judged()
    assert len(history.arrivals) == 100
    assert worker.exit_code is None
