"""The recovery objectives of docs/reliability.md, measured with the settings that production has.

`./run test -s -n 0 tests/faults/test_recovery.py` prints the figures.
"""

from __future__ import annotations

import time
from typing import Any, Final

import pytest

from service.settings import Settings
from tests.faults.harness import SETTINGS, Stack, until
from tests.faults.receiver import HELD, OK

RESCUED_WITHIN_SECONDS: Final = 15.0
FLOWS_AGAIN_WITHIN_SECONDS: Final = 5.0
UNHINTED_WITHIN_SECONDS: Final = 3.0

# The harness makes the waits of a test short; here they are as they come.
AS_THEY_COME: Final[dict[str, Any]] = {
    name: str(Settings.model_fields[name.lower()].default)
    for name in SETTINGS
    if Settings.model_fields[name.lower()].default is not None and name not in ("SECRET_KEYS", "EGRESS_ALLOW")
}
AT_ONCE: Final = b'"retry":{"base_seconds":0.1}'

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def test_the_waits_that_are_measured_are_those_of_production() -> None:
    assert set(AS_THEY_COME) > {"HEARTBEAT_SECONDS", "HEARTBEAT_STALE_SECONDS", "HINT_VISIBILITY_SECONDS"}


async def test_a_killed_workers_deliveries_are_rescued_within_15_seconds(stack: Stack) -> None:
    _, worker, _ = await stack.start("api", "worker", "dispatcher", **AS_THEY_COME)
    stack.receiver.scripts["/slow"] = [HELD]
    destination = await stack.destination("/slow", AT_ONCE)
    await stack.producer(connections_count=4).many(destination, 20)
    await stack.receiver.wait_for("/slow", 20)
    stack.receiver.scripts["/slow"] = [OK]
    worker.kill()
    killed_at = time.monotonic()

    async def rescued() -> bool:
        return not await stack.fetch("SELECT FROM deliveries WHERE state = 'delivering'")

    await until(rescued, "the rescue")
    seconds = time.monotonic() - killed_at
    print(f"20 deliveries of a killed worker were rescued {seconds:.1f} s later")
    assert seconds < RESCUED_WITHIN_SECONDS
    await stack.start("worker", **AS_THEY_COME)
    stack.receiver.release()
    history = await stack.judged()
    outcomes = {tuple(attempt.outcome for attempt in delivery.attempts) for delivery in history.deliveries}
    assert outcomes == {("unknown", "success")}


async def test_deliveries_flow_again_within_5_seconds_of_an_empty_redis(stack: Stack) -> None:
    await stack.start("api", "worker", "dispatcher", **AS_THEY_COME)
    destination = await stack.destination("/hook")
    producer = stack.producer(connections_count=4)
    stack.servers.kill_redis()
    await producer.many(destination, 200)
    stack.servers.start_redis(empty=True)
    back_at = time.monotonic()
    await stack.receiver.wait_for("/hook", 200, distinct=True)
    seconds = time.monotonic() - back_at
    print(f"200 deliveries arrived {seconds:.1f} s after an empty Redis was there")
    assert seconds < FLOWS_AGAIN_WITHIN_SECONDS
    await stack.judged()


async def test_deliveries_flow_again_within_5_seconds_of_a_killed_postgres(stack: Stack) -> None:
    await stack.start("api", "worker", "dispatcher", **AS_THEY_COME)
    destination = await stack.destination("/hook")
    producer = stack.producer(connections_count=4)
    await producer.many(destination, 50)
    stack.servers.kill_postgres()
    stack.servers.start_postgres()
    back_at = time.monotonic()
    delivery_id = await producer.insist(destination)
    await stack.reached(delivery_id, "delivered")
    seconds = time.monotonic() - back_at
    print(f"a new delivery was accepted and delivered {seconds:.1f} s after Postgres was back")
    assert seconds < FLOWS_AGAIN_WITHIN_SECONDS
    await stack.judged()


async def test_a_commit_whose_hint_was_lost_is_delivered_within_3_seconds(stack: Stack) -> None:
    await stack.start("worker", "dispatcher", **AS_THEY_COME)
    await stack.start("api", **AS_THEY_COME, REDIS_URL="redis://127.0.0.1:1/0")
    destination = await stack.destination("/hook")
    accepted_at = time.monotonic()
    await stack.producer().accepted(destination)
    await stack.receiver.wait_for("/hook", 1)
    seconds = time.monotonic() - accepted_at
    print(f"a delivery without a hint arrived {seconds:.1f} s after it was accepted")
    assert seconds < UNHINTED_WITHIN_SECONDS
    await stack.judged()
