"""Each row of "Zombies, duplicates": who comes late or twice changes nothing that was settled without it."""

from __future__ import annotations

import asyncio
import hashlib
import signal
import time
import uuid
from dataclasses import replace
from typing import Any

import pytest

from service import bootstrap
from service.domain.ids import Prefix, parse_typeid, to_typeid
from service.ledger import attempting
from service.ledger.session import open_ledger
from service.queue.arq_queue import ArqQueue
from service.telemetry import events
from tests.faults.client import Connection, new_key
from tests.faults.crash_points import Crash, Deed, Point
from tests.faults.harness import STALE_SECONDS, Stack, assert_accepted, until
from tests.faults.history import judge
from tests.faults.receiver import HELD
from tests.faults.records import Asked

pytestmark = [pytest.mark.slow]

# The lease is one second and the margin: over before the zombie goes on.
SHORT_LEASE = b'"timeout_seconds":1,"retry":{"base_seconds":0.1}'
RACERS = 20


def number_of(delivery_id: str) -> uuid.UUID:
    number = parse_typeid(Prefix.DELIVERY, delivery_id)
    assert number is not None
    return number


def outcomes(view: dict[str, Any]) -> list[str]:
    return [attempt["outcome"] for attempt in view["attempts"]]


async def zombie_goes_on_after_its_lease(stack: Stack, point: Point) -> None:
    """Stop a worker at a point until another worker has delivered and its own lease is over; let it go on."""
    stack.receiver.witness = stack.witness
    await stack.start("api", "dispatcher")
    zombie = stack.launch("worker", crash=Crash(point, deed=Deed.STOP))
    delivery_id = await stack.producer().accepted(await stack.destination("/hook", SHORT_LEASE))
    await zombie.stopped()
    [row] = await stack.fetch("SELECT lease_until FROM deliveries")
    await stack.start("worker")
    await stack.reached(delivery_id, "delivered")

    async def lease_is_over() -> bool:
        [now] = await stack.fetch("SELECT now() > $1 AS over", row["lease_until"])
        return bool(now["over"])

    await until(lease_is_over, "the end of the zombie's lease")
    zombie.signal(signal.SIGCONT)
    await until(lambda: zombie.said(events.ATTEMPT_FENCED), f"the zombie's word that it was fenced ({zombie.log})")
    view = await stack.view(delivery_id)
    assert outcomes(view) == ["unknown", "success"]
    assert view["attempts"][0]["late_result"]["outcome"] == "not_sent", "the zombie sent"
    history = await stack.judged()
    assert [arrival.attempt for arrival in history.arrivals] == [2]


async def test_a_worker_paused_after_its_claim_does_not_send_once_its_lease_is_over(stack: Stack) -> None:
    """SIGSTOP after claim and before send, longer than the lease: before the sender is asked."""
    await zombie_goes_on_after_its_lease(stack, Point.WORKER_AFTER_CLAIM)


async def test_a_worker_paused_before_it_connects_does_not_send_once_its_lease_is_over(stack: Stack) -> None:
    """SIGSTOP after claim and before send, longer than the lease: the claim was young when it was looked at."""
    await zombie_goes_on_after_its_lease(stack, Point.WORKER_BEFORE_CONNECT)


async def test_one_delivery_hinted_twenty_times_to_two_workers_is_sent_once(stack: Stack) -> None:
    """One job consumed by two workers."""
    await stack.start("api", "dispatcher")
    delivery_ids = await stack.producer(connections_count=4).many(await stack.destination("/hook"), 10)
    queue = ArqQueue(stack.servers.redis_url)
    for _ in range(20):
        await queue.hint([number_of(delivery_id) for delivery_id in delivery_ids])
    await queue.close()
    await stack.start("worker", "worker")
    history = await stack.judged()
    assert len(history.arrivals) == 10
    assert {delivery.attempt_count for delivery in history.deliveries} == {1}


async def test_of_twenty_workers_that_race_for_one_row_one_claims_it(stack: Stack) -> None:
    """20 workers race for one row: as many connections, each of a worker of its own name."""
    await stack.start("api")
    delivery_id = await stack.producer().accepted(await stack.destination("/hook", SHORT_LEASE))
    ledgers = [
        open_ledger(
            stack.database_url,
            connections_max=1,
            acquire_timeout_seconds=10,
            statement_timeout_seconds=10,
            name=f"racer-{number}",
        )
        for number in range(RACERS)
    ]
    for ledger in ledgers:
        await attempting.claim(ledger, [], worker="nobody", lease_margin_seconds=5)  # connects
    claims = await asyncio.gather(
        *(
            attempting.claim(ledger, [number_of(delivery_id)], worker=f"racer-{number}", lease_margin_seconds=5)
            for number, ledger in enumerate(ledgers)
        )
    )
    await asyncio.gather(*(ledger.close() for ledger in ledgers))
    assert sorted(len(claimed) for claimed in claims) == [0] * (RACERS - 1) + [1]
    await stack.start("worker", "dispatcher")  # the winner is no process, so its claim is rescued
    assert outcomes(await stack.reached(delivery_id, "delivered")) == ["unknown", "success"]
    await stack.judged()


async def test_an_answer_one_second_before_the_deadline_is_one_request_however_often_the_dispatcher_looks(
    stack: Stack,
) -> None:
    """The total deadline is longer than heartbeats last, and the dispatcher passes ten times a second."""
    deadline_seconds = STALE_SECONDS + 3
    await stack.start("api", "worker", "dispatcher", "dispatcher")
    stack.receiver.scripts["/slow"] = [HELD]
    destination = await stack.destination("/slow", b'"timeout_seconds":%g' % deadline_seconds)
    delivery_id = await stack.producer().accepted(destination)
    await stack.receiver.wait_for("/slow", 1)
    asked_at = time.monotonic()
    await until(lambda: time.monotonic() - asked_at > deadline_seconds - 1, "a second before the deadline")
    stack.receiver.release()
    assert outcomes(await stack.reached(delivery_id, "delivered")) == ["success"]
    history = await stack.judged()
    assert len(history.arrivals) == 1


async def test_one_key_of_two_tenants_is_a_delivery_of_each(stack: Stack) -> None:
    """One Idempotency-Key from another tenant is independent."""
    await stack.start("api", "worker", "dispatcher")
    other = stack.connect(api_key=await key_of_tenant(stack, "other"))
    key = new_key()
    mine = await stack.producer().post(await stack.destination("/mine"), key=key)
    destination = await stack.destination("/theirs", over=other)
    answers = [await post(stack, other, destination.id, key) for _ in range(2)]
    assert [mine.status, *answers] == [202, 202, 200]
    assert (await other.request("GET", f"/deliveries/{mine.json['id']}")).status == 404
    await stack.drained()
    history = await stack.history()
    assert len(history.arrivals) == 2
    # One by one: an event's name is a tenant's own, and a receiver's log does not tell tenants apart.
    for tenant in ("default", "other"):
        [delivery] = [each for each in history.deliveries if each.tenant == tenant]
        of_tenant = replace(
            history,
            asked=tuple(asked for asked in history.asked if asked.tenant == tenant),
            seen=(),
            arrivals=tuple(arrival for arrival in history.arrivals if arrival.delivery_id == delivery.id),
            deliveries=(delivery,),
        )
        assert_accepted(judge(of_tenant))


async def key_of_tenant(stack: Stack, tenant: str) -> str:
    key_id, secret = bootstrap.IdSource()(), "s" * 48
    await stack.fetch(
        "INSERT INTO api_keys (id, tenant, name, secret_sha256) VALUES ($1, $2, 'faults', $3)",
        key_id,
        tenant,
        hashlib.sha256(secret.encode()).digest(),
    )
    return f"hlk_{to_typeid(Prefix.KEY, key_id).removeprefix(Prefix.KEY)}_{secret}"


async def post(stack: Stack, connection: Connection, destination_id: str, key: str) -> int:
    body = b'{"destination_id":"%s","payload":1}' % destination_id.encode()
    answer = await connection.request("POST", "/deliveries", body, key)
    sha256 = hashlib.sha256(b"1").hexdigest()
    stack.asked.append(Asked(key, destination_id, sha256, answer.status, answer.json["id"], "other"))
    return answer.status
