"""The accept story: the identity table, the shared batch, and what a 202 leaves in the ledger."""

from __future__ import annotations

import asyncio
import datetime as dt
import hashlib
import uuid

import msgspec
import pytest

from service.accept import (
    Accepted,
    DisabledDestination,
    Duplicate,
    EventConflict,
    KeyMismatch,
    Replayed,
    UnknownDestination,
)
from service.ledger import destinations
from service.ledger.audit import Deed
from tests.world import TENANT, World


async def test_a_new_request_is_committed_and_then_hinted(world: World) -> None:
    destination = await world.destination()
    answer = await world.accept(destination.id, body=b'{"b":1.0, "a":"\xc3\xa9/"}')
    assert isinstance(answer, Accepted)
    row = await world.view(answer.row.id)
    assert (row["state"], row["attempt_count"]) == ("pending", 0)
    stored = await world.fetch("SELECT body FROM payloads WHERE delivery_id = :id", {"id": answer.row.id})
    assert stored[0]["body"] == b'{"b":1.0, "a":"\xc3\xa9/"}'
    await world.hints.drain()
    assert world.queue.take_all() == [answer.row.id]


async def test_the_same_key_and_request_is_a_replay(world: World) -> None:
    destination = await world.destination()
    first = world.request(destination.id, key="k")
    again = msgspec.structs.replace(first, id=world.new_id())
    assert isinstance(await world.intake.accept(first), Accepted)
    assert await world.intake.accept(again) == Replayed(first.id)


async def test_the_same_key_for_another_request_is_a_mismatch(world: World) -> None:
    destination = await world.destination()
    await world.accept(destination.id, key="k", body=b"1")
    assert await world.accept(destination.id, key="k", body=b"2") == KeyMismatch()


async def test_another_key_for_the_same_event_is_a_duplicate_and_later_a_replay_of_itself(world: World) -> None:
    destination = await world.destination()
    first_id = await world.accepted(destination.id, event_id="e")
    other = world.request(destination.id, event_id="e")
    assert await world.intake.accept(other) == Duplicate(first_id)
    assert await world.intake.accept(msgspec.structs.replace(other, id=world.new_id())) == Replayed(first_id)


async def test_the_same_event_with_another_payload_is_a_conflict_however_often_it_is_sent(world: World) -> None:
    destination = await world.destination()
    first_id = await world.accepted(destination.id, event_id="e", body=b"1")
    other = world.request(destination.id, event_id="e", body=b"2")
    assert await world.intake.accept(other) == EventConflict(first_id)
    assert await world.intake.accept(msgspec.structs.replace(other, id=world.new_id())) == EventConflict(first_id)


async def test_the_same_event_at_two_destinations_is_two_deliveries(world: World) -> None:
    one, two = await world.destination(), await world.destination()
    assert isinstance(await world.accept(one.id, event_id="e"), Accepted)
    assert isinstance(await world.accept(two.id, event_id="e"), Accepted)


async def test_one_key_a_hundred_times_at_once_over_two_processes_is_one_delivery(world: World) -> None:
    destination = await world.destination()
    other_process = World(world.ledger)
    request = world.request(destination.id, key="k")
    answers = await asyncio.gather(
        *(
            (world if number % 2 else other_process).intake.accept(msgspec.structs.replace(request, id=world.new_id()))
            for number in range(100)
        )
    )
    accepted = [answer for answer in answers if isinstance(answer, Accepted)]
    assert len(accepted) == 1
    assert all(answer in (accepted[0], Replayed(accepted[0].row.id)) for answer in answers)
    assert (await world.fetch("SELECT count(*) FROM deliveries"))[0]["count"] == 1


async def test_two_processes_with_the_same_events_in_opposite_order_do_not_deadlock(world: World) -> None:
    destination = await world.destination()
    other_process = World(world.ledger)
    forth = [world.request(destination.id, key=f"a{n:03}", event_id=f"e{n:03}") for n in range(100)]
    back = [world.request(destination.id, key=f"b{n:03}", event_id=f"e{n:03}") for n in reversed(range(100))]
    answers = await asyncio.gather(
        *(world.intake.accept(request) for request in forth),
        *(other_process.intake.accept(request) for request in back),
    )
    assert sum(isinstance(answer, Accepted) for answer in answers) == 100
    assert sum(isinstance(answer, Duplicate) for answer in answers) == 100


async def test_the_same_key_of_another_tenant_is_independent(world: World) -> None:
    destination = await world.destination()
    other = await world.destinations.create("other", "key_x", {"name": "n", "url": "https://o.example/"}, None)
    assert isinstance(await world.accept(destination.id, key="k"), Accepted)
    assert isinstance(await world.accept(other.destination.id, key="k", tenant="other"), Accepted)


async def test_another_tenants_destination_is_unknown_and_uses_up_no_key(world: World) -> None:
    other = await world.destinations.create("other", "key_x", {"name": "n", "url": "https://o.example/"}, None)
    mine = await world.destination()
    assert await world.accept(other.destination.id, key="k") == UnknownDestination()
    assert await world.accept(uuid.UUID(int=7), key="k") == UnknownDestination()
    assert isinstance(await world.accept(mine.id, key="k"), Accepted)


async def test_a_disabled_destination_takes_nothing_and_a_paused_one_waits_unhinted(world: World) -> None:
    disabled, paused = await world.destination(), await world.destination()
    await destinations.disable(world.ledger, Deed(TENANT, "test", "d", "s", reason="gone"), disabled.id)
    await world.destinations.pause(TENANT, "test", paused.id)
    assert await world.accept(disabled.id) == DisabledDestination()
    answer = await world.accept(paused.id)
    assert isinstance(answer, Accepted)
    assert answer.row.paused
    await world.hints.drain()
    assert world.queue.take_all() == []


async def test_one_row_the_ledger_refuses_does_not_fail_its_strangers(world: World) -> None:
    destination = await world.destination()
    refused = world.request(destination.id, metadata={"a": "\x00"})  # jsonb holds no NUL
    strangers = [world.request(destination.id) for _ in range(5)]
    answers = await asyncio.gather(
        *(world.intake.accept(request) for request in [*strangers[:2], refused, *strangers[2:]]),
        return_exceptions=True,
    )
    assert [isinstance(answer, Accepted) for answer in answers] == [True, True, False, True, True, True]


async def test_a_delivery_for_later_is_neither_hinted_nor_claimable_before_its_time(world: World) -> None:
    destination = await world.destination()
    delivery_id = await world.accepted(destination.id, delay_seconds=3600.0)
    await world.work()
    await world.deliverer.deliver([delivery_id])
    await world.dispatch()
    assert world.queue.take_all() == []
    assert world.sender.requests == []
    await world.let_pass(3601)
    await world.dispatch()
    await world.work()
    assert (await world.view(delivery_id))["state"] == "delivered"


@pytest.mark.parametrize("due_at", [dt.datetime.min.replace(tzinfo=dt.UTC), dt.datetime(2020, 1, 1, tzinfo=dt.UTC)])
async def test_a_due_time_in_the_past_is_now_and_does_not_use_up_the_deadline(
    world: World, due_at: dt.datetime
) -> None:
    destination = await world.destination(deadline_seconds=600)
    delivery_id = await world.accepted(destination.id, due_at=due_at)
    row = await world.view(delivery_id)
    assert row["deadline_at"] - row["next_attempt_at"] == dt.timedelta(seconds=600)
    assert row["next_attempt_at"] == row["created_at"]
    await world.work()
    assert (await world.view(delivery_id))["state"] == "delivered"


async def test_a_queue_that_is_down_costs_no_202(world: World) -> None:
    destination = await world.destination()
    world.queue.up = False
    answer = await world.accept(destination.id)
    assert isinstance(answer, Accepted)
    await world.hints.drain()
    world.queue.up = True
    await world.let_pass(3)
    await world.dispatch()
    assert world.queue.take_all() == [answer.row.id]


async def test_the_payload_hash_in_the_ledger_is_that_of_the_bytes(world: World) -> None:
    destination = await world.destination()
    delivery_id = await world.accepted(destination.id, body=b"")
    assert (await world.view(delivery_id))["body_sha256"] == hashlib.sha256(b"").digest()
