"""Redis and Postgres emptied, killed, away and back, under what the roles do meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import time
import uuid
from collections import Counter
from pathlib import Path

import pytest
import redis.asyncio

from service.queue.arq_queue import QUEUE_NAME, ArqQueue
from service.telemetry import events
from tests.faults.client import Answer, Destination, Producer
from tests.faults.harness import STALE_SECONDS, Stack, until
from tests.faults.receiver import HELD, OK

pytestmark = [pytest.mark.slow]

FLOWS_AGAIN_WITHIN_SECONDS = 5


async def test_flushall_with_five_hundred_waiting_loses_none_and_sends_none_twice(stack: Stack) -> None:
    await stack.start("api", "dispatcher")
    destination = await stack.destination("/flushed")
    await stack.producer(connections_count=16).many(destination, 500)
    await stack.flush_redis()
    await stack.start("worker")
    started = time.monotonic()
    await stack.receiver.wait_for("/flushed", 500, distinct=True)
    seconds = time.monotonic() - started
    print(f"500 arrived {seconds:.1f} s after a worker was there")
    assert seconds < FLOWS_AGAIN_WITHIN_SECONDS
    history = await stack.judged()
    assert len(history.arrivals) == 500


@pytest.mark.parametrize("empty", [True, False], ids=["empty", "with what it had"])
async def test_a_redis_killed_and_started_again_costs_seconds_and_no_process(stack: Stack, *, empty: bool) -> None:
    _, worker, dispatcher = await stack.start("api", "worker", "dispatcher")
    stack.receiver.scripts["/running"] = [HELD]
    running, waiting = await stack.destination("/running"), await stack.destination("/waiting")
    producer = stack.producer(connections_count=8)
    await producer.many(running, 20)
    await stack.receiver.wait_for("/running", 20)
    stack.servers.kill_redis()
    await producer.many(waiting, 200)
    stack.servers.start_redis(empty=empty)
    started = time.monotonic()
    await stack.receiver.wait_for("/waiting", 200, distinct=True)
    seconds = time.monotonic() - started
    print(f"200 arrived {seconds:.1f} s after Redis was back")
    assert seconds < FLOWS_AGAIN_WITHIN_SECONDS
    stack.receiver.release()
    history = await stack.judged()
    assert {delivery.attempt_count for delivery in history.deliveries} == {1}
    assert (worker.exit_code, dispatcher.exit_code) == (None, None)


async def test_while_redis_is_away_every_post_is_a_202_and_afterwards_all_arrive(stack: Stack) -> None:
    api, worker, dispatcher = await stack.start("api", "worker", "dispatcher")
    destination = await stack.destination("/away")
    producer = stack.producer(connections_count=8)
    stack.servers.kill_redis()
    await producer.many(destination, 100)  # asserts each 202
    for process in (api, worker, dispatcher):
        await until(lambda process=process: process.said(events.QUEUE_DOWN), f"{process.role} to miss Redis")  # type: ignore[misc]
    await producer.many(destination, 100)
    assert (await stack.call("GET", "/readyz")).json["status"] == "degraded"
    assert not stack.receiver.at("/away")
    stack.servers.start_redis(empty=True)
    started = time.monotonic()
    await stack.receiver.wait_for("/away", 200, distinct=True)
    seconds = time.monotonic() - started
    print(f"200 arrived {seconds:.1f} s after Redis was back")
    assert seconds < FLOWS_AGAIN_WITHIN_SECONDS
    history = await stack.judged()
    assert len(history.arrivals) == 200
    assert [process.exit_code for process in (api, worker, dispatcher)] == [None] * 3


class Bomb:
    """What a pickle can do when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


async def test_jobs_that_nobody_of_ours_made_do_nothing_and_hold_nothing_up(stack: Stack, tmp_path: Path) -> None:
    _, worker, _ = await stack.start("api", "worker", "dispatcher")
    exploded = tmp_path / "exploded"
    strange = [
        pickle.dumps({"t": 1, "f": "deliver", "a": (Bomb(exploded),), "k": {}, "et": 0}),
        b'{"t": 1, "f": "rm_rf", "a": [], "k": {}, "et": 0}',
        b'{"t": 1, "f": "deliver", "a": [["not an id"]], "k": {}, "et": 0}',
        b'{"t": 1, "f": "deliver", "a": [["%s"]], "k": {}, "et": 0}' % str(uuid.uuid4()).encode(),
    ]
    async with redis.asyncio.Redis.from_url(stack.servers.redis_url) as client:
        named = {uuid.uuid4().hex: job for job in strange}
        for name, job in named.items():
            await client.set(f"arq:job:{name}", job)
        await client.zadd(QUEUE_NAME, dict.fromkeys([*named, uuid.uuid4().hex, "without-a-job"], 1))
        # A name that is no text, and as many members without a time as a poll reads.
        await client.zadd(QUEUE_NAME, {b"\xff\xfe": 1})
        await client.zadd(QUEUE_NAME, {uuid.uuid4().hex: 0 for _ in range(1_500)})
    delivery_id = await stack.producer().accepted(await stack.destination("/hook"))
    await stack.reached(delivery_id, "delivered")
    await stack.judged()  # waits until the queue is empty
    assert not exploded.exists()
    assert worker.exit_code is None


async def test_requests_that_hang_are_no_jobs_that_others_have_to_step_over_and_are_acknowledged_when_settled(
    stack: Stack,
) -> None:
    _, worker, _ = await stack.start("api", "worker", "dispatcher")
    stack.receiver.scripts["/hanging"] = [HELD]
    destination = await stack.destination("/hanging", b'"timeout_seconds":60')
    producer = stack.producer()
    for _ in range(60):  # one after the other, so that each is a job of its own
        await producer.accepted(destination)
    await stack.receiver.wait_for("/hanging", 60)

    jobs_count = await stack.jobs_in_redis()
    queue = ArqQueue(stack.servers.redis_url)

    async def none_waits() -> bool:
        return await queue.depth() == 0

    await until(none_waits, "the last job to be set aside", seconds=10)
    await queue.close()
    # No outcome is committed, so no job is acknowledged.
    assert await stack.jobs_in_redis() == jobs_count > 0
    assert not worker.said(events.ATTEMPT_SETTLED)
    stack.receiver.release()
    await stack.judged()


@pytest.mark.timeout(120)
async def test_a_postgres_killed_under_load_costs_503s_with_retry_after_and_loses_nothing(stack: Stack) -> None:
    _, worker, dispatcher = await stack.start("api", "worker", "dispatcher")
    destination = await stack.destination("/hook", b'"retry":{"base_seconds":0.2}')
    producer = stack.producer(connections_count=8)
    answers: list[Answer] = []
    stop = asyncio.Event()
    posting = [asyncio.create_task(post_until(stop, producer, destination, answers)) for _ in range(8)]
    await until(lambda: count(answers, 202) >= 200, "some accepted deliveries")
    stack.servers.kill_postgres()
    await until(lambda: count(answers, 503) >= 50, "the API's word that the ledger is away")
    stack.servers.start_postgres()
    accepted = count(answers, 202)
    seconds = await until(lambda: count(answers, 202) > accepted, "the first accepted delivery after the restart")
    await until(lambda: count(answers, 202) >= accepted + 200, "accepted deliveries after the restart")
    stop.set()
    await asyncio.gather(*posting)
    print(f"accepting again {seconds:.1f} s after Postgres was back; {Counter(each.status for each in answers)}")
    assert {answer.status for answer in answers} == {202, 503}
    assert all("retry-after" in answer.headers for answer in answers if answer.status == 503)
    assert seconds < FLOWS_AGAIN_WITHIN_SECONDS
    await stack.judged()
    assert (worker.exit_code, dispatcher.exit_code) == (None, None)


async def post_until(stop: asyncio.Event, producer: Producer, destination: Destination, log: list[Answer]) -> None:
    while not stop.is_set():
        log.append(await producer.post(destination))


def count(answers: list[Answer], status: int) -> int:
    return sum(answer.status == status for answer in answers)


async def test_answers_that_came_while_postgres_was_away_are_recorded_when_it_is_back(stack: Stack) -> None:
    _, worker, _ = await stack.start("api", "worker", "dispatcher")
    stack.receiver.scripts["/held"] = [HELD]
    destination = await stack.destination("/held")
    delivery_ids = await stack.producer(connections_count=8).many(destination, 40)
    await stack.receiver.wait_for("/held", 40)
    stack.servers.kill_postgres()
    stack.receiver.release()
    await until(lambda: worker.said(events.SETTLE_RETRIED), "the worker to miss the ledger")
    stack.servers.start_postgres()
    views = [await stack.reached(delivery_id, "delivered") for delivery_id in delivery_ids]
    outcomes = [attempt["outcome"] for attempt in itertools.chain(*(view["attempts"] for view in views))]
    assert outcomes == ["success"] * 40
    await stack.judged()


async def test_a_ledger_away_for_longer_than_heartbeats_last_costs_living_workers_no_claim(stack: Stack) -> None:
    _, worker, dispatcher = await stack.start("api", "worker", "dispatcher")
    stack.receiver.scripts["/held"] = [HELD, OK]
    destination = await stack.destination("/held", b'"timeout_seconds":60,"retry":{"base_seconds":0.1}')
    delivery_ids = await stack.producer(connections_count=8).many(destination, 40)
    await stack.receiver.wait_for("/held", 40)
    stack.servers.kill_postgres()
    away_since = time.monotonic()
    await until(lambda: dispatcher.said(events.LEDGER_DOWN), "the dispatcher to miss the ledger")
    await until(lambda: time.monotonic() - away_since > STALE_SECONDS + 1, "the heartbeats to grow stale")
    stack.servers.start_postgres()
    await until(lambda: dispatcher.said(events.LEDGER_BACK), "the dispatcher to find the ledger again")
    stack.receiver.release()
    views = [await stack.reached(delivery_id, "delivered") for delivery_id in delivery_ids]
    outcomes = Counter(attempt["outcome"] for attempt in itertools.chain(*(view["attempts"] for view in views)))
    assert outcomes == {"success": 40}
    assert worker.exit_code is None
    await stack.judged()
