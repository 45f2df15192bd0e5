"""The deliver story: claim → send → classify → decide → settle."""

from __future__ import annotations

import asyncio
import uuid

import pytest

from service.domain import signing
from service.domain.ids import Prefix, to_typeid
from service.domain.outcome import Exchange, Fault, Phase
from service.ledger import attempting
from service.ledger.session import open_ledger
from service.ports import OutboundRequest
from tests.world import SIGNALS_WITHIN_SECONDS, TENANT, World, answered, lost, unsent


async def test_a_delivery_is_sent_once_with_its_bytes_and_settled(world: World) -> None:
    destination = await world.destination()
    delivery_id = await world.accepted(destination.id, body=b'{"z":[1e2, -0.0]}', event_type="order.paid")
    await world.work()
    [request] = world.sender.requests
    assert request.body == b'{"z":[1e2, -0.0]}'
    row = await world.view(delivery_id)
    assert (row["state"], row["attempt_count"], row["last_status_code"]) == ("delivered", 1, 200)
    [attempt] = await world.attempts(delivery_id)
    assert (attempt["number"], attempt["outcome"], attempt["phase"]) == (1, "success", "responded")
    assert attempt["response_excerpt"] == b"said"


async def test_the_request_carries_the_headers_a_receiver_gets(world: World) -> None:
    created = await world.destinations.create(
        TENANT, "k", {"name": "n", "url": "https://r.example/", "headers": {"X-Trace": "destination", "x-d": "1"}}, None
    )
    delivery_id = await world.accepted(
        created.destination.id, key="key-of-event", event_type="t", headers={"x-trace": "delivery"}
    )
    await world.work()
    headers = dict(world.sender.requests[0].headers)
    webhook_id = to_typeid(Prefix.DELIVERY, delivery_id)
    key = signing.parse_secret(created.secret or "")
    assert key is not None
    timestamp = int(world.clock.now().timestamp())
    assert headers == {
        "x-trace": "delivery",
        "x-d": "1",
        "content-type": "application/json",
        "user-agent": headers["user-agent"],
        "webhook-id": webhook_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": signing.sign(webhook_id, timestamp, b'{"n":1.0}', [key]),
        "idempotency-key": webhook_id,
        "hookledger-event-id": "key-of-event",
        "hookledger-event-type": "t",
        "hookledger-attempt": "1",
    }


async def test_503_twice_then_200_is_three_attempts_under_one_id_with_rising_delays(world: World) -> None:
    destination = await world.destination()
    world.sender.script = [answered(503), answered(503), answered(200)]
    delivery_id = await world.accepted(destination.id)
    await world.work()
    delays = []
    for _ in range(2):
        row = await world.view(delivery_id)
        attempt = (await world.attempts(delivery_id))[-1]
        delays.append((row["next_attempt_at"] - attempt["attempt_completed_at"]).total_seconds())
        await world.let_pass(delays[-1] + 1)
        await world.dispatch()
        await world.work()
    assert (await world.view(delivery_id))["state"] == "delivered"
    assert [attempt["number"] for attempt in await world.attempts(delivery_id)] == [1, 2, 3]
    assert len({dict(request.headers)["webhook-id"] for request in world.sender.requests}) == 1
    assert len({request.body for request in world.sender.requests}) == 1
    assert delays[0] < delays[1]


async def test_nothing_is_sent_before_its_time_however_often_it_is_hinted(world: World) -> None:
    destination = await world.destination()
    world.sender.script = [answered(503)]
    delivery_id = await world.accepted(destination.id)
    await world.work()
    for _ in range(3):
        await world.deliverer.deliver([delivery_id])
    assert len(world.sender.requests) == 1


@pytest.mark.parametrize(
    ("exchange", "reason"),
    [(answered(404), "rejected"), (answered(410), "gone"), (unsent(Fault.BLOCKED), "blocked")],
)
async def test_what_no_retry_can_mend_is_dead_at_once(world: World, exchange: Exchange, reason: str) -> None:
    destination = await world.destination()
    world.sender.script = [exchange]
    delivery_id = await world.accepted(destination.id)
    await world.work()
    row = await world.view(delivery_id)
    assert (row["state"], row["dead_reason"], row["attempt_count"]) == ("dead", reason, 1)


async def test_a_rule_that_calls_a_status_gone_is_named_as_the_reason(world: World) -> None:
    destination = await world.destination(response_rules={"404": "gone"})
    world.sender.script = [answered(404)]
    await world.accepted(destination.id)
    await world.work()
    found = await world.destinations.find(TENANT, destination.id)
    assert found is not None
    assert found.disabled_reason == "the receiver answered 404, which its response_rules call gone"


async def test_410_disables_the_destination_and_what_waits_for_it_dies_clearly(world: World) -> None:
    destination = await world.destination()
    waiting_id = await world.accepted(destination.id, delay_seconds=60.0)
    world.sender.script = [answered(410)]
    await world.accepted(destination.id)
    await world.work()
    found = await world.destinations.find(TENANT, destination.id)
    assert found is not None
    assert (found.state, found.disabled_reason) == ("disabled", "the receiver answered 410 Gone")
    await world.let_pass(61)
    await world.dispatch()
    assert (await world.view(waiting_id))["dead_reason"] == "disabled"
    assert [row["action"] for row in await world.fetch("SELECT action FROM audit_log ORDER BY id")][-1] == (
        "destination.disable"
    )


async def test_the_budget_ends_in_the_dead_letter_queue(world: World) -> None:
    destination = await world.destination(attempts_max=2)
    world.sender.script = [answered(500)]
    delivery_id = await world.accepted(destination.id)
    await world.work()
    await world.let_pass(60)
    await world.deliverer.deliver([delivery_id])
    row = await world.view(delivery_id)
    assert (row["state"], row["dead_reason"], row["attempt_count"]) == ("dead", "exhausted", 2)
    assert row["last_error"] == "HTTP 500"


async def test_an_unknown_outcome_is_said_to_be_unknown_and_stays_on_the_dead(world: World) -> None:
    destination = await world.destination(attempts_max=2)
    world.sender.script = [lost(), unsent()]
    delivery_id = await world.accepted(destination.id)
    await world.work()
    assert (await world.view(delivery_id))["last_outcome"] == "unknown"
    await world.let_pass(60)
    await world.deliverer.deliver([delivery_id])
    row = await world.view(delivery_id)
    assert (row["state"], row["may_have_been_delivered"]) == ("dead", True)


async def test_an_unknown_outcome_is_held_where_the_destination_says_so(world: World) -> None:
    destination = await world.destination(on_ambiguous="hold")
    world.sender.script = [lost()]
    delivery_id = await world.accepted(destination.id)
    await world.work()
    await world.let_pass(3600)
    await world.dispatch()
    assert (await world.view(delivery_id))["state"] == "ambiguous"
    assert world.queue.take_all() == []


async def test_twenty_workers_race_for_one_delivery_and_one_sends(world: World) -> None:
    destination = await world.destination()
    delivery_id = await world.accepted(destination.id)
    await asyncio.gather(*(world.make_deliverer(f"w{n}").deliver([delivery_id]) for n in range(20)))
    assert len(world.sender.requests) == 1
    assert (await world.view(delivery_id))["attempt_count"] == 1


async def test_the_intent_is_committed_before_the_first_byte(world: World, database_url: str) -> None:
    destination = await world.destination()
    delivery_id = await world.accepted(destination.id)
    seen: list[tuple[str, int]] = []

    async def look(_: OutboundRequest) -> None:
        onlooker = open_ledger(
            database_url,
            connections_max=1,
            acquire_timeout_seconds=5.0,
            statement_timeout_seconds=5.0,
            name="onlooker",
        )
        row = await World(onlooker).view(delivery_id)
        seen.append((row["state"], row["attempt_count"]))
        await onlooker.close()

    world.sender.on_send = look
    await world.work()
    assert seen == [("delivering", 1)]


async def test_no_ledger_connection_is_held_while_requests_are_under_way(world: World) -> None:
    destination = await world.destination()
    for _ in range(20):
        await world.accepted(destination.id)
    world.sender.released.clear()
    working = asyncio.create_task(world.work())
    await asyncio.wait_for(world.sender.hanging.wait(), SIGNALS_WITHIN_SECONDS)
    held = await world.fetch(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in trans%'"
    )
    world.sender.released.set()
    await working
    assert held[0]["count"] == 0


async def test_a_hint_cancelled_during_its_claim_does_not_lose_the_claim(world: World) -> None:
    destination = await world.destination()
    delivery_id = await world.accepted(destination.id)
    real_claim = attempting.claim
    claimed = asyncio.Event()

    async def claim_and_say_so(*args: object, **kwargs: object) -> object:
        claims = await real_claim(*args, **kwargs)  # type: ignore[arg-type]
        claimed.set()
        await asyncio.sleep(0)
        return claims

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attempting, "claim", claim_and_say_so)
        hint = asyncio.create_task(world.deliverer.deliver([delivery_id]))
        await asyncio.wait_for(claimed.wait(), SIGNALS_WITHIN_SECONDS)
        hint.cancel()  # what a lost Redis does to every job
        await asyncio.gather(hint, return_exceptions=True)
        await world.sender.wait_for_requests(1)
    await world.deliverer.stop(SIGNALS_WITHIN_SECONDS)
    assert (await world.view(delivery_id))["state"] == "delivered"


async def test_a_worker_with_two_slots_sends_two_at_a_time_and_claims_no_more(world: World) -> None:
    destination = await world.destination()
    ids = [await world.accepted(destination.id) for _ in range(3)]
    world.sender.released.clear()
    deliverer = world.make_deliverer("w", slots_count=2)
    working = asyncio.create_task(deliverer.deliver(ids))
    await asyncio.wait_for(world.sender.hanging.wait(), SIGNALS_WITHIN_SECONDS)
    await world.sender.wait_for_requests(2)
    assert sorted([(await world.view(delivery_id))["state"] for delivery_id in ids]) == [
        "delivering",
        "delivering",
        "pending",
    ]
    world.sender.released.set()
    await working
    # The third found no slot within the patience; the dispatcher's next hint brings it back.
    await world.deliverer.deliver(ids)
    assert {(await world.view(delivery_id))["state"] for delivery_id in ids} == {"delivered"}


async def test_an_attempt_that_was_released_does_not_lengthen_the_next_wait(world: World) -> None:
    destination = await world.destination(base_seconds=100.0)
    world.sender.script = [unsent(Fault.SHUTDOWN), unsent(Fault.SHUTDOWN), answered(503)]
    delivery_id = await world.accepted(destination.id)
    for _ in range(3):
        await world.work()
        await world.let_pass(60)
        await world.dispatch()
    row = await world.view(delivery_id)
    wait = row["next_attempt_at"] - (await world.attempts(delivery_id))[-1]["attempt_completed_at"]
    assert row["attempt_count"] == 3
    assert wait.total_seconds() + 60 == pytest.approx(75.0, abs=1.0)


async def test_a_secret_that_no_key_opens_charges_nobody(world: World) -> None:
    destination = await world.destination()
    delivery_id = await world.accepted(destination.id)
    await world.execute("UPDATE destination_secrets SET ciphertext = 'other:0123456789abcdef'")
    await world.work()
    row = await world.view(delivery_id)
    assert world.sender.requests == []
    assert (row["state"], row["attempts_max"], row["last_outcome"]) == ("pending", 19, "not_sent")


async def test_an_error_text_postgres_cannot_hold_does_not_lose_the_outcome(world: World) -> None:
    destination = await world.destination()
    delivery_id = await world.accepted(destination.id)
    world.sender.script = [Exchange(Phase.RESPONDED, 1, 200, error="odd \x00 \ud800 text", excerpt=b"\x00\xff")]
    await world.work()
    [attempt] = await world.attempts(delivery_id)
    assert (attempt["outcome"], attempt["response_excerpt"]) == ("success", b"\x00\xff")


async def test_unknown_ids_in_a_hint_are_no_ones_work(world: World) -> None:
    await world.deliverer.deliver([uuid.UUID(int=1), world.new_id()])
    assert world.sender.requests == []
