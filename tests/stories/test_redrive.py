"""The redrive story: dead deliveries are put back once, within bounds, on record, whatever runs at once."""

from __future__ import annotations

import asyncio
import datetime as dt
import uuid
from typing import Any

import pytest

from service import redrive
from service.domain.delivery import DeadReason
from service.ledger import redrives
from service.ledger.dead_letters import ByFilter, ByIds, DeadFilter
from service.ledger.redrives import Progress, Tally
from service.ledger.session import Row
from service.redrive import KeyMismatch, Order, Replayed, Requeue, Started, Stop, UnknownDeliveries, Wait, decide
from tests.dead import dead, die, put, states
from tests.world import TENANT, World, answered

ACTOR = "key_test"


def order(*ids: uuid.UUID, reason: str = "fixed", **bounds: Any) -> Order:
    return Order(ByIds(ids), reason, **bounds)


async def ask(world: World, wanted: Order, key: str | None = None, tenant: str = TENANT) -> Any:
    return await redrive.start(world.ledger, tenant, ACTOR, wanted, key=key, new_id=world.new_id)


async def started(world: World, wanted: Order) -> uuid.UUID:
    answer = await ask(world, wanted)
    assert isinstance(answer, Started)
    return answer.redrive_id


async def told(world: World, redrive_id: uuid.UUID) -> tuple[Row, Tally]:
    found = await redrives.find(world.ledger, TENANT, redrive_id)
    assert found is not None
    return found


async def audited(world: World, action: str) -> list[Row]:
    return await world.fetch("SELECT * FROM audit_log WHERE action = :action ORDER BY id", {"action": action})


# One round


async def test_a_redriven_delivery_is_sent_again_with_the_same_id_and_bytes_to_the_current_url(world: World) -> None:
    destination = await world.destination(attempts_max=3)
    delivery_id = await world.accepted(destination.id, body=b'{"n": 1.50}')
    world.sender.script = [answered(422), answered(200)]
    await world.work()
    assert (await world.view(delivery_id))["state"] == "dead"
    await world.destinations.change(TENANT, ACTOR, destination.id, {"url": "https://moved.example/hook"})
    redrive_id = await started(world, order(delivery_id))
    await world.dispatch()
    view = await world.view(delivery_id)
    assert (view["state"], view["attempts_max"], view["redrive_count"]) == ("pending", 4, 1)
    await world.dispatch()
    await world.work()
    first, second = world.sender.requests
    assert first.body == second.body == b'{"n": 1.50}'
    assert dict(first.headers)["webhook-id"] == dict(second.headers)["webhook-id"]
    assert (first.url, second.url) == ("https://receiver.example/hook", "https://moved.example/hook")
    history = [(row["number"], row["trigger"], row["outcome"]) for row in await world.attempts(delivery_id)]
    assert history == [(1, "schedule", "rejected"), (2, "redrive", "success")]
    row, tally = await told(world, redrive_id)
    assert (row["state"], row["selected_count"]) == ("completed", 1)
    assert tally == Tally(1, 0, 1, 0, {"success": 1}, {})


async def test_a_redrive_gives_a_fresh_budget_and_deadline_and_keeps_what_is_known(world: World) -> None:
    destination = await world.destination(attempts_max=5, deadline_seconds=600)
    delivery_id = await dead(world, destination.id, reason="poison", outcome="unknown")
    await world.execute(
        "UPDATE deliveries SET crashed_claims = 3, attempt_count = 7, may_have_been_delivered = true,"
        " deadline_at = now() - interval '1 day'"
    )
    await started(world, order(delivery_id))
    assert not await redrive.step(world.ledger)
    [row] = await world.fetch("SELECT *, deadline_at - now() AS remaining FROM deliveries")
    assert (row["attempts_max"], row["crashed_claims"], row["next_trigger"]) == (12, 0, "redrive")
    assert (row["dead_reason"], row["completed_at"], row["parked"]) == (None, None, False)
    assert row["may_have_been_delivered"]
    assert dt.timedelta(seconds=500) < row["remaining"] <= dt.timedelta(seconds=600)


async def test_a_redrive_begins_the_schedule_anew_and_does_not_go_on_with_waits_of_hours(world: World) -> None:
    destination = await world.destination(base_seconds=10.0, cap_seconds=3_600.0)
    delivery_id = await dead(world, destination.id, reason="exhausted", outcome="retryable")
    await world.execute("UPDATE deliveries SET attempt_count = 17, attempts_max = 18")
    await started(world, order(delivery_id))
    world.sender.script = [answered(503)]
    for doubled in (1, 2, 4):
        await world.let_pass(3_600)
        await world.dispatch()
        await world.dispatch()
        await world.work()
        [row] = await world.fetch("SELECT next_attempt_at - now() AS delay FROM deliveries")
        assert 0 < row["delay"].total_seconds() <= 10 * doubled * 0.75
    assert (await world.view(delivery_id))["attempt_count"] == 20


async def test_a_redriven_delivery_that_fails_again_is_dead_with_its_new_reason_and_whole_history(
    world: World,
) -> None:
    destination = await world.destination()
    delivery_id = await world.accepted(destination.id)
    world.sender.script = [answered(422), answered(410)]
    await world.work()
    redrive_id = await started(world, order(delivery_id))
    await world.dispatch()
    await world.dispatch()
    await world.work()
    view = await world.view(delivery_id)
    assert (view["state"], view["dead_reason"], view["attempt_count"]) == ("dead", "gone", 2)
    await world.dispatch()
    assert world.queue.take_all() == []
    _, tally = await told(world, redrive_id)
    assert (tally.dead_again_count, tally.delivered_count, tally.outcomes) == (1, 0, {"gone": 1})


async def test_twenty_parallel_redrives_of_one_delivery_make_one_new_round(world: World) -> None:
    destination = await world.destination()
    delivery_id = await dead(world, destination.id)
    answers = await asyncio.gather(*(ask(world, order(delivery_id)) for _ in range(20)))
    await asyncio.gather(*(redrive.step(world.ledger) for _ in range(4)))
    await redrive.step(world.ledger)
    assert (await world.view(delivery_id))["redrive_count"] == 1
    tallies = [(await told(world, answer.redrive_id))[1] for answer in answers]
    assert sum(tally.requeued_count for tally in tallies) == 1
    assert [tally.skipped_because for tally in tallies if not tally.requeued_count] == [{"pending": 1}] * 19


async def test_a_delivery_that_died_again_in_another_round_is_not_taken_by_an_older_redrive(world: World) -> None:
    destination = await world.destination()
    delivery_id = await dead(world, destination.id)
    first_id, second_id = await started(world, order(delivery_id)), await started(world, order(delivery_id))
    async with world.ledger.transaction() as elsewhere:
        held = await redrives.lock_next(elsewhere, first_id)
        assert held is not None
        assert held.id == second_id
        await redrive.step(world.ledger)
    await die(world, delivery_id)
    await redrive.step(world.ledger)
    assert (await world.view(delivery_id))["redrive_count"] == 1
    assert (await told(world, first_id))[1].dead_again_count == 1
    assert (await told(world, second_id))[1].skipped_because == {"redriven-since": 1}


async def test_a_delivery_redriven_twice_counts_as_dead_again_in_the_first_round(world: World) -> None:
    destination = await world.destination()
    delivery_id = await dead(world, destination.id)
    first_id = await started(world, order(delivery_id))
    await redrive.step(world.ledger)
    await die(world, delivery_id)
    second_id = await started(world, order(delivery_id))
    await redrive.step(world.ledger)
    await put(world, delivery_id, "delivered")
    assert (await told(world, first_id))[1].dead_again_count == 1
    second = (await told(world, second_id))[1]
    assert (second.delivered_count, second.dead_again_count) == (1, 0)


# What is left alone


@pytest.mark.parametrize("state", ["pending", "delivering", "delivered", "ambiguous", "cancelled"])
async def test_a_delivery_that_is_not_dead_is_skipped_for_its_state(world: World, state: str) -> None:
    destination = await world.destination()
    delivery_id = await put(world, await world.accepted(destination.id), state)
    row, tally = await told(world, await started(world, order(delivery_id)))
    assert (row["state"], row["selected_count"]) == ("completed", 1)
    assert (tally.requeued_count, tally.skipped_because) == (0, {state: 1})
    assert not await redrive.step(world.ledger)
    assert await states(world, delivery_id) == [state]


async def test_a_delivery_that_is_discarded_before_its_turn_is_skipped(world: World) -> None:
    destination = await world.destination()
    delivery_id = await dead(world, destination.id)
    redrive_id = await started(world, order(delivery_id))
    await redrive.discard(world.ledger, TENANT, ACTOR, ByIds((delivery_id,)), "not wanted")
    await redrive.step(world.ledger)
    row, tally = await told(world, redrive_id)
    assert (row["state"], tally.skipped_because) == ("completed", {"cancelled": 1})


async def test_at_a_disabled_destination_nothing_is_requeued(world: World) -> None:
    destination = await world.destination()
    delivery_id = await dead(world, destination.id)
    await world.execute("UPDATE destinations SET state = 'disabled', disabled_reason = 'gone'")
    redrive_id = await started(world, order(delivery_id))
    await redrive.step(world.ledger)
    assert (await told(world, redrive_id))[1].skipped_because == {"destination-disabled": 1}
    assert await states(world, delivery_id) == ["dead"]


async def test_at_a_paused_destination_a_requeued_delivery_waits_for_the_resume(world: World) -> None:
    destination = await world.destination()
    delivery_id = await dead(world, destination.id)
    await world.destinations.pause(TENANT, ACTOR, destination.id)
    await started(world, order(delivery_id))
    for _ in range(2):
        await world.dispatch()
    world.queue.take_all()
    assert await states(world, delivery_id) == ["pending"]
    await world.destinations.resume(TENANT, ACTOR, destination.id)
    for _ in range(2):
        await world.dispatch()
    await world.work()
    assert await states(world, delivery_id) == ["delivered"]


async def test_an_unknown_id_and_another_tenants_are_refused_alike_and_nothing_starts(world: World) -> None:
    destination = await world.destination()
    delivery_id, unknown_id = await dead(world, destination.id), world.new_id()
    assert await ask(world, order(delivery_id, unknown_id)) == UnknownDeliveries(frozenset({unknown_id}))
    assert await ask(world, order(delivery_id), tenant="other") == UnknownDeliveries(frozenset({delivery_id}))
    by_filter = Order(ByFilter(DeadFilter(destination_id=destination.id), 10), "mine?")
    answer = await ask(world, by_filter, tenant="other")
    assert isinstance(answer, Started)
    assert [row["selected_count"] for row in await world.fetch("SELECT * FROM redrives")] == [0]
    assert await redrives.find(world.ledger, TENANT, answer.redrive_id) is None


# Selection by filter


async def test_a_filter_takes_those_that_are_dead_longest_up_to_its_limit(world: World) -> None:
    destination, other = await world.destination(), await world.destination()
    now = dt.datetime.now(dt.UTC)
    newer, oldest, old = [await dead(world, destination.id, at=now - dt.timedelta(hours=hours)) for hours in (1, 3, 2)]
    elsewhere = await dead(world, other.id, at=now - dt.timedelta(hours=9))
    selection = ByFilter(DeadFilter(destination_id=destination.id, reason=DeadReason.REJECTED), 2)
    preview = await redrive.preview(world.ledger, TENANT, selection)
    assert isinstance(preview, redrive.Preview)
    assert (preview.dead_count, [row["id"] for row in preview.sample]) == (2, [old, oldest])
    assert await world.fetch("SELECT id FROM redrives") == []
    await started(world, Order(selection, "fixed"))
    await redrive.step(world.ledger)
    assert await states(world, newer, oldest, old, elsewhere) == ["dead", "pending", "pending", "dead"]


# The key


async def test_the_same_order_with_the_same_key_is_one_redrive_also_when_it_comes_twenty_times_at_once(
    world: World,
) -> None:
    destination = await world.destination()
    first_id, second_id = await dead(world, destination.id), await dead(world, destination.id)
    orders = [order(first_id, second_id), order(second_id, first_id)] * 10
    answers = await asyncio.gather(*(ask(world, wanted, key="k") for wanted in orders))
    assert len({answer.redrive_id for answer in answers}) == 1
    assert sum(isinstance(answer, Started) for answer in answers) == 1
    assert sum(isinstance(answer, Replayed) for answer in answers) == 19
    assert len(await audited(world, "redrive.start")) == 1


async def test_a_key_stands_for_one_order_of_one_tenant(world: World) -> None:
    destination = await world.destination()
    delivery_id = await dead(world, destination.id)
    assert isinstance(await ask(world, order(delivery_id), key="k"), Started)
    assert await ask(world, order(delivery_id, reason="another"), key="k") == KeyMismatch()
    assert await ask(world, order(delivery_id, rate_per_second=2.0), key="k") == KeyMismatch()
    by_filter = Order(ByFilter(DeadFilter(destination_id=destination.id), 10), "fixed")
    assert isinstance(await ask(world, by_filter, key="k", tenant="other"), Started)
    assert isinstance(await ask(world, by_filter, key="k2"), Started)
    assert isinstance(await ask(world, by_filter, key="k2"), Replayed)


# Bounds


async def test_a_step_takes_a_batch_and_says_whether_more_can_be_done_now(world: World) -> None:
    destination = await world.destination()
    ids = [await dead(world, destination.id) for _ in range(5)]
    redrive_id = await started(world, order(*ids))
    assert [await redrive.step(world.ledger, batch=2) for _ in range(3)] == [True, True, False]
    row, tally = await told(world, redrive_id)
    assert (row["state"], tally.requeued_count) == ("completed", 5)


async def test_a_redrive_that_skips_goes_on_at_once(world: World) -> None:
    destination = await world.destination()
    ids = [await dead(world, destination.id) for _ in range(3)]
    await started(world, order(*ids, rate_per_second=0.01))
    await redrive.discard(world.ledger, TENANT, ACTOR, ByIds(tuple(ids[:2])), "not wanted")
    assert [await redrive.step(world.ledger) for _ in range(3)] == [True, True, False]
    assert (await world.view(ids[2]))["state"] == "pending"


async def test_a_rate_is_kept_across_steps_and_a_pause_is_not_a_flood(world: World) -> None:
    destination = await world.destination()
    ids = [await dead(world, destination.id) for _ in range(4)]
    redrive_id = await started(world, order(*ids, rate_per_second=0.01))

    async def requeued_after(seconds: float) -> int:
        await world.execute(f"UPDATE redrives SET stepped_at = stepped_at - make_interval(secs => {seconds})")
        assert not await redrive.step(world.ledger)
        return (await told(world, redrive_id))[1].requeued_count

    assert [await requeued_after(seconds) for seconds in (0, 0, 50, 51, 3600, 3600)] == [1, 1, 1, 2, 3, 4]
    assert (await told(world, redrive_id))[0]["state"] == "completed"


async def test_a_redrive_holds_back_while_as_many_are_on_their_way_as_it_stops_after(world: World) -> None:
    destination = await world.destination()
    ids = [await dead(world, destination.id) for _ in range(4)]
    redrive_id = await started(world, order(*ids, stop_after_same_reason=2))
    for _ in range(3):
        assert not await redrive.step(world.ledger)
        assert (await told(world, redrive_id))[1].requeued_count == 2
    await put(world, ids[0], "delivered")
    await redrive.step(world.ledger)
    assert (await told(world, redrive_id))[1].requeued_count == 3


async def test_a_redrive_stops_when_as_many_in_a_row_die_again_for_one_reason(world: World) -> None:
    destination = await world.destination()
    ids = [await dead(world, destination.id) for _ in range(4)]
    redrive_id = await started(world, order(*ids, stop_after_same_reason=2))
    await redrive.step(world.ledger)
    for delivery_id in ids[:2]:
        await die(world, delivery_id, reason="rejected")
    assert not await redrive.step(world.ledger)
    row, tally = await told(world, redrive_id)
    assert (row["state"], row["stopped_because"]) == ("stopped", "rejected")
    assert row["completed_at"] is not None
    assert (tally.requeued_count, tally.dead_again_count) == (2, 2)
    assert tally.skipped_because == {"redrive-stopped": 2}
    assert await states(world, *ids) == ["dead"] * 4
    [record] = await audited(world, "redrive.stop")
    assert (record["actor"], record["detail"]) == ("dispatcher", {"same_reason": "rejected"})


@pytest.mark.parametrize("fates", [("rejected", "gone"), ("rejected", None), (None, "rejected")])
async def test_a_redrive_goes_on_while_its_latest_did_not_all_die_for_one_reason(
    world: World, fates: tuple[str | None, str | None]
) -> None:
    destination = await world.destination()
    ids = [await dead(world, destination.id) for _ in range(3)]
    redrive_id = await started(world, order(*ids, stop_after_same_reason=2))
    await redrive.step(world.ledger)
    for delivery_id, reason in zip(ids, fates, strict=False):
        await (put(world, delivery_id, "delivered") if reason is None else die(world, delivery_id, reason=reason))
    await redrive.step(world.ledger)
    row, tally = await told(world, redrive_id)
    assert (row["state"], tally.requeued_count) == ("completed", 3)


async def test_only_the_latest_count_for_stopping(world: World) -> None:
    destination = await world.destination()
    ids = [await dead(world, destination.id) for _ in range(4)]
    redrive_id = await started(world, order(*ids, stop_after_same_reason=1))
    await redrive.step(world.ledger)
    await put(world, ids[0], "delivered")
    await redrive.step(world.ledger)
    await die(world, ids[1], reason="exhausted")
    await redrive.step(world.ledger)
    assert (await told(world, redrive_id))[0]["stopped_because"] == "exhausted"


def progress(**values: Any) -> Progress:
    given: dict[str, Any] = {
        "id": uuid.UUID(int=1),
        "tenant": TENANT,
        "created_at": dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
        "rate_per_second": None,
        "stop_after_same_reason": None,
        "elapsed_seconds": None,
        "outstanding_count": 0,
        "same_reason": None,
    }
    return Progress(**{**given, **values})


@pytest.mark.parametrize(
    ("values", "decision"),
    [
        ({}, Requeue(100)),
        ({"rate_per_second": 20.0}, Requeue(1)),
        ({"rate_per_second": 20.0, "elapsed_seconds": 0.25}, Requeue(5)),
        ({"rate_per_second": 20.0, "elapsed_seconds": 3600.0}, Requeue(20)),
        ({"rate_per_second": 1000.0, "elapsed_seconds": 3600.0}, Requeue(100)),
        ({"rate_per_second": 3.0, "elapsed_seconds": 0.333333}, Requeue(1)),
        ({"rate_per_second": 3.0, "elapsed_seconds": 0.3}, Wait()),
        ({"rate_per_second": 3.0, "elapsed_seconds": -5.0}, Wait()),
        ({"stop_after_same_reason": 10, "outstanding_count": 4}, Requeue(6)),
        ({"stop_after_same_reason": 10, "outstanding_count": 10}, Wait()),
        ({"stop_after_same_reason": 10, "same_reason": "gone"}, Stop("gone")),
    ],
)
def test_a_step_is_decided_by_the_narrowest_bound(values: dict[str, Any], decision: object) -> None:
    assert decide(progress(**values), 100) == decision


@pytest.mark.parametrize(
    ("rate_per_second", "elapsed_seconds", "requeued_count", "unspent_seconds"),
    [(None, 9.0, 5, 0.0), (4.0, None, 1, 0.0), (4.0, 0.6, 2, 0.1), (4.0, 60.0, 2, 0.5), (4.0, 0.6, 0, 0.6)],
)
def test_a_fraction_of_a_delivery_is_carried_over_to_the_next_step(
    rate_per_second: float | None, elapsed_seconds: float | None, requeued_count: int, unspent_seconds: float
) -> None:
    stepping = progress(rate_per_second=rate_per_second, elapsed_seconds=elapsed_seconds)
    assert redrive.unspent(stepping, requeued_count) == pytest.approx(unspent_seconds)


# By a person's word


async def test_a_cancelled_redrive_puts_nothing_more_back_and_what_it_put_back_goes_on(world: World) -> None:
    destination = await world.destination()
    ids = [await dead(world, destination.id) for _ in range(3)]
    redrive_id = await started(world, order(*ids, stop_after_same_reason=1))
    await redrive.step(world.ledger)
    assert not await redrive.cancel(world.ledger, "other", ACTOR, redrive_id)
    assert await redrive.cancel(world.ledger, TENANT, ACTOR, redrive_id)
    assert not await redrive.cancel(world.ledger, TENANT, ACTOR, redrive_id)
    assert not await redrive.step(world.ledger)
    assert await states(world, *ids) == ["pending", "dead", "dead"]
    row, tally = await told(world, redrive_id)
    assert (row["state"], tally.skipped_because) == ("cancelled", {"redrive-cancelled": 2})
    assert len(await audited(world, "redrive.cancel")) == 1


async def test_a_redrive_is_on_record_with_who_why_and_what(world: World) -> None:
    destination = await world.destination()
    delivery_id = await dead(world, destination.id)
    await started(world, Order(ByFilter(DeadFilter(event_type=None, reason=DeadReason.REJECTED), 7), "rotated"))
    [record] = await audited(world, "redrive.start")
    assert (record["tenant"], record["actor"], record["reason"]) == (TENANT, ACTOR, "rotated")
    assert record["subject"].startswith("rdv_")
    assert record["detail"] == {
        "filter": {"reason": "rejected"},
        "limit": 7,
        "rate_per_second": None,
        "stop_after_same_reason": None,
        "selected": 1,
    }
    [item] = await world.fetch("SELECT delivery_id FROM redrive_items")
    assert item["delivery_id"] == delivery_id


async def test_redrives_are_listed_newest_first_each_once(world: World) -> None:
    destination = await world.destination()
    delivery_id = await dead(world, destination.id)
    ids = [await started(world, order(delivery_id)) for _ in range(3)]
    page = await redrives.list_page(world.ledger, TENANT, before=None, limit=2)
    rest = await redrives.list_page(world.ledger, TENANT, before=page[-1][0]["id"], limit=2)
    assert [row["id"] for row, _ in [*page, *rest]] == ids[::-1]
    assert await redrives.list_page(world.ledger, "other", before=None, limit=2) == []
