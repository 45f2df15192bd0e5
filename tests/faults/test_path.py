"""The whole path on real processes: accept, deliver, retry, redrive, and two thousand at once."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import time

import pytest
from standardwebhooks import Webhook

from tests.faults.harness import Stack
from tests.faults.receiver import OK, Reply

pytestmark = [pytest.mark.slow]

ODD_PAYLOAD = '{"b":1.0, "a":"é/😀", "z":[1e2, -0.0], "b":1.10}'.encode()


async def test_a_webhook_arrives_once_with_its_exact_bytes_and_a_signature_that_others_verify(stack: Stack) -> None:
    stack.receiver.witness = stack.witness
    await stack.start("api", "worker", "dispatcher")
    destination = await stack.destination("/hook")
    delivery_id = await stack.producer().accepted(destination, ODD_PAYLOAD)
    view = await stack.reached(delivery_id, "delivered")
    [request] = stack.receiver.at("/hook")
    assert request.body == ODD_PAYLOAD
    Webhook(destination.secret).verify(request.body, request.headers)
    assert (request.webhook_id, request.witnessed) == (delivery_id, 1)
    assert [(attempt["number"], attempt["outcome"]) for attempt in view["attempts"]] == [(1, "success")]
    await stack.judged()


async def test_503_twice_then_200_is_three_attempts_of_one_id_with_rising_delays(stack: Stack) -> None:
    await stack.start("api", "worker", "dispatcher")
    stack.receiver.scripts["/flaky"] = [Reply(503), Reply(503), OK]
    destination = await stack.destination("/flaky", b'"retry":{"base_seconds":0.5}')
    view = await stack.reached(await stack.producer().accepted(destination, ODD_PAYLOAD), "delivered")
    one, two, three = stack.receiver.at("/flaky")
    assert len({request.webhook_id for request in (one, two, three)}) == 1
    assert {request.body for request in (one, two, three)} == {ODD_PAYLOAD}
    scheduled = [dt.datetime.fromisoformat(attempt["scheduled_at"]) for attempt in view["attempts"]]
    ended = [dt.datetime.fromisoformat(attempt["completed_at"]) for attempt in view["attempts"]]
    assert dt.timedelta(seconds=0.25) <= scheduled[1] - ended[0] <= scheduled[2] - ended[1]
    assert two.at >= scheduled[1]
    assert three.at >= scheduled[2]
    await stack.judged()


async def test_a_receiver_that_asks_for_two_seconds_is_given_two_seconds(stack: Stack) -> None:
    await stack.start("api", "worker", "dispatcher")
    stack.receiver.scripts["/busy"] = [Reply(429, retry_after_seconds=2), OK]
    destination = await stack.destination("/busy", b'"retry":{"base_seconds":0.1}')
    await stack.reached(await stack.producer().accepted(destination), "delivered")
    one, two = stack.receiver.at("/busy")
    assert (two.at - one.at).total_seconds() >= 2
    await stack.judged()


async def test_what_was_refused_is_redriven_under_its_id_once_the_receiver_is_mended(stack: Stack) -> None:
    await stack.start("api", "worker", "dispatcher")
    stack.receiver.scripts["/broken"] = [Reply(404)]
    destination = await stack.destination("/broken")
    delivery_id = await stack.producer().accepted(destination, ODD_PAYLOAD)
    await stack.reached(delivery_id, "dead")
    [letter] = (await stack.call("GET", "/dlq")).json["items"]
    assert (letter["delivery_id"], letter["reason"], letter["last_status_code"]) == (delivery_id, "rejected", 404)
    stack.receiver.scripts["/broken"] = [OK]
    await redrive(stack, delivery_id)
    view = await stack.reached(delivery_id, "delivered")
    told = [(attempt["number"], attempt["trigger"], attempt["status_code"]) for attempt in view["attempts"]]
    assert told == [(1, "schedule", 404), (2, "redrive", 200)]
    assert {(request.webhook_id, request.body) for request in stack.receiver.at("/broken")} == {
        (delivery_id, ODD_PAYLOAD)
    }
    assert (await stack.call("GET", "/dlq")).json["items"] == []
    await stack.judged()


async def test_a_redrive_really_runs_however_soon_after_the_one_before(stack: Stack) -> None:
    await stack.start("api", "worker", "dispatcher")
    stack.receiver.scripts["/broken"] = [Reply(404)] * 3 + [OK]
    delivery_id = await stack.producer().accepted(await stack.destination("/broken"))
    for round_number in (1, 2, 3):
        await stack.reached(delivery_id, "dead")
        await redrive(stack, delivery_id)
        await stack.receiver.wait_for("/broken", round_number + 1)
    view = await stack.reached(delivery_id, "delivered")
    assert (view["redrive_count"], view["attempt_count"]) == (3, 4)
    await stack.judged()


async def redrive(stack: Stack, delivery_id: str) -> None:
    body = json.dumps({"delivery_ids": [delivery_id], "reason": "the receiver is mended"}).encode()
    answer = await stack.call("POST", "/dlq/redrive", body)
    assert (answer.status, answer.json["selected"]) == (202, 1)


@pytest.mark.timeout(180)
async def test_two_thousand_posts_from_32_connections_arrive_once_each(stack: Stack) -> None:
    await stack.start("api", "worker", "dispatcher")
    destination = await stack.destination("/many")
    producer = stack.producer(connections_count=32)
    payload = json.dumps({"text": "y" * 1_000}).encode()
    started = time.monotonic()
    delivery_ids = await producer.many(destination, 2_000, payload)
    accepted_seconds = time.monotonic() - started
    await stack.receiver.wait_for("/many", 2_000, distinct=True)
    seconds = time.monotonic() - started
    print(f"2,000 accepted in {accepted_seconds:.1f} s and all arrived in {seconds:.1f} s")
    assert len(set(delivery_ids)) == 2_000
    history = await stack.judged()
    assert {delivery.state for delivery in history.deliveries} == {"delivered"}
    assert len(history.arrivals) == 2_000, "no fault happened, so none may have come twice"
    assert set(itertools.chain(*([len(delivery.attempts)] for delivery in history.deliveries))) == {1}
    assert seconds < 20  # 10 on two quiet cores; the machine that runs this may be neither
