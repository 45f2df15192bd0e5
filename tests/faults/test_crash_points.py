"""Each row of "Crash points": a process ends between two steps, and the ledger is true all the same."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import Any

import pytest
import redis.asyncio

from service.queue.arq_queue import QUEUE_NAME
from service.telemetry import events
from tests.faults.client import Answer, NoAnswer, new_key
from tests.faults.crash_points import Crash, Deed, Point, noted
from tests.faults.harness import Stack, until
from tests.faults.receiver import HELD, OK, Reply

pytestmark = [pytest.mark.slow]

QUICK_RETRY = b'"retry":{"base_seconds":0.1}'
NO_REDIS = "redis://127.0.0.1:1/0"


def outcomes(view: dict[str, Any]) -> list[str]:
    return [attempt["outcome"] for attempt in view["attempts"]]


async def test_every_crash_point_is_reached_by_an_ordinary_run(stack: Stack) -> None:
    """Else a seam that was renamed or left would let every test that waits there pass, or wait, for nothing."""
    everywhere = tuple(Crash(point, deed=Deed.NOTE) for point in Point)
    roles = await stack.start("api", "worker", "dispatcher", crash=everywhere)
    stack.receiver.scripts["/dead"] = [Reply(404), OK]
    stack.receiver.scripts["/lost"] = [HELD, OK]
    dead, lost = await stack.destination("/dead"), await stack.destination("/lost", QUICK_RETRY)
    delivery_id = await stack.producer().accepted(dead)
    await stack.reached(delivery_id, "dead")
    await redrive(stack, delivery_id)
    await stack.reached(delivery_id, "delivered")
    roles[1].signal(signal.SIGSTOP)  # what it holds is lost, and found by the dispatcher
    [second] = await stack.start("worker")
    await stack.producer().accepted(lost)
    await stack.receiver.wait_for("/lost", 1)
    second.kill()
    roles[1].signal(signal.SIGCONT)
    await stack.judged()
    logs = "".join(role.log.read_text() for role in roles)
    assert [point for point in Point if noted(point) not in logs] == []


async def redrive(stack: Stack, delivery_id: str, key: str | None = None) -> Answer:
    body = json.dumps({"delivery_ids": [delivery_id], "reason": "the receiver is mended"}).encode()
    answer = await stack.connect().request("POST", "/dlq/redrive", body, key)
    assert answer.status in (200, 202), answer.content
    return answer


async def test_an_api_that_ends_before_the_commit_after_it_or_after_the_hint_leaves_one_delivery(stack: Stack) -> None:
    """API before commit: no row. After commit, before the hint: the dispatcher's. After the hint: the same id."""
    [api] = await stack.start("api")
    destination = await stack.destination("/hook")
    keys: dict[Point, str] = {}
    for point in (Point.ACCEPT_BEFORE_COMMIT, Point.ACCEPT_BEFORE_HINT, Point.ACCEPT_BEFORE_ANSWER):
        api.kill()
        [api] = await stack.start("api", port=api.port, crash=Crash(point))
        keys[point] = new_key()
        with pytest.raises(NoAnswer):
            await stack.producer().post(destination, key=keys[point])
        await api.crashed()
    rows = await stack.fetch("SELECT event_id FROM payloads")
    committed = {keys[Point.ACCEPT_BEFORE_HINT], keys[Point.ACCEPT_BEFORE_ANSWER]}
    assert {row["event_id"] for row in rows} == committed
    assert await stack.jobs_in_redis() == 1, "one was hinted"
    # The dispatcher delivers what nobody hinted and nobody repeats; Redis holds one hint of the other at most.
    await stack.start("worker", "dispatcher")
    await stack.receiver.wait_for("/hook", 2)
    await stack.start("api", port=api.port)
    repeated = [await stack.producer().post(destination, key=key) for key in keys.values()]
    assert [answer.status for answer in repeated] == [202, 200, 200]
    history = await stack.judged()
    assert len(history.deliveries) == len(history.arrivals) == 3


# Where a worker ends; the outcomes of the delivery's attempts; how many whole requests the receiver saw.
WORKER_ENDS = {
    Point.WORKER_BEFORE_CLAIM: (["success"], 1),
    Point.WORKER_AFTER_CLAIM: (["unknown", "success"], 1),
    Point.WORKER_BEFORE_CONNECT: (["unknown", "success"], 1),
    Point.WORKER_IN_REQUEST: (["unknown", "success"], 1),
    Point.WORKER_AFTER_ANSWER: (["unknown", "success"], 2),
    Point.WORKER_AFTER_SETTLE: (["success"], 1),
    Point.WORKER_BEFORE_ACK: (["success"], 1),
}


async def test_wherever_a_worker_ends_its_delivery_arrives_and_no_attempt_is_called_failed(stack: Stack) -> None:
    """Worker before claim, before connect, in the request, after the 2xx, after settle, before ack.

    One worker after the other, each alone with a delivery of its own; the dispatcher comes when all have ended.
    """
    stack.receiver.witness = stack.witness
    await stack.start("api")
    destinations = {point: await stack.destination(f"/{point.value}", QUICK_RETRY) for point in WORKER_ENDS}
    delivery_ids: dict[Point, str] = {}
    for point in WORKER_ENDS:
        worker = stack.launch("worker", crash=Crash(point))
        delivery_ids[point] = await stack.producer().accepted(destinations[point], b'"%s"' % (b"y" * 100_000))
        await worker.crashed()
    await stack.start("worker", "dispatcher")
    for point, (expected, requests_count) in WORKER_ENDS.items():
        view = await stack.reached(delivery_ids[point], "delivered")
        assert (point, outcomes(view)) == (point, expected)
        assert (point, len(stack.receiver.at(f"/{point.value}"))) == (point, requests_count)
    await stack.judged()


async def test_a_job_that_was_never_acknowledged_is_a_no_op_when_it_runs_again(stack: Stack) -> None:
    """Worker after settle, before ack: the repeated job changes nothing."""
    await stack.start("api")
    worker = stack.launch("worker", crash=Crash(Point.WORKER_BEFORE_ACK))
    delivery_id = await stack.producer().accepted(await stack.destination("/hook"))
    await worker.crashed()
    async with redis.asyncio.Redis.from_url(stack.servers.redis_url, decode_responses=True) as client:
        [job] = await client.zrange(QUEUE_NAME, 0, -1)
        # As if its time aside were over: so that it really runs.
        await client.zadd(QUEUE_NAME, {job: 1})
    await stack.start("worker", "dispatcher")

    async def acknowledged() -> bool:
        return await stack.jobs_in_redis() == 0

    await until(acknowledged, "the job's acknowledgement")
    assert outcomes(await stack.view(delivery_id)) == ["success"]
    history = await stack.judged()
    assert len(history.arrivals) == 1


async def test_what_a_dispatcher_took_and_did_not_hint_is_hinted_by_another(stack: Stack) -> None:
    """Dispatcher between select and update: between taking the due rows and hinting them."""
    await stack.start("worker")
    await stack.start("api", REDIS_URL=NO_REDIS)  # so that only a dispatcher can hint
    first = stack.launch("dispatcher", crash=Crash(Point.DISPATCH_BEFORE_HINT))
    await stack.producer(connections_count=8).many(await stack.destination("/hook"), 50)
    await first.crashed()
    await stack.start("dispatcher", "dispatcher")
    history = await stack.judged()
    assert len(history.arrivals) == 50
    assert {delivery.attempt_count for delivery in history.deliveries} == {1}


@pytest.mark.parametrize("by", ["its worker", "another dispatcher"])
async def test_a_rescue_that_comes_late_moves_nothing_that_was_moved_meanwhile(stack: Stack, by: str) -> None:
    """Dispatcher between select and update: a dispatcher reads a claim as lost and stands still before it settles."""
    [_, worker] = await stack.start("api", "worker", REDIS_URL=stack.servers.redis_url)
    stack.receiver.scripts["/paused"] = [HELD, OK]
    delivery_id = await stack.producer().accepted(await stack.destination("/paused", QUICK_RETRY))
    await stack.receiver.wait_for("/paused", 1)
    worker.signal(signal.SIGSTOP)
    late = stack.launch("dispatcher", crash=Crash(Point.DISPATCH_BEFORE_RESCUE, deed=Deed.STOP))
    await late.stopped()
    if by == "its worker":
        worker.signal(signal.SIGCONT)
        stack.receiver.release()
        assert outcomes(await stack.reached(delivery_id, "delivered")) == ["success"]
    else:
        [_, other] = await stack.start("worker", "dispatcher")
        assert outcomes(await stack.reached(delivery_id, "delivered")) == ["unknown", "success"]
        other.kill()
        worker.kill()
    before = await stack.view(delivery_id)
    late.signal(signal.SIGCONT)
    # Redis loses the hint, so that only the late dispatcher, in a later pass, can give it again.
    await stack.flush_redis()
    sentinel = await stack.producer().accepted(await stack.destination("/sentinel"))
    await stack.flush_redis()
    await stack.reached(sentinel, "delivered")
    await until(lambda: late.said(events.BROKER_LOST), "a whole pass of the late dispatcher's")
    assert await stack.view(delivery_id) == before
    assert not late.said(events.CLAIM_RESCUED)
    await stack.judged()


async def test_a_redrive_survives_each_process_that_ends_over_it_and_makes_one_new_round(stack: Stack) -> None:
    """Redrive after commit, before the answer and before the hint; a step before its commit; the same order again."""
    [api, _] = await stack.start("api", "worker")
    hurt = stack.launch("dispatcher", crash=Crash(Point.REDRIVE_BEFORE_COMMIT))
    stack.receiver.scripts["/broken"] = [Reply(404), OK]
    delivery_id = await stack.producer().accepted(await stack.destination("/broken"))
    await stack.reached(delivery_id, "dead")
    api.kill()
    [api] = await stack.start("api", port=api.port, crash=Crash(Point.REDRIVE_BEFORE_ANSWER))
    with pytest.raises(NoAnswer):
        await redrive(stack, delivery_id, key="again")
    await api.crashed()
    await stack.start("api", port=api.port)
    again = await asyncio.gather(*(redrive(stack, delivery_id, key="again") for _ in range(5)))
    assert {answer.status for answer in again} == {200}
    assert len({answer.json["id"] for answer in again}) == 1
    await hurt.crashed()
    assert (await stack.view(delivery_id))["state"] == "dead", "a step that was not committed took effect"
    hurt = stack.launch("dispatcher", crash=Crash(Point.REDRIVE_BEFORE_HINT))
    await hurt.crashed()
    assert (await stack.view(delivery_id))["state"] == "pending"
    await stack.start("dispatcher")
    view = await stack.reached(delivery_id, "delivered")
    assert (view["redrive_count"], outcomes(view)) == (1, ["rejected", "success"])
    await stack.judged()


async def test_one_dead_delivery_redriven_by_many_at_once_gets_one_new_round(stack: Stack) -> None:
    """The same redrive twice at once: without a key each is a redrive of its own, and one of them takes it."""
    await stack.start("api", "worker")
    stack.receiver.scripts["/broken"] = [Reply(404), OK]
    delivery_id = await stack.producer().accepted(await stack.destination("/broken"))
    await stack.reached(delivery_id, "dead")
    orders = await asyncio.gather(*(redrive(stack, delivery_id) for _ in range(5)))
    await stack.start("dispatcher", "dispatcher")
    view = await stack.reached(delivery_id, "delivered")
    assert (view["redrive_count"], outcomes(view)) == (1, ["rejected", "success"])

    async def done() -> bool:
        answers = [await stack.call("GET", f"/dlq/redrives/{order.json['id']}") for order in orders]
        return {answer.json["state"] for answer in answers} == {"completed"}

    await until(done, "the end of every redrive")
    history = await stack.judged()
    assert len(history.arrivals) == 2
