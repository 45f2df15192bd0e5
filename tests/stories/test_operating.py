"""Cancel, retry now, discard: guarded by state and tenant, each with one record."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable

import pytest

from service import redrive
from service.domain.delivery import State
from service.domain.ids import Prefix, to_typeid
from service.ledger import attempting, operating
from service.ledger.audit import Deed
from service.ledger.dead_letters import ByFilter, ByIds, DeadFilter
from service.ledger.operating import Done, Result, UnknownDelivery, WrongState
from service.ledger.session import Ledger
from service.redrive import Discarded, UnknownDeliveries
from tests.dead import dead, put, states
from tests.world import TENANT, World

ACTOR = "key_test"

Act = Callable[[Ledger, Deed, uuid.UUID], Awaitable[Result]]


async def do(world: World, act: Act, delivery_id: uuid.UUID, tenant: str = TENANT) -> Result:
    deed = Deed(tenant, ACTOR, f"delivery.{act.__name__}", to_typeid(Prefix.DELIVERY, delivery_id))
    return await act(world.ledger, deed, delivery_id)


async def recorded(world: World) -> list[str]:
    found = await world.fetch("SELECT action FROM audit_log WHERE action LIKE 'delivery.%' ORDER BY id")
    return [row["action"] for row in found]


async def test_a_cancelled_delivery_is_never_sent_whatever_hints_wait(world: World) -> None:
    destination = await world.destination()
    delivery_id = await world.accepted(destination.id)
    assert await do(world, operating.cancel, delivery_id) == Done()
    await world.work()
    assert world.sender.requests == []
    view = await world.view(delivery_id)
    assert view["state"] == "cancelled"
    assert view["completed_at"] is not None
    assert await recorded(world) == ["delivery.cancel"]


async def test_a_delivery_parked_at_a_paused_destination_can_be_cancelled(world: World) -> None:
    destination = await world.destination()
    await world.destinations.pause(TENANT, ACTOR, destination.id)
    delivery_id = await world.accepted(destination.id)
    await world.let_pass(5)
    await world.dispatch()
    assert await do(world, operating.cancel, delivery_id) == Done()
    [row] = await world.fetch("SELECT state, parked FROM deliveries")
    assert (row["state"], row["parked"]) == ("cancelled", False)


@pytest.mark.parametrize("act", [operating.cancel, operating.retry])
@pytest.mark.parametrize("state", ["delivering", "delivered", "ambiguous", "cancelled", "dead"])
async def test_what_does_not_wait_can_be_neither_cancelled_nor_retried(world: World, act: Act, state: str) -> None:
    destination = await world.destination()
    if state == "dead":
        delivery_id = await dead(world, destination.id)
    else:
        delivery_id = await put(world, await world.accepted(destination.id), state)
    assert await do(world, act, delivery_id) == WrongState(State(state))
    assert await states(world, delivery_id) == [state]
    assert await recorded(world) == []


@pytest.mark.parametrize("act", [operating.cancel, operating.retry, operating.confirm])
async def test_another_tenants_delivery_is_as_unknown_as_one_that_is_not_there(world: World, act: Act) -> None:
    destination = await world.destination()
    delivery_id = await world.accepted(destination.id)
    assert await do(world, act, delivery_id, tenant="other") == UnknownDelivery()
    assert await do(world, act, world.new_id()) == UnknownDelivery()
    assert await recorded(world) == []


async def test_a_delivery_that_waits_for_tomorrow_is_sent_when_it_is_retried_now(world: World) -> None:
    destination = await world.destination()
    delivery_id = await world.accepted(destination.id, delay_seconds=86_400.0)
    await world.dispatch()
    assert world.queue.take_all() == []
    assert await do(world, operating.retry, delivery_id) == Done()
    await world.dispatch()
    await world.work()
    [attempt] = await world.attempts(delivery_id)
    assert (attempt["trigger"], attempt["outcome"]) == ("manual", "success")
    assert await recorded(world) == ["delivery.retry"]


async def test_a_retry_at_a_paused_destination_waits_for_the_resume(world: World) -> None:
    destination = await world.destination()
    delivery_id = await world.accepted(destination.id, delay_seconds=86_400.0)
    await world.destinations.pause(TENANT, ACTOR, destination.id)
    assert await do(world, operating.retry, delivery_id) == Done()
    await world.dispatch()
    assert await do(world, operating.retry, delivery_id) == Done()
    [row] = await world.fetch("SELECT parked FROM deliveries")
    assert row["parked"]
    await world.dispatch()
    world.queue.take_all()
    await world.destinations.resume(TENANT, ACTOR, destination.id)
    for _ in range(2):
        await world.dispatch()
    await world.work()
    assert await states(world, delivery_id) == ["delivered"]


async def test_a_cancel_and_a_claim_at_once_end_in_one_of_the_two(world: World) -> None:
    destination = await world.destination()
    ids = [await world.accepted(destination.id) for _ in range(20)]

    async def claimed(delivery_id: uuid.UUID) -> bool:
        return bool(await attempting.claim(world.ledger, [delivery_id], worker="w", lease_margin_seconds=5))

    claims = asyncio.gather(*(claimed(delivery_id) for delivery_id in ids))
    results = await asyncio.gather(*(do(world, operating.cancel, delivery_id) for delivery_id in ids))
    for delivery_id, was_claimed, result in zip(ids, await claims, results, strict=True):
        assert (result == Done()) != was_claimed
        assert await states(world, delivery_id) == ["delivering" if was_claimed else "cancelled"]


# Discard


async def test_discarded_by_ids_what_is_dead_is_cancelled_and_the_rest_is_left(world: World) -> None:
    destination = await world.destination()
    dead_ids = [await dead(world, destination.id) for _ in range(2)]
    pending_id = await world.accepted(destination.id)
    selection = ByIds((*dead_ids, pending_id))
    assert await redrive.discard(world.ledger, TENANT, ACTOR, selection, "stale") == Discarded(3, 2)
    assert await states(world, *dead_ids, pending_id) == ["cancelled", "cancelled", "pending"]
    [record] = await world.fetch("SELECT * FROM audit_log WHERE action = 'delivery.discard'")
    assert (record["actor"], record["reason"], record["subject"]) == (ACTOR, "stale", "dlq")
    assert record["detail"]["delivery_ids"] == sorted(to_typeid(Prefix.DELIVERY, one) for one in dead_ids)


async def test_discarded_by_filter_the_record_names_the_filter_and_the_delivery(world: World) -> None:
    destination = await world.destination()
    gone_id = await dead(world, destination.id, event_type="order.gone")
    kept_id = await dead(world, destination.id, event_type="order.kept")
    selection = ByFilter(DeadFilter(event_type="order.gone"), 10)
    assert await redrive.discard(world.ledger, TENANT, ACTOR, selection, "stale") == Discarded(1, 1)
    assert await states(world, gone_id, kept_id) == ["cancelled", "dead"]
    [record] = await world.fetch("SELECT * FROM audit_log WHERE action = 'delivery.discard'")
    assert record["subject"] == to_typeid(Prefix.DELIVERY, gone_id)
    assert record["detail"]["filter"] == {"event_type": "order.gone"}


async def test_a_discard_of_another_tenants_delivery_does_nothing(world: World) -> None:
    destination = await world.destination()
    delivery_id = await dead(world, destination.id)
    refused = await redrive.discard(world.ledger, "other", ACTOR, ByIds((delivery_id,)), "mine?")
    assert refused == UnknownDeliveries(frozenset({delivery_id}))
    assert await states(world, delivery_id) == ["dead"]
    assert await recorded(world) == []


async def test_a_discard_and_a_redrive_at_once_end_in_one_of_the_two(world: World) -> None:
    destination = await world.destination()
    ids = tuple([await dead(world, destination.id) for _ in range(20)])
    await redrive.start(world.ledger, TENANT, ACTOR, redrive.Order(ByIds(ids), "fixed"), key=None, new_id=world.new_id)
    _, discarded = await asyncio.gather(
        redrive.step(world.ledger), redrive.discard(world.ledger, TENANT, ACTOR, ByIds(ids[::-1]), "stale")
    )
    assert isinstance(discarded, Discarded)
    ended = await states(world, *ids)
    assert ended.count("cancelled") == discarded.discarded_count
    assert ended.count("pending") == len(ids) - discarded.discarded_count
