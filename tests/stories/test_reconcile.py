"""The reconcile story: a person says what became of an ambiguous delivery, once, and it is on record."""

from __future__ import annotations

import asyncio
import datetime as dt
import uuid

import pytest

from service import reconcile
from service.ledger.operating import Done, Result, UnknownDelivery, WrongState
from service.reconcile import Finding
from tests.dead import dead, put
from tests.world import TENANT, World, answered, lost

ACTOR = "key_test"


async def held(world: World, **values: object) -> uuid.UUID:
    """A delivery whose one attempt went out and was never answered."""
    destination = await world.destination(on_ambiguous="hold", **values)
    delivery_id = await world.accepted(destination.id)
    world.sender.script = [lost(), answered(200)]
    await world.work()
    assert (await world.view(delivery_id))["state"] == "ambiguous"
    return delivery_id


async def resolve(world: World, delivery_id: uuid.UUID, finding: Finding, tenant: str = TENANT) -> Result:
    return await reconcile.resolve(world.ledger, tenant, ACTOR, delivery_id, finding, "the receiver's log says so")


async def test_confirmed_it_is_delivered_and_nothing_is_sent(world: World) -> None:
    delivery_id = await held(world)
    assert await resolve(world, delivery_id, Finding.DELIVERED) == Done()
    view = await world.view(delivery_id)
    assert (view["state"], view["may_have_been_delivered"]) == ("delivered", False)
    assert view["completed_at"] is not None
    await world.dispatch()
    assert world.queue.take_all() == []


async def test_sent_again_it_has_an_attempt_and_time_for_it_though_both_were_used_up(world: World) -> None:
    delivery_id = await held(world, attempts_max=1, deadline_seconds=600)
    await world.let_pass(3600)
    assert await resolve(world, delivery_id, Finding.RETRY) == Done()
    view = await world.view(delivery_id)
    assert (view["state"], view["attempts_max"], view["next_trigger"]) == ("pending", 2, "manual")
    assert view["deadline_at"] > dt.datetime.now(dt.UTC) + dt.timedelta(seconds=500)
    await world.dispatch()
    await world.work()
    view = await world.view(delivery_id)
    assert (view["state"], view["attempt_count"]) == ("delivered", 2)
    assert (await world.attempts(delivery_id))[1]["trigger"] == "manual"


async def test_sent_again_it_keeps_a_larger_budget_and_a_later_deadline(world: World) -> None:
    delivery_id = await held(world, attempts_max=9, deadline_seconds=60)
    await world.execute("UPDATE deliveries SET deadline_at = now() + interval '1 day'")
    await resolve(world, delivery_id, Finding.RETRY)
    view = await world.view(delivery_id)
    assert view["attempts_max"] == 9
    assert view["deadline_at"] > dt.datetime.now(dt.UTC) + dt.timedelta(hours=23)


async def test_given_up_it_is_dead_and_says_that_it_may_have_arrived(world: World) -> None:
    delivery_id = await held(world)
    assert await resolve(world, delivery_id, Finding.DEAD) == Done()
    view = await world.view(delivery_id)
    assert (view["state"], view["dead_reason"], view["may_have_been_delivered"]) == ("dead", "given_up", True)


@pytest.mark.parametrize("finding", list(Finding))
@pytest.mark.parametrize("state", ["pending", "delivering", "delivered", "cancelled", "dead"])
async def test_nothing_else_is_resolved_and_nothing_is_recorded(world: World, state: str, finding: Finding) -> None:
    destination = await world.destination()
    if state == "dead":
        delivery_id = await dead(world, destination.id)
    else:
        delivery_id = await put(world, await world.accepted(destination.id), state)
    before = dict(await world.view(delivery_id))
    assert await resolve(world, delivery_id, finding) == WrongState(before["state"])
    assert {**dict(await world.view(delivery_id)), "waits": before["waits"]} == before
    assert await world.fetch("SELECT id FROM audit_log WHERE action = 'delivery.resolve'") == []


async def test_another_tenants_delivery_is_unknown(world: World) -> None:
    delivery_id = await held(world)
    assert await resolve(world, delivery_id, Finding.DELIVERED, tenant="other") == UnknownDelivery()
    assert await resolve(world, world.new_id(), Finding.DELIVERED) == UnknownDelivery()
    assert (await world.view(delivery_id))["state"] == "ambiguous"


async def test_of_many_who_resolve_at_once_one_does_and_the_others_are_told_the_state(world: World) -> None:
    delivery_id = await held(world)
    results = await asyncio.gather(*(resolve(world, delivery_id, finding) for finding in list(Finding) * 4))
    assert results.count(Done()) == 1
    state = (await world.view(delivery_id))["state"]
    assert results.count(WrongState(state)) == len(results) - 1
    [record] = await world.fetch("SELECT * FROM audit_log WHERE action = 'delivery.resolve'")
    assert (record["actor"], record["reason"]) == (ACTOR, "the receiver's log says so")
