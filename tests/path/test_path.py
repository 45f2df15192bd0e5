"""The whole path in real processes: POST a webhook, watch it arrive, redrive what did not, break things meanwhile."""

from __future__ import annotations

import asyncio
import datetime as dt
import itertools
import json
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
import redis.asyncio
from standardwebhooks import Webhook

from tests.embedded.running import Dev, running_dev
from tests.path.receiver import HANG, SIGNALS_WITHIN_SECONDS, ScriptedReceiver
from tests.servers import temporary_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.xdist_group("path")]

ODD_PAYLOAD = '{"b":1.0, "a":"é/😀", "z":[1e2, -0.0], "b":1.10}'.encode()

_keys = itertools.count(time.time_ns())


@pytest.fixture(scope="module")
def dev() -> Iterator[Dev]:
    """Everything on this machine, as `./run` starts it."""
    with temporary_folder() as folder, running_dev(folder, "--port", "0") as running:
        running.wait_until_ready()
        yield running


@pytest.fixture
async def receiver() -> AsyncIterator[ScriptedReceiver]:
    async with ScriptedReceiver() as listening:
        yield listening


class Client:
    """A producer and operator of the running service."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def destination(self, url: str, **values: Any) -> dict[str, Any]:
        created = await self.http.post("/destinations", json={"url": url, **values})
        assert created.status_code == 201, created.text
        answer: dict[str, Any] = created.json()
        return answer

    async def post(self, destination: dict[str, Any], payload: bytes = b"1") -> httpx.Response:
        body = b'{"destination_id":"%s","payload":%s}' % (destination["id"].encode(), payload)
        headers = {"idempotency-key": f"key-{next(_keys)}", "content-type": "application/json"}
        return await self.http.post("/deliveries", content=body, headers=headers)

    async def accepted(self, destination: dict[str, Any], payload: bytes = b"1") -> str:
        answer = await self.post(destination, payload)
        assert answer.status_code == 202, answer.text
        identity: str = answer.json()["id"]
        return identity

    async def view(self, identity: str) -> dict[str, Any]:
        answer: dict[str, Any] = (await self.http.get(f"/deliveries/{identity}")).json()
        return answer

    async def until(self, identity: str, state: str) -> dict[str, Any]:
        """Wait until a delivery is in the state, and return it."""
        view: dict[str, Any] = {}
        async with asyncio.timeout(SIGNALS_WITHIN_SECONDS):
            while view.get("state") != state:
                view = await self.view(identity)
        return view


@pytest.fixture
async def client(dev: Dev) -> AsyncIterator[Client]:
    ready = dev.ready
    headers = {"authorization": f"Bearer {ready['api_key']}"}
    async with httpx.AsyncClient(base_url=ready["api_url"], headers=headers, timeout=30) as http:
        await eventually(lambda: dev.status("/readyz") == 200)
        yield Client(http)


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SIGNALS_WITHIN_SECONDS):
        while not await asyncio.to_thread(condition):
            pass


async def test_a_webhook_arrives_with_its_exact_bytes_and_a_signature_that_others_verify(
    client: Client, receiver: ScriptedReceiver
) -> None:
    destination = await client.destination(receiver.url("/hook"))
    identity = await client.accepted(destination, ODD_PAYLOAD)
    view = await client.until(identity, "delivered")
    [arrival] = receiver.arrivals["/hook"]
    assert arrival.body == ODD_PAYLOAD
    Webhook(destination["secret"]).verify(arrival.body, arrival.headers)
    assert arrival.webhook_id == identity
    assert [(attempt["number"], attempt["outcome"]) for attempt in view["attempts"]] == [(1, "success")]


async def test_what_was_done_is_in_the_numbers_within_seconds(client: Client, receiver: ScriptedReceiver) -> None:
    before = (await client.http.get("/stats")).json()
    destination = await client.destination(receiver.url("/counted"))
    body = b'{"destination_id":"%s","event_id":"e","payload":1}' % destination["id"].encode()
    headers = {"idempotency-key": f"key-{next(_keys)}", "content-type": "application/json"}
    for status in (202, 200):
        assert (await client.http.post("/deliveries", content=body, headers=headers)).status_code == status
    paused = await client.destination(receiver.url("/paused"))
    await client.http.post(f"/destinations/{paused['id']}/pause")
    late = {"destination_id": paused["id"], "payload": 1, "deadline_seconds": 1}
    answer = await client.http.post("/deliveries", json=late, headers={"idempotency-key": f"key-{next(_keys)}"})
    await client.until(answer.json()["id"], "dead")
    # Counted by the API, a worker and the dispatcher, each of which writes by itself.
    async with asyncio.timeout(SIGNALS_WITHIN_SECONDS):
        while True:
            now = (await client.http.get("/stats")).json()
            if (
                now["duplicates_rejected_24h"] > before["duplicates_rejected_24h"]
                and now["attempts_by_outcome"]["success"] >= 1
                and now["rates"]["delivered_per_second"] > 0
                and now["rates"]["dead_per_second"] > 0
            ):
                break
    assert now["dead_by_reason"]["deadline"] == before["dead_by_reason"]["deadline"] + 1


async def test_503_twice_then_200_is_three_attempts_with_rising_delays(
    client: Client, receiver: ScriptedReceiver
) -> None:
    receiver.scripts["/flaky"] = ["503", "503", "200"]
    destination = await client.destination(receiver.url("/flaky"), retry={"base_seconds": 0.5})
    view = await client.until(await client.accepted(destination, ODD_PAYLOAD), "delivered")
    one, two, three = receiver.arrivals["/flaky"]
    assert {arrival.body for arrival in (one, two, three)} == {ODD_PAYLOAD}
    assert len({arrival.webhook_id for arrival in (one, two, three)}) == 1
    attempts = view["attempts"]
    delays = [
        dt.datetime.fromisoformat(later["scheduled_at"]) - dt.datetime.fromisoformat(earlier["completed_at"])
        for earlier, later in itertools.pairwise(attempts)
    ]
    assert delays[0] < delays[1]
    assert two.at - one.at >= delays[0].total_seconds()
    assert three.at - two.at >= delays[1].total_seconds()
    assert [attempt["outcome"] for attempt in view["attempts"]] == ["retryable", "retryable", "success"]


async def test_what_a_receiver_refused_is_redriven_under_the_same_id_once_it_is_mended_and_again(
    client: Client, receiver: ScriptedReceiver
) -> None:
    receiver.scripts["/broken"] = ["404", "404", "200"]
    destination = await client.destination(receiver.url("/broken"))
    identity = await client.accepted(destination, ODD_PAYLOAD)
    for round_number in (1, 2):
        await client.until(identity, "dead")
        [letter] = (await client.http.get("/dlq", params={"destination_id": destination["id"]})).json()["items"]
        assert (letter["delivery_id"], letter["reason"], letter["last_status_code"]) == (identity, "rejected", 404)
        request = {"delivery_ids": [identity], "reason": "mended"}
        dry = await client.http.post("/dlq/redrive", json={**request, "dry_run": True})
        assert (dry.status_code, dry.json()["selected"]) == (200, 1)
        assert (await client.http.post("/dlq/redrive", json=request)).status_code == 202
        await receiver.wait_for("/broken", round_number + 1)
    view = await client.until(identity, "delivered")
    assert {arrival.webhook_id for arrival in receiver.arrivals["/broken"]} == {identity}
    assert {arrival.body for arrival in receiver.arrivals["/broken"]} == {ODD_PAYLOAD}
    told = [(attempt["number"], attempt["trigger"], attempt["status_code"]) for attempt in view["attempts"]]
    assert told == [(1, "schedule", 404), (2, "redrive", 404), (3, "redrive", 200)]
    assert view["redrive_count"] == 2


async def test_a_worker_killed_during_a_request_leaves_an_unknown_attempt_and_the_delivery_is_made_again(
    client: Client, receiver: ScriptedReceiver, dev: Dev
) -> None:
    receiver.scripts["/hanging"] = [HANG, "200"]
    destination = await client.destination(receiver.url("/hanging"), retry={"base_seconds": 0.5})
    identity = await client.accepted(destination)
    await receiver.wait_for("/hanging", 1)
    killed_at = time.monotonic()
    os.kill(dev.ready["pids"]["worker"], signal.SIGKILL)
    view = await client.until(identity, "delivered")
    assert [(attempt["number"], attempt["outcome"]) for attempt in view["attempts"]] == [(1, "unknown"), (2, "success")]
    assert time.monotonic() - killed_at < 25


async def test_flushall_with_500_waiting_loses_none_and_sends_none_twice(
    client: Client, receiver: ScriptedReceiver, dev: Dev
) -> None:
    destination = await client.destination(receiver.url("/flushed"))
    await client.http.post(f"/destinations/{destination['id']}/pause")
    await asyncio.gather(*(client.accepted(destination) for _ in range(500)))
    await client.http.post(f"/destinations/{destination['id']}/resume")
    await flush(dev)
    await receiver.wait_for("/flushed", 500, distinct=True)
    assert len(receiver.arrivals["/flushed"]) == 500


async def flush(dev: Dev) -> None:
    async with redis.asyncio.Redis.from_url(dev.ready["redis_url"]) as connection:
        await connection.flushall()


async def test_a_redis_that_is_killed_costs_no_202_no_delivery_and_no_claim(
    client: Client, receiver: ScriptedReceiver, dev: Dev
) -> None:
    destination = await client.destination(receiver.url("/unhinted"))
    os.kill(dev.ready["pids"]["redis"], signal.SIGKILL)
    identities = await asyncio.gather(*(client.accepted(destination) for _ in range(100)))
    await receiver.wait_for("/unhinted", 100, distinct=True)
    views = [await client.until(identity, "delivered") for identity in identities]
    assert {tuple(attempt["outcome"] for attempt in view["attempts"]) for view in views} == {("success",)}


async def test_a_postgres_that_is_killed_costs_503s_with_retry_after_and_loses_nothing(
    client: Client, receiver: ScriptedReceiver, dev: Dev
) -> None:
    destination = await client.destination(receiver.url("/restarted"))
    former_pid = dev.ready["pids"]["postgres"]
    os.kill(former_pid, signal.SIGKILL)
    answers: list[httpx.Response] = []
    async with asyncio.timeout(SIGNALS_WITHIN_SECONDS):
        while [answer.status_code for answer in answers[-20:]] != [202] * 20 or not dev.restarted(
            "postgres", former_pid
        ):
            answers.append(await client.post(destination))
    statuses = Counter(answer.status_code for answer in answers)
    assert set(statuses) <= {202, 503}
    assert all("retry-after" in answer.headers for answer in answers if answer.status_code == 503)
    await receiver.wait_for("/restarted", statuses[202], distinct=True)


async def test_two_thousand_posts_from_32_connections_arrive_once_each(
    client: Client, receiver: ScriptedReceiver, dev: Dev
) -> None:
    destination = await client.destination(receiver.url("/many"))
    started_at = time.monotonic()
    identities = await asyncio.gather(*(produce(dev.ready, destination["id"], 2_000 // 32) for _ in range(32)))
    count = sum(map(len, identities))
    await receiver.wait_for("/many", count, distinct=True)
    seconds = time.monotonic() - started_at
    print(f"{count} accepted and delivered in {seconds:.1f} s")
    assert len(receiver.arrivals["/many"]) == count
    assert {arrival.webhook_id for arrival in receiver.arrivals["/many"]} == set(itertools.chain(*identities))
    assert seconds < 30  # 10 on two quiet cores; the machine that runs this may be neither


async def produce(ready: dict[str, Any], destination_id: str, count: int) -> list[str]:
    """One connection's requests, written by hand: httpx would be the slowest part of this."""
    host, port = ready["api_url"].removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    identities = []
    for _ in range(count):
        body = json.dumps({"destination_id": destination_id, "payload": {"x": "y" * 1000}}).encode()
        head = (
            f"POST /deliveries HTTP/1.1\r\nhost: test\r\nauthorization: Bearer {ready['api_key']}\r\n"
            f"idempotency-key: key-{next(_keys)}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        content = await reader.readexactly(int(answer.split("content-length: ")[1].split("\r\n")[0]))
        assert answer.startswith("http/1.1 202"), content
        identities.append(json.loads(content)["id"])
    writer.close()
    return identities


async def test_a_worker_that_is_told_to_stop_finishes_what_is_in_flight(
    client: Client, receiver: ScriptedReceiver, dev: Dev
) -> None:
    receiver.scripts["/slow"] = [HANG]
    destination = await client.destination(receiver.url("/slow"))
    identities = await asyncio.gather(*(client.accepted(destination) for _ in range(50)))
    await receiver.wait_for("/slow", 50)
    os.kill(dev.ready["pids"]["worker"], signal.SIGTERM)
    receiver.released.set()
    views = [await client.until(identity, "delivered") for identity in identities]
    assert {view["attempt_count"] for view in views} == {1}
    assert len(receiver.arrivals["/slow"]) == 50


async def test_a_worker_paused_beyond_its_lease_is_fenced_and_its_late_answer_kept(
    client: Client, receiver: ScriptedReceiver, dev: Dev
) -> None:
    receiver.scripts["/zombie"] = [HANG, "503", "200"]
    destination = await client.destination(receiver.url("/zombie"), retry={"base_seconds": 0.5}, timeout_seconds=60)
    identity = await client.accepted(destination)
    await receiver.wait_for("/zombie", 1)
    zombie = dev.ready["pids"]["worker"]
    os.kill(zombie, signal.SIGSTOP)
    try:
        async with asyncio.timeout(SIGNALS_WITHIN_SECONDS):
            while not (view := await client.view(identity))["attempts"][0]["completed_at"]:
                pass
    finally:
        os.kill(zombie, signal.SIGCONT)
    assert view["attempts"][0]["outcome"] == "unknown"
    receiver.released.set()
    view = await client.until(identity, "delivered")
    async with asyncio.timeout(SIGNALS_WITHIN_SECONDS):
        while (view := await client.view(identity))["attempts"][0]["late_result"] is None:
            pass
    assert view["attempts"][0]["outcome"] == "unknown"
    assert view["attempts"][0]["late_result"]["outcome"] == "success"
    assert [attempt["number"] for attempt in view["attempts"]] == list(range(1, view["attempt_count"] + 1))
