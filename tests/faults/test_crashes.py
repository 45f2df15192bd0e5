"""Roles that are killed, paused and told to stop, in the middle of what they do."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable

import asyncpg
import pytest

from service.telemetry import events
from tests.faults.client import new_key
from tests.faults.harness import STALE_SECONDS, Stack, until
from tests.faults.receiver import HELD, OK

pytestmark = [pytest.mark.slow]

QUICK_RETRY = b'"retry":{"base_seconds":0.1}'
RESCUED_WITHIN_SECONDS = STALE_SECONDS + 4  # the heartbeat's staleness, a pass, and a busy machine


async def test_a_worker_killed_during_a_request_leaves_it_unknown_and_another_delivers(stack: Stack) -> None:
    _, worker, _ = await stack.start("api", "worker", "dispatcher")
    stack.receiver.scripts["/hanging"] = [HELD, OK]
    destination = await stack.destination("/hanging", QUICK_RETRY)
    delivery_id = await stack.producer().accepted(destination)
    await stack.receiver.wait_for("/hanging", 1)
    worker.kill()
    killed_at = time.monotonic()
    await stack.start("worker")
    view = await stack.reached(delivery_id, "delivered")
    seconds = time.monotonic() - killed_at
    print(f"delivered {seconds:.1f} s after the kill, heartbeats being stale after {STALE_SECONDS:g} s")
    assert [(attempt["number"], attempt["outcome"]) for attempt in view["attempts"]] == [(1, "unknown"), (2, "success")]
    assert seconds < RESCUED_WITHIN_SECONDS
    await stack.judged()


async def test_a_delivery_that_ends_three_workers_is_poison_and_its_neighbours_arrive(stack: Stack) -> None:
    await stack.start("api", "dispatcher")
    stack.receiver.scripts["/poison"] = [HELD]
    poison = await stack.producer().accepted(await stack.destination("/poison", QUICK_RETRY))
    well = await stack.destination("/well", QUICK_RETRY)
    neighbours = []
    for number in (1, 2, 3):
        [worker] = await stack.start("worker")
        neighbours.append(await stack.producer().accepted(well))
        await stack.receiver.wait_for("/poison", number)
        await stack.reached(neighbours[-1], "delivered")
        worker.kill()
    view = await stack.reached(poison, "dead")
    assert view["dead_reason"] == "poison"
    assert view["may_have_been_delivered"]
    assert [attempt["outcome"] for attempt in view["attempts"]] == ["unknown"] * 3
    await stack.judged()


async def test_a_worker_told_to_stop_finishes_fifty_requests_in_flight_and_takes_no_more(stack: Stack) -> None:
    _, worker = await stack.start("api", "worker")
    stack.receiver.scripts["/slow"] = [HELD]
    destination = await stack.destination("/slow")
    producer = stack.producer(connections_count=10)
    in_flight = await producer.many(destination, 50)
    await stack.receiver.wait_for("/slow", 50)
    worker.signal(signal.SIGTERM)
    await until(lambda: worker.said(events.STOPPING), "the worker's word that it stops")
    late = await producer.accepted(destination)
    await until(has_hint(stack), "the hint of what was accepted late")
    stack.receiver.release()
    assert await worker.ended() == 0
    views = [await stack.view(delivery_id) for delivery_id in in_flight]
    assert {(view["state"], view["attempt_count"]) for view in views} == {("delivered", 1)}
    assert (await stack.view(late))["attempt_count"] == 0
    assert await stack.jobs_in_redis() == 1, "what it finished is acknowledged, and the late hint is left to others"
    stack.receiver.scripts["/slow"] = [OK]
    await stack.start("worker", "dispatcher")
    history = await stack.judged()
    assert len(history.arrivals) == 51


def has_hint(stack: Stack) -> Callable[[], Awaitable[bool]]:
    async def there() -> bool:
        return await stack.hints_left() > 0

    return there


async def test_what_outlasts_a_stopping_workers_grace_is_unknown_and_made_again(stack: Stack) -> None:
    await stack.start("api", "dispatcher")
    [worker] = await stack.start("worker", WORKER_GRACE_SECONDS="0.5")
    stack.receiver.scripts["/slow"] = [HELD, OK]
    destination = await stack.destination("/slow", QUICK_RETRY)
    delivery_ids = await stack.producer(connections_count=5).many(destination, 20)
    await stack.receiver.wait_for("/slow", 20)
    worker.signal(signal.SIGTERM)
    assert await worker.ended() == 0
    await stack.start("worker")
    views = [await stack.reached(delivery_id, "delivered") for delivery_id in delivery_ids]
    assert {tuple(attempt["outcome"] for attempt in view["attempts"]) for view in views} == {("unknown", "success")}
    await stack.judged()


async def test_an_api_told_to_stop_answers_the_requests_in_flight(stack: Stack) -> None:
    [api] = await stack.start("api")
    destination = await stack.destination("/hook")
    producer = stack.producer(connections_count=20)
    locking = await asyncpg.connect(stack.database_url)
    async with locking.transaction():
        await locking.execute("LOCK TABLE idempotency_keys IN ACCESS EXCLUSIVE MODE")
        posting = [asyncio.create_task(producer.post(destination)) for _ in range(20)]
        # An answer on another connection: by then the API has read what came before it.
        for _ in range(3):
            await stack.connect().request("GET", "/healthz")
        api.signal(signal.SIGTERM)
        await until(lambda: refuses(api.port), "the API's refusal of new connections")
    await locking.close()
    assert [(await post).status for post in posting] == [202] * 20
    assert await api.ended() == 0
    await stack.start("api", "worker", "dispatcher")
    history = await stack.judged()
    assert len(history.arrivals) == 20


async def refuses(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionRefusedError:
        return True
    writer.close()
    return False


async def test_a_worker_paused_after_sending_is_fenced_and_its_late_answer_kept(stack: Stack) -> None:
    _, zombie, _ = await stack.start("api", "worker", "dispatcher")
    stack.receiver.scripts["/zombie"] = [HELD, OK]
    destination = await stack.destination("/zombie", QUICK_RETRY)
    delivery_id = await stack.producer().accepted(destination)
    await stack.receiver.wait_for("/zombie", 1)
    zombie.signal(signal.SIGSTOP)
    await stack.start("worker")
    before = await stack.reached(delivery_id, "delivered")
    zombie.signal(signal.SIGCONT)
    stack.receiver.release()
    await until(lambda: zombie.said(events.ATTEMPT_FENCED), f"the zombie's word that it was fenced ({zombie.log})")
    view = await stack.view(delivery_id)
    assert [attempt["outcome"] for attempt in view["attempts"]] == ["unknown", "success"]
    assert view["attempts"][0]["late_result"]["outcome"] == "success"
    assert {**view, "attempts": view["attempts"][1:]} == {**before, "attempts": before["attempts"][1:]}
    await stack.judged()


async def test_one_key_a_hundred_times_at_once_over_two_apis_is_one_delivery(stack: Stack) -> None:
    await stack.start("api", "api", "worker", "dispatcher")
    destination = await stack.destination("/hook")
    producer, key = stack.producer(connections_count=100), new_key()
    answers = await asyncio.gather(*(producer.post(destination, key=key) for _ in range(100)))
    assert {answer.status for answer in answers} == {200, 202}
    assert len({answer.json["id"] for answer in answers}) == 1
    history = await stack.judged()
    assert len(history.arrivals) == 1


async def test_two_dispatchers_and_two_workers_hand_each_waiting_delivery_out_once(stack: Stack) -> None:
    await stack.start("api", "worker", "worker", "dispatcher", "dispatcher")
    destination = await stack.destination("/resumed")
    await stack.call("POST", f"/destinations/{destination.id}/pause")
    await stack.producer(connections_count=16).many(destination, 400)
    await stack.call("POST", f"/destinations/{destination.id}/resume")
    history = await stack.judged()
    assert len(history.arrivals) == 400
    assert {delivery.attempt_count for delivery in history.deliveries} == {1}


async def test_a_commit_without_its_hint_is_delivered_within_three_seconds(stack: Stack) -> None:
    await stack.start("worker", "dispatcher")
    await stack.start("api", REDIS_URL="redis://127.0.0.1:1/0")
    delivery_id = await stack.producer().accepted(await stack.destination("/hook"))
    view = await stack.reached(delivery_id, "delivered", seconds=3)
    assert view["attempt_count"] == 1
    await stack.judged()
