"""The wire cases as a whole worker meets them: what the ledger says after each answer, fault and clock."""

from __future__ import annotations

import asyncio
import datetime as dt
import socket
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import pytest

from service.deliver import Bounds, Deliverer
from service.domain.address import AllowList, EgressProxy, parse_proxy
from service.domain.limits import EXCERPT_BYTES_MAX
from service.domain.outcome import Fault
from service.egress.sender import HttpSender
from service.telemetry import events
from tests.wire.answers import BOTTOMLESS, FAULTS, RESPONDED
from tests.wire.receiver import Answer, Receiver, after_reading, close, hang, ok, reset, send
from tests.world import World, answered, captured_logs

PATIENT_SECONDS = 30.0  # a destination's timeout that no test runs into
HANGING_COUNT = 20

MakeWorker = Callable[..., Deliverer]


@pytest.fixture
async def make_worker(world: World) -> AsyncIterator[MakeWorker]:
    """Makes workers that really send, to this machine."""
    senders: list[HttpSender] = []

    def make(*, slots_count: int = 50, patience_seconds: float = 30.0, proxy: EgressProxy | None = None) -> Deliverer:
        senders.append(HttpSender(AllowList.parse("127.0.0.0/8:*"), proxy=proxy))
        bounds = Bounds(slots_count, lease_margin_seconds=15.0, patience_seconds=patience_seconds)
        return Deliverer(
            world.ledger,
            senders[-1],
            world.keyring,
            world.clock,
            bounds,
            world.tallies,
            worker="wired",
            jitter=lambda: 0.5,
        )

    yield make
    for sender in senders:
        await sender.close()


async def accepted(world: World, url: str, timeout_seconds: float = PATIENT_SECONDS, **values: object) -> uuid.UUID:
    """One delivery for a destination of its own."""
    destination = await world.destination(url=url, timeout_seconds=timeout_seconds, **values)
    return await world.accepted(destination.id)


async def played(
    world: World, worker: Deliverer, answers: dict[str, Answer], timeout_seconds: float = PATIENT_SECONDS
) -> dict[str, uuid.UUID]:
    """One attempt at each of these receivers, all at once; every receiver sees one request."""
    async with AsyncExitStack() as stack:
        receivers = {name: await stack.enter_async_context(Receiver(answer)) for name, answer in answers.items()}
        ids = {name: await accepted(world, each.url, timeout_seconds) for name, each in receivers.items()}
        await worker.deliver(list(ids.values()))
        assert {name: len(each.requests) for name, each in receivers.items()} == dict.fromkeys(answers, 1)
    return ids


# Answers


async def test_every_answer_of_the_case_file_is_recorded_and_only_2xx_delivers(
    world: World, make_worker: MakeWorker
) -> None:
    """trunc, badchunk, badgzip, badhdr, odd, bytes, 5xx with a broken body: no answer breaks a constraint."""
    ids = await played(world, make_worker(), {name: send(row.answer) + close() for name, row in RESPONDED.items()})
    for name, row in RESPONDED.items():
        view = await world.view(ids[name])
        [attempt] = await world.attempts(ids[name])
        assert (view["state"] == "delivered") is (200 <= row.status_code <= 299), name
        assert view["state"] in ("delivered", "pending"), name
        assert (attempt["phase"], attempt["status_code"]) == ("responded", row.status_code), name
        assert bytes(attempt["response_excerpt"] or b"") == row.excerpt, name
        assert (row.note or "") in (attempt["error"] or ""), name


@pytest.mark.slow
async def test_every_fault_after_the_first_byte_is_unknown_and_tried_again_by_the_ledger(
    world: World, make_worker: MakeWorker
) -> None:
    """Reset, close, 100 then close, garbage, read timeout, hdrdrip, header drip: one request, and `unknown`."""
    broken = {name: answer for name, (answer, fault) in FAULTS.items() if fault is not Fault.TIMEOUT}
    silent = {name: answer for name, (answer, fault) in FAULTS.items() if fault is Fault.TIMEOUT}
    worker = make_worker()
    ids = await played(world, worker, broken) | await played(world, worker, silent, timeout_seconds=3.0)
    for name, delivery_id in ids.items():
        view = await world.view(delivery_id)
        [attempt] = await world.attempts(delivery_id)
        assert (view["state"], attempt["outcome"], attempt["phase"]) == ("pending", "unknown", "written"), name
        assert attempt["error"], name


async def test_a_bottomless_body_is_judged_by_its_status_and_its_excerpt_is_capped(
    world: World, make_worker: MakeWorker
) -> None:
    """bomb, endless, 10 GB Content-Length."""
    for name, delivery_id in (await played(world, make_worker(), BOTTOMLESS)).items():
        [attempt] = await world.attempts(delivery_id)
        assert (await world.view(delivery_id))["state"] == "delivered", name
        assert len(attempt["response_excerpt"] or b"") <= EXCERPT_BYTES_MAX, name
        assert attempt["error"], name


async def test_a_refused_connection_is_not_sent_and_tried_again(world: World, make_worker: MakeWorker) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    delivery_id = await accepted(world, f"http://127.0.0.1:{port}/")
    await make_worker().deliver([delivery_id])
    [attempt] = await world.attempts(delivery_id)
    assert ((await world.view(delivery_id))["state"], attempt["outcome"]) == ("pending", "not_sent")


async def test_a_redirect_is_recorded_with_its_status_and_host_and_is_not_delivered(
    world: World, make_worker: MakeWorker
) -> None:
    answers = {
        str(status): ok(b"", f"{status} Moved", "Location: https://other.example/a?token=secret")
        for status in (301, 302, 303, 307, 308)
    }
    for status, delivery_id in (await played(world, make_worker(), answers)).items():
        [attempt] = await world.attempts(delivery_id)
        assert (await world.view(delivery_id))["state"] == "pending"
        assert (attempt["outcome"], attempt["status_code"]) == ("redirect", int(status))
        assert "other.example" in attempt["error"]
        assert "secret" not in attempt["error"]


@pytest.mark.parametrize(
    ("status", "rule", "state"),
    [(404, "success", "delivered"), (409, "retryable", "pending"), (200, "rejected", "dead"), (500, "gone", "dead")],
)
async def test_a_destinations_response_rules_override_any_status(
    world: World, make_worker: MakeWorker, status: int, rule: str, state: str
) -> None:
    async with Receiver(ok(b"", f"{status} So")) as receiver:
        delivery_id = await accepted(world, receiver.url, response_rules={str(status): rule})
        await make_worker().deliver([delivery_id])
    [attempt] = await world.attempts(delivery_id)
    assert ((await world.view(delivery_id))["state"], attempt["outcome"]) == (state, rule)


async def test_race_an_idle_connection_that_ends_under_a_request_costs_one_retry_under_the_same_id(
    world: World, make_worker: MakeWorker
) -> None:
    async with Receiver(ok() + after_reading(1) + reset(), ok()) as receiver:
        destination = await world.destination(url=receiver.url, timeout_seconds=PATIENT_SECONDS)
        worker = make_worker()
        first, second = [await world.accepted(destination.id) for _ in range(2)]
        await worker.deliver([first])
        await worker.deliver([second])
        view = await world.view(second)
        assert (view["state"], view["last_outcome"]) == ("pending", "unknown")
        await world.let_pass(10)
        await worker.deliver([second])
        assert (await world.view(second))["state"] == "delivered"
        assert len({request.values("webhook-id")[0] for request in receiver.requests}) == 2
        assert receiver.wires[0].raw.count(b"POST ") == 2, "the second was written once on the connection that ended"


ODD_RETRY_AFTERS = (
    *(b"0", b"-1", b"9999999999", b"9" * 15, b"9" * 5_000, b"1.5", b"1e3", b"1e300", b"inf", b"nan", b"\xb2", b""),
    *(b"\xd9\xa3", b"1_000", b"soon", b"\xff", b"Sun, 06 Nov 1994 08:49:37 GMT", b"Sunday, 06-Nov-94 08:49:37 GMT"),
    *(b"Sun Nov  6 08:49:37 1994", b"Sun, 06 Nov 2094 08:49:37 -0000", b"Mon, 01 Jan 99999 00:00:00 GMT"),
    b"1\r\nRetry-After: 2",
)


async def test_every_odd_retry_after_is_recorded_and_starts_no_hot_loop(world: World, make_worker: MakeWorker) -> None:
    """`0`, `-1`, a past date, `9999999999` and its kin: own backoff or capped, and never an exception."""
    answers = {
        ascii(value)[:40]: send(b"HTTP/1.1 429 No\r\nRetry-After: " + value + b"\r\nContent-Length: 0\r\n\r\n")
        for value in ODD_RETRY_AFTERS
    }
    ids = await played(world, make_worker(), answers)
    rows = await world.fetch(
        "SELECT id, state, last_outcome, next_attempt_at - now() AS wait FROM deliveries WHERE attempt_count = 1"
    )
    assert {row["id"] for row in rows} == set(ids.values())
    for row in rows:
        assert (row["state"], row["last_outcome"]) == ("pending", "throttled")
        assert dt.timedelta(0) < row["wait"] <= dt.timedelta(days=1.1)


# Slots


@pytest.mark.slow
async def test_20_hanging_receivers_leak_no_slot_and_the_wait_for_one_is_charged_to_nobody(
    world: World, make_worker: MakeWorker, record_property: Callable[[str, object], None]
) -> None:
    """The leaked-slot row, with a worker of 20 slots: while all hang a healthy delivery waits unclaimed, and is
    delivered as soon as they time out together."""
    loop = asyncio.get_running_loop()
    async with Receiver(hang()) as hanging, Receiver() as healthy:
        stuck = [await accepted(world, hanging.url, 3.0) for _ in range(HANGING_COUNT)]
        waiting = await accepted(world, healthy.url)
        worker = make_worker(slots_count=HANGING_COUNT)
        began = loop.time()
        hung = asyncio.create_task(worker.deliver(stuck))
        await hanging.wait_for_requests(HANGING_COUNT)
        served = asyncio.create_task(worker.deliver([waiting]))
        await hung
        hung_seconds = loop.time() - began
        await served
        served_seconds = loop.time() - began - hung_seconds
        after = await accepted(world, healthy.url)
        await worker.deliver([after])
    figures = {"hung_seconds": round(hung_seconds, 3), "served_after_seconds": round(max(served_seconds, 0.0), 3)}
    print(f"{HANGING_COUNT} hanging receivers, deadline 3 s: {figures}")
    for name, figure in figures.items():
        record_property(name, figure)
    assert worker.in_flight_count == 0
    for delivery_id in (waiting, after):
        [attempt] = await world.attempts(delivery_id)
        assert (attempt["number"], attempt["outcome"]) == (1, "success")
        assert attempt["latency_ms"] < 2_000, "of the request alone: waiting for a slot is not in it"
    for delivery_id in stuck:
        [attempt] = await world.attempts(delivery_id)
        assert attempt["outcome"] == "unknown"
        assert 2_990 <= attempt["latency_ms"] <= 4_000


# The egress proxy


async def test_a_proxy_that_is_down_charges_no_delivery_and_is_named_in_a_warning(
    world: World, make_worker: MakeWorker
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    worker = make_worker(proxy=parse_proxy(f"http://herodotus:very-secret@127.0.0.1:{port}"))
    delivery_id = await accepted(world, "http://93.184.215.14/hook?token=secret", attempts_max=1)
    with captured_logs() as lines:
        await worker.deliver([delivery_id])
    [row] = await world.fetch("SELECT *, next_attempt_at - now() AS wait FROM deliveries")
    [attempt] = await world.attempts(delivery_id)
    assert (row["state"], row["attempts_max"], row["last_outcome"]) == ("pending", 2, "not_sent")
    assert row["wait"] > dt.timedelta(seconds=20)
    assert attempt["error"].startswith("the egress proxy cannot be reached")
    [line] = [line for line in lines if line["event"] == events.ATTEMPT_SETTLED]
    assert (line["log_level"], line["error"]) == ("warning", attempt["error"])
    assert "secret" not in str(lines) + str([dict(row), dict(attempt)])


# Time


@pytest.mark.parametrize("off", [dt.timedelta(hours=1), dt.timedelta(hours=-1)], ids=["fast", "slow"])
async def test_a_worker_whose_clock_is_an_hour_off_is_neither_early_nor_late_nor_claims_twice(
    world: World, off: dt.timedelta
) -> None:
    """Due times and leases are the database's; of the worker's own clock only the signature's timestamp is."""
    world.clock.instant = dt.datetime.now(dt.UTC) + off
    destination = await world.destination(timeout_seconds=10.0)
    delivery_id = await world.accepted(destination.id, delay_seconds=60.0)
    await world.deliverer.deliver([delivery_id])
    await world.dispatch()
    assert world.sender.requests == [], "not early"
    await world.let_pass(61)
    world.sender.script = [answered(503), answered(200)]

    async def claim_again(_: object) -> None:
        [row] = await world.fetch("SELECT lease_until - now() AS lease FROM deliveries")
        assert dt.timedelta(seconds=20) < row["lease"] <= dt.timedelta(seconds=25)
        await world.dispatch()  # rescues nothing
        await world.make_deliverer("worker-2").deliver([delivery_id])

    world.sender.on_send = claim_again
    await world.deliverer.deliver([delivery_id])
    assert len(world.sender.requests) == 1, "not claimed twice"
    [row] = await world.fetch("SELECT state, next_attempt_at - now() AS wait FROM deliveries")
    assert row["state"] == "pending"
    assert dt.timedelta(0) < row["wait"] <= dt.timedelta(seconds=5)
    await world.let_pass(5)
    world.sender.on_send = None
    await world.deliverer.deliver([delivery_id])
    assert (await world.view(delivery_id))["state"] == "delivered"
    signed_at = int(dict(world.sender.requests[0].headers)["webhook-timestamp"])
    assert signed_at == int(world.clock.instant.timestamp())
