"""Fidelity across real processes: another hash seed, another time zone, another worker, the same bytes."""

from __future__ import annotations

import datetime as dt
import hashlib

import pytest
from standardwebhooks import Webhook

from tests.faults.harness import Stack
from tests.faults.receiver import OK, Reply

pytestmark = [pytest.mark.slow]

EXACT = '{"b":1.0, "a":"é/😀", "z":[1e2, -0.0], "b":1.10}'.encode()


async def test_a_worker_with_another_pythonhashseed_sends_the_same_bytes_headers_and_hash(stack: Stack) -> None:
    """`PYTHONHASHSEED` changes between the attempts of one delivery, and between the API's two answers to one key."""
    stack.receiver.scripts["/seeds"] = [Reply(503), OK]
    [api, worker, _] = [(await stack.start(role, PYTHONHASHSEED="1"))[0] for role in ("api", "worker", "dispatcher")]
    destination = await stack.destination(
        "/seeds", b'"retry":{"base_seconds":2},"headers":{"x-a":"1","x-b":"2","x-c":"3"}'
    )
    first = await stack.producer().post(destination, EXACT, key="seeds")
    assert first.status == 202, first.content
    delivery_id = first.json["id"]
    await stack.receiver.wait_for("/seeds", 1)
    worker.kill()
    api.kill()
    await stack.start("worker", PYTHONHASHSEED="2")
    await stack.start("api", port=api.port, PYTHONHASHSEED="2")
    await stack.reached(delivery_id, "delivered")
    one, *_, last = stack.receiver.at("/seeds")
    assert last.attempt > one.attempt
    assert one.body == last.body == EXACT
    changing = ("webhook-timestamp", "webhook-signature", "hookledger-attempt")
    kept = [[item for item in request.headers.items() if item[0] not in changing] for request in (one, last)]
    assert kept[0] == kept[1], "also in their order"
    for request in (one, last):
        Webhook(destination.secret).verify(request.body, request.headers)
    [row] = await stack.fetch("SELECT body_sha256 FROM payloads")
    assert row["body_sha256"] == hashlib.sha256(last.body).digest()
    again = await stack.producer().post(destination, EXACT, key="seeds")
    assert (again.status, again.json["id"]) == (200, delivery_id), "the same request to the other API"
    await stack.judged()


async def test_processes_in_other_time_zones_keep_the_databases_times(stack: Stack) -> None:
    """Another time zone and a daylight saving time on either side: due times and leases are the database's."""
    stack.receiver.scripts["/zones"] = [Reply(503), OK]
    await stack.start("api", TZ="America/St_Johns")
    await stack.start("worker", TZ="Pacific/Kiritimati")
    await stack.start("dispatcher", TZ="Europe/Lisbon")
    destination = await stack.destination("/zones", b'"retry":{"base_seconds":2}')
    delivery_id = await stack.producer().accepted(destination, EXACT)
    view = await stack.reached(delivery_id, "delivered")
    one, two = stack.receiver.at("/zones")
    assert 1.0 <= (two.at - one.at).total_seconds() < 30
    for attempt in view["attempts"]:
        scheduled_at = dt.datetime.fromisoformat(attempt["scheduled_at"])
        assert abs((dt.datetime.now(dt.UTC) - scheduled_at).total_seconds()) < 120
    assert abs(int(one.headers["webhook-timestamp"]) - one.at.timestamp()) < 30
    await stack.judged()
