"""What a worker that was paused, lost its claim or is told to stop may still do, and what it may not."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest

from service.domain.delivery import Complete
from service.domain.outcome import Exchange, Outcome
from service.errors import LedgerUnavailable
from service.ledger import attempting, operating
from service.ledger.attempting import Claim, Settlement
from service.ledger.audit import Deed
from service.ports import OutboundRequest
from tests.world import SIGNALS_WITHIN_SECONDS, TENANT, World, answered, lost


async def test_a_worker_that_was_paused_after_its_claim_does_not_send(world: World) -> None:
    destination = await world.destination()
    delivery_id = await world.accepted(destination.id)
    clock = world.clock
    real_claim = attempting.claim

    async def slow_claim(*args: object, **kwargs: object) -> object:
        claims = await real_claim(*args, **kwargs)  # type: ignore[arg-type]
        clock.seconds += 6  # as a SIGSTOP between claim and send would
        return claims

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attempting, "claim", slow_claim)
        await world.work()
    assert world.sender.requests == []
    row = await world.view(delivery_id)
    assert (row["state"], row["attempt_count"], row["attempts_max"]) == ("pending", 1, 19)


async def test_a_worker_that_was_paused_while_connecting_may_not_write(world: World) -> None:
    destination = await world.destination()
    await world.accepted(destination.id)
    may_write: list[bool] = []

    async def connect(request: OutboundRequest) -> None:
        may_write.append(request.may_write())
        world.clock.seconds += 6
        may_write.append(request.may_write())
        world.deliverer.tick()
        may_write.append(request.may_write())

    world.sender.on_send = connect
    await world.work()
    assert may_write == [True, False, False], "awake again, but this claim is from before the pause"
    world.sender.on_send = None
    await world.accepted(destination.id)
    await world.work()
    assert world.sender.requests[-1].may_write()


async def test_a_zombies_answer_is_kept_and_changes_nothing(world: World) -> None:
    destination = await world.destination()
    delivery_id = await world.accepted(destination.id)
    world.sender.released.clear()
    working = asyncio.create_task(world.work())
    await asyncio.wait_for(world.sender.hanging.wait(), SIGNALS_WITHIN_SECONDS)
    await world.let_pass(60)
    await world.dispatch()  # the lease is over: rescued as unknown
    row = await world.view(delivery_id)
    assert (row["state"], row["last_outcome"]) == ("pending", "unknown")
    world.sender.released.set()
    await working
    after = await world.view(delivery_id)
    [attempt] = await world.attempts(delivery_id)
    assert (after["state"], after["attempt_count"], attempt["outcome"]) == ("pending", 1, "unknown")
    assert (attempt["late_result"]["outcome"], attempt["late_result"]["status_code"]) == ("success", 200)


async def test_a_zombies_answer_does_not_end_the_attempt_that_another_worker_is_making(world: World) -> None:
    destination = await world.destination()
    delivery_id = await world.accepted(destination.id)
    world.sender.released.clear()
    zombie = asyncio.create_task(world.work())
    await asyncio.wait_for(world.sender.hanging.wait(), SIGNALS_WITHIN_SECONDS)
    await world.let_pass(60)
    await world.dispatch()
    await world.let_pass(60)
    [claim] = await attempting.claim(world.ledger, [delivery_id], worker="worker-2", lease_margin_seconds=15.0)
    world.sender.released.set()
    await zombie
    row = await world.view(delivery_id)
    assert (row["state"], row["attempt_count"], claim.budget.number) == ("delivering", 2, 2)
    [first] = [attempt for attempt in await world.attempts(delivery_id) if attempt["outcome"] is not None]
    assert (first["number"], first["outcome"], first["late_result"]["outcome"]) == (1, "unknown", "success")


async def test_a_late_success_settles_a_delivery_that_is_held_as_ambiguous(world: World) -> None:
    destination = await world.destination(on_ambiguous="hold")
    delivery_id = await world.accepted(destination.id)
    world.sender.released.clear()
    working = asyncio.create_task(world.work())
    await asyncio.wait_for(world.sender.hanging.wait(), SIGNALS_WITHIN_SECONDS)
    await world.let_pass(60)
    await world.dispatch()
    assert (await world.view(delivery_id))["state"] == "ambiguous"
    world.sender.released.set()
    await working
    row = await world.view(delivery_id)
    assert (row["state"], row["may_have_been_delivered"]) == ("delivered", False)


async def test_a_late_success_of_an_earlier_attempt_settles_what_is_ambiguous_and_is_told_once(world: World) -> None:
    destination = await world.destination(on_ambiguous="hold")
    delivery_id = await world.accepted(destination.id)
    [first] = await attempting.claim(world.ledger, [delivery_id], worker="paused", lease_margin_seconds=15.0)
    await world.let_pass(60)
    await world.dispatch()
    deed = Deed(TENANT, "test", "delivery.resolve", "x", "sent again")
    await operating.resend(world.ledger, deed, delivery_id)
    world.sender.script = [lost()]
    await world.deliverer.deliver([delivery_id])
    assert (await world.view(delivery_id))["state"] == "ambiguous"
    assert not await attempting.settle_late(world.ledger, told_late(first, answered(503), Outcome.RETRYABLE))
    # What a zombie told first stands: a second word, even a better one, changes nothing.
    assert not await attempting.settle_late(world.ledger, told_late(first, answered(200), Outcome.SUCCESS))
    [kept, *_] = await world.attempts(delivery_id)
    assert (kept["number"], kept["late_result"]["outcome"]) == (1, "retryable")
    other_id = await world.accepted(destination.id)
    [claim] = await attempting.claim(world.ledger, [other_id], worker="paused", lease_margin_seconds=15.0)
    await world.let_pass(60)
    await world.dispatch()
    await operating.resend(world.ledger, deed, other_id)
    await world.deliverer.deliver([other_id])
    assert await attempting.settle_late(world.ledger, told_late(claim, answered(200), Outcome.SUCCESS))
    row = await world.view(other_id)
    assert (row["state"], row["attempt_count"], row["may_have_been_delivered"]) == ("delivered", 2, False)


def told_late(claim: Claim, exchange: Exchange, outcome: Outcome) -> Settlement:
    """What the worker of a lost claim reports."""
    return Settlement(
        delivery_id=claim.delivery_id,
        number=claim.budget.number,
        scheduled_at=claim.scheduled_at,
        claimed_at=claim.claimed_at,
        trigger=claim.trigger,
        worker="paused",
        outcome=outcome,
        decision=Complete(),
        exchange=exchange,
    )


async def test_a_settlement_whose_answer_was_lost_is_not_written_twice(world: World) -> None:
    destination = await world.destination()
    delivery_id = await world.accepted(destination.id)
    real_settle = attempting.settle
    tries = 0

    async def settle_and_lose_the_answer(*args: object) -> object:
        nonlocal tries
        tries += 1
        moved = await real_settle(*args)  # type: ignore[arg-type]
        if tries == 1:
            raise LedgerUnavailable("the answer was lost")
        return moved

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attempting, "settle", settle_and_lose_the_answer)
        await world.work()
    assert tries == 2
    [attempt] = await world.attempts(delivery_id)
    assert (attempt["outcome"], attempt["late_result"]) == ("success", None)


async def test_stopping_lets_attempts_finish_and_claims_no_more(world: World) -> None:
    destination = await world.destination()
    first_id = await world.accepted(destination.id)
    world.sender.released.clear()
    working = asyncio.create_task(world.work())
    await asyncio.wait_for(world.sender.hanging.wait(), SIGNALS_WITHIN_SECONDS)
    stopping = asyncio.create_task(world.deliverer.stop(SIGNALS_WITHIN_SECONDS))
    second_id = await world.accepted(destination.id)
    await world.deliverer.deliver([second_id])
    world.sender.released.set()
    await asyncio.gather(working, stopping)
    assert (await world.view(first_id))["state"] == "delivered"
    assert (await world.view(second_id))["attempt_count"] == 0


async def test_a_claim_under_way_when_the_stop_comes_is_released_uncharged(world: World) -> None:
    destination = await world.destination()
    delivery_id = await world.accepted(destination.id)
    real_claim = attempting.claim
    stopping: list[asyncio.Task[None]] = []

    async def claim_while_stopping(*args: object, **kwargs: object) -> object:
        stopping.append(asyncio.create_task(world.deliverer.stop(SIGNALS_WITHIN_SECONDS)))
        await asyncio.sleep(0)
        return await real_claim(*args, **kwargs)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attempting, "claim", claim_while_stopping)
        await asyncio.gather(world.deliverer.deliver([delivery_id]), return_exceptions=True)
    await stopping[0]
    row = await world.view(delivery_id)
    assert world.sender.requests == []
    assert (row["state"], row["attempts_max"], row["last_outcome"]) == ("pending", 19, "not_sent")


async def test_an_attempt_broken_off_by_the_end_of_the_grace_is_unknown(world: World) -> None:
    destination = await world.destination()
    delivery_id = await world.accepted(destination.id)
    world.sender.released.clear()
    working = asyncio.create_task(world.work())
    await asyncio.wait_for(world.sender.hanging.wait(), SIGNALS_WITHIN_SECONDS)
    await world.deliverer.stop(0.0)
    await working
    row = await world.view(delivery_id)
    assert (row["state"], row["last_outcome"]) == ("pending", "unknown")


async def test_an_attempt_broken_off_while_it_connects_is_not_sent_and_uncharged(world: World) -> None:
    destination = await world.destination(on_ambiguous="hold")
    delivery_id = await world.accepted(destination.id)
    connecting = asyncio.Event()

    async def connect(_: object) -> None:
        connecting.set()
        await asyncio.Event().wait()

    world.sender.on_send = connect
    working = asyncio.create_task(world.work())
    await asyncio.wait_for(connecting.wait(), SIGNALS_WITHIN_SECONDS)
    await world.deliverer.stop(0.0)
    await working
    row = await world.view(delivery_id)
    assert (row["state"], row["attempts_max"], row["last_outcome"]) == ("pending", 19, "not_sent")
    assert not row["may_have_been_delivered"]


async def test_an_answer_that_came_before_the_end_of_the_grace_is_settled_before_the_stop_ends(world: World) -> None:
    destination = await world.destination()
    delivery_id = await world.accepted(destination.id)
    settling, go_on = asyncio.Event(), asyncio.Event()
    real_settle = attempting.settle

    async def slow_settle(*args: Any) -> set[uuid.UUID]:
        settling.set()
        await go_on.wait()
        return await real_settle(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attempting, "settle", slow_settle)
        working = asyncio.create_task(world.work())
        await asyncio.wait_for(settling.wait(), SIGNALS_WITHIN_SECONDS)
        stopping = asyncio.create_task(world.deliverer.stop(0.0))
        # The grace is over at once; the outcome is on its way.
        assert not (await asyncio.wait({stopping}, timeout=0.2))[0], "the stop waits for the outcome"
        go_on.set()
        await stopping
        await working
    assert (await world.view(delivery_id))["state"] == "delivered"
