"""The dispatch story: what hints, workers and Redis lose, it finds."""

from __future__ import annotations

import asyncio

import pytest

from service.dispatch import visibility_seconds
from service.errors import LedgerRefused, LedgerUnavailable
from service.ledger import attempting, dispatching, partitions
from service.ledger.session import Statement
from tests.world import TENANT, World, answered


async def test_a_commit_without_a_hint_is_hinted_when_its_visibility_ends(world: World) -> None:
    destination = await world.destination()
    delivery_id = await world.accepted(destination.id)
    await world.hints.drain()
    world.queue.lose_everything()
    await world.queue.mark_epoch()
    await world.dispatch()
    assert world.queue.take_all() == []
    await world.let_pass(2.1)
    await world.dispatch()
    assert world.queue.take_all() == [delivery_id]


async def test_a_hint_of_the_dispatchers_that_is_lost_is_given_again(world: World) -> None:
    destination = await world.destination()
    delivery_id = await world.accepted(destination.id, delay_seconds=60.0)
    await world.let_pass(61)
    for _ in range(3):
        await world.dispatch()
        assert world.queue.take_all() == [delivery_id]  # and nobody works on it
        await world.let_pass(3)


async def test_a_waiting_row_is_not_hinted_again_on_every_pass(world: World) -> None:
    destination = await world.destination()
    await world.accepted(destination.id)
    await world.hints.drain()
    world.queue.take_all()
    await world.let_pass(3)
    for _ in range(3):
        await world.dispatch()
    assert len(world.queue.take_all()) == 1


async def test_a_queue_that_lost_everything_is_filled_again_at_once(world: World) -> None:
    destination = await world.destination()
    await world.dispatch()
    ids = {await world.accepted(destination.id) for _ in range(500)}
    later_id = await world.accepted(destination.id, delay_seconds=3600.0)
    await world.hints.drain()
    world.queue.lose_everything()
    await world.dispatch()
    hinted = world.queue.take_all()
    assert set(hinted) == ids
    assert later_id not in hinted


async def test_with_the_queue_down_rescue_goes_on_and_hints_follow_when_it_is_back(world: World) -> None:
    destination = await world.destination()
    lost_id, due_id = await world.accepted(destination.id), await world.accepted(destination.id)
    await world.hints.drain()
    await attempting.claim(world.ledger, [lost_id], worker="gone", lease_margin_seconds=5)
    await world.let_pass(60)
    world.queue.up = False
    await world.dispatch()
    assert (await world.view(lost_id))["last_outcome"] == "unknown"
    world.queue.up = True
    world.queue.take_all()
    await world.dispatch()
    assert due_id in world.queue.take_all()


async def test_a_dead_workers_claim_is_rescued_by_its_missing_heartbeat_before_the_lease_ends(world: World) -> None:
    destination = await world.destination(timeout_seconds=60.0)
    dead_id, live_id = await world.accepted(destination.id), await world.accepted(destination.id)
    await dispatching.beat(world.ledger, "dead")
    await attempting.claim(world.ledger, [dead_id], worker="dead", lease_margin_seconds=15)
    await attempting.claim(world.ledger, [live_id], worker="live", lease_margin_seconds=15)
    await world.let_pass(11)
    await dispatching.beat(world.ledger, "live")
    await world.dispatch()
    assert (await world.view(dead_id))["state"] == "pending"
    assert (await world.view(live_id))["state"] == "delivering"


async def test_a_young_claim_is_left_alone_whatever_its_workers_heartbeat_says(world: World) -> None:
    destination = await world.destination()
    delivery_id = await world.accepted(destination.id)
    await attempting.claim(world.ledger, [delivery_id], worker="never-beat", lease_margin_seconds=15)
    await world.dispatch()
    assert (await world.view(delivery_id))["state"] == "delivering"


async def test_three_crashed_claims_in_a_row_are_poison_and_neighbours_are_delivered(world: World) -> None:
    destination = await world.destination()
    poison_id, neighbour_id = await world.accepted(destination.id), await world.accepted(destination.id)
    for _ in range(3):
        await attempting.claim(world.ledger, [poison_id], worker="crashing", lease_margin_seconds=5)
        await world.let_pass(3600)
        await world.dispatch()
        await world.let_pass(3600)
    await world.deliverer.deliver([neighbour_id])
    row = await world.view(poison_id)
    assert (row["state"], row["dead_reason"], row["may_have_been_delivered"]) == ("dead", "poison", True)
    assert [attempt["outcome"] for attempt in await world.attempts(poison_id)] == ["unknown"] * 3
    assert (await world.view(neighbour_id))["state"] == "delivered"


async def test_an_answer_between_two_crashes_starts_the_count_anew(world: World) -> None:
    destination = await world.destination()
    delivery_id = await world.accepted(destination.id)
    world.sender.script = [answered(503)]
    for crashes in (2, 2):
        for _ in range(crashes):
            await attempting.claim(world.ledger, [delivery_id], worker="crashing", lease_margin_seconds=5)
            await world.let_pass(3600)
            await world.dispatch()
            await world.let_pass(3600)
        await world.deliverer.deliver([delivery_id])
        await world.let_pass(3600)
    assert (await world.view(delivery_id))["state"] == "pending"


async def test_two_dispatchers_rescue_one_claim_once(world: World) -> None:
    destination = await world.destination()
    delivery_id = await world.accepted(destination.id)
    await attempting.claim(world.ledger, [delivery_id], worker="gone", lease_margin_seconds=5)
    await world.let_pass(60)
    other = world.make_dispatcher()
    await asyncio.gather(world.dispatch(), other.run_pass())
    assert [attempt["number"] for attempt in await world.attempts(delivery_id)] == [1]


async def test_a_deadline_that_passes_while_waiting_ends_in_the_dead_letter_queue_unsent(world: World) -> None:
    destination = await world.destination()
    delivery_id = await world.accepted(destination.id, deadline_seconds=30.0)
    await world.let_pass(31)
    await world.deliverer.deliver([delivery_id])
    await world.dispatch()
    row = await world.view(delivery_id)
    assert (row["state"], row["dead_reason"], row["attempt_count"]) == ("dead", "deadline", 0)
    assert world.sender.requests == []


async def test_a_paused_destination_is_parked_and_flows_again_when_resumed(world: World) -> None:
    paused, other = await world.destination(), await world.destination()
    waiting_ids = [await world.accepted(paused.id) for _ in range(5)]
    await world.destinations.pause(TENANT, "test", paused.id)
    other_id = await world.accepted(other.id)
    await world.work()
    await world.let_pass(3)
    await world.dispatch()
    assert (await world.view(other_id))["state"] == "delivered"
    assert len(world.sender.requests) == 1
    parked = await world.fetch("SELECT count(*) FROM deliveries WHERE parked")
    assert parked[0]["count"] == 5
    await world.let_pass(60)
    await world.dispatch()
    assert world.queue.take_all() == []
    await world.destinations.resume(TENANT, "test", paused.id)
    await world.dispatch()
    await world.dispatch()
    await world.work()
    assert {(await world.view(delivery_id))["state"] for delivery_id in waiting_ids} == {"delivered"}
    assert (await world.fetch("SELECT gated FROM destinations WHERE id = :id", {"id": paused.id}))[0]["gated"] is False


async def test_a_parked_delivery_still_dies_at_its_deadline(world: World) -> None:
    destination = await world.destination()
    delivery_id = await world.accepted(destination.id, deadline_seconds=30.0)
    await world.destinations.pause(TENANT, "test", destination.id)
    await world.let_pass(3)
    await world.dispatch()
    await world.let_pass(30)
    await world.dispatch()
    assert (await world.view(delivery_id))["dead_reason"] == "deadline"


async def test_a_destination_paused_between_hint_and_claim_is_not_sent_to(world: World) -> None:
    destination = await world.destination()
    delivery_id = await world.accepted(destination.id)
    await world.hints.drain()
    await world.destinations.pause(TENANT, "test", destination.id)
    await world.work()
    assert world.sender.requests == []
    assert (await world.view(delivery_id))["attempt_count"] == 0


@pytest.mark.parametrize("queue", ["down", "full"])
async def test_without_room_for_hints_deadlines_still_end_and_paused_rows_are_parked(world: World, queue: str) -> None:
    destination, paused = await world.destination(), await world.destination()
    late_id = await world.accepted(destination.id, deadline_seconds=30.0)
    sendable_id = await world.accepted(destination.id)
    waiting_id = await world.accepted(paused.id)
    await world.hints.drain()
    world.queue.take_all()
    await world.destinations.pause(TENANT, "test", paused.id)
    await world.let_pass(31)
    world.queue.up = queue == "full"
    world.queue.hinted = [world.new_id()] * 400
    await world.dispatch()
    assert (await world.view(late_id))["dead_reason"] == "deadline"
    parked = await world.fetch("SELECT id FROM deliveries WHERE parked")
    assert [row["id"] for row in parked] == [waiting_id]
    # What may be sent is still due at once when there is room again.
    world.queue.up, world.queue.hinted = True, []
    await world.dispatch()
    assert world.queue.take_all() == [sendable_id]


async def test_a_full_queue_is_given_nothing_more(world: World) -> None:
    destination = await world.destination()
    await world.accepted(destination.id)
    await world.let_pass(3)
    world.queue.hinted = [world.new_id()] * 400
    await world.dispatch()
    assert len(world.queue.take_all()) == 400
    await world.dispatch()
    assert len(world.queue.take_all()) == 1


def test_the_visibility_grows_with_the_queue_and_is_bounded() -> None:
    assert visibility_seconds(2.0, 0) == 2.0
    assert 2.0 < visibility_seconds(2.0, 100) < visibility_seconds(2.0, 300) <= 60.0
    assert visibility_seconds(2.0, 10**9) == 60.0


async def test_a_role_that_may_not_create_tables_still_dispatches(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*_: object) -> list[str]:
        raise LedgerRefused("the ledger refused a statement (42501)", "42501")

    monkeypatch.setattr(partitions, "ensure_ahead", refused)
    destination = await world.destination()
    delivery_id = await world.accepted(destination.id)
    await world.let_pass(3)
    await world.dispatch()
    await world.work()
    assert (await world.view(delivery_id))["state"] == "delivered"


async def test_a_step_that_the_ledger_refuses_does_not_keep_the_others_from_their_work(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*_: object, **__: object) -> None:
        raise LedgerRefused("permission denied", "42501")

    destination = await world.destination()
    delivery_id = await world.accepted(destination.id)
    await world.hints.drain()
    world.queue.take_all()
    await attempting.claim(world.ledger, [delivery_id], worker="lost", lease_margin_seconds=5)
    await world.let_pass(3_600)
    with monkeypatch.context() as patch:
        patch.setattr(dispatching, "take_due", refused)
        await world.dispatch()
    assert (await world.view(delivery_id))["last_outcome"] == "unknown", "rescued all the same"
    await world.let_pass(3_600)
    await world.dispatch()
    assert world.queue.take_all() == [delivery_id]


async def test_a_session_in_another_state_than_we_think_is_replaced(world: World) -> None:
    async def backend(statement: str) -> int:
        async with world.ledger.statement() as connection:
            [row] = await connection.rows(Statement(statement))
            return int(row[0])

    before = {await backend("SELECT pg_backend_pid()") for _ in range(3)}
    with pytest.raises(LedgerUnavailable):
        await backend("SAVEPOINT in_no_transaction")
    assert await backend("SELECT pg_backend_pid()") not in before


REFUSE_ONE = """
CREATE FUNCTION refuse_one() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN RAISE EXCEPTION 'refused' USING ERRCODE = 'check_violation'; END $$
"""


async def refuse(world: World, table: str, deed: str, condition: str) -> None:
    """Let the ledger refuse what meets the condition, as a corrupt row would."""
    await world.execute(REFUSE_ONE)
    await world.execute(f"""
    CREATE TRIGGER refuse_one BEFORE {deed} ON {table} FOR EACH ROW WHEN ({condition}) EXECUTE FUNCTION refuse_one()
    """)


async def test_one_claim_whose_rescue_is_refused_holds_none_of_its_neighbours_up(world: World) -> None:
    destination = await world.destination()
    ids = [await world.accepted(destination.id) for _ in range(6)]
    await attempting.claim(world.ledger, ids, worker="lost", lease_margin_seconds=5)
    await refuse(world, "attempts", "INSERT", f"NEW.delivery_id = '{ids[0]}'")
    await world.let_pass(3_600)
    await world.dispatch()
    assert [(await world.view(each))["state"] for each in ids] == ["delivering"] + ["pending"] * 5
    # It is passed over for a minute, and then tried again.
    await world.execute("DROP TRIGGER refuse_one ON attempts")
    await world.dispatch()
    assert (await world.view(ids[0]))["state"] == "delivering"
    world.clock.seconds += 61
    await world.dispatch()
    assert (await world.view(ids[0]))["last_outcome"] == "unknown"


async def test_one_claim_that_is_refused_holds_none_of_its_neighbours_up(world: World) -> None:
    destination = await world.destination()
    ids = [await world.accepted(destination.id) for _ in range(6)]
    await refuse(world, "deliveries", "UPDATE", f"NEW.id = '{ids[0]}' AND NEW.state = 'delivering'")
    await world.deliverer.deliver(ids)
    assert [(await world.view(each))["state"] for each in ids] == ["pending"] + ["delivered"] * 5
    assert world.deliverer.in_flight_count == 0


async def test_a_dispatcher_that_starts_after_an_outage_takes_no_claim_of_a_living_worker(world: World) -> None:
    destination = await world.destination()
    delivery_id = await world.accepted(destination.id)
    await dispatching.beat(world.ledger, "living")
    await attempting.claim(world.ledger, [delivery_id], worker="living", lease_margin_seconds=60)
    await world.let_pass(12)  # in which nobody could beat
    started = world.make_dispatcher()
    await started.run_pass()
    assert (await world.view(delivery_id))["state"] == "delivering"
    world.clock.seconds += 11  # time enough to beat, and it did not
    await started.run_pass()
    assert (await world.view(delivery_id))["last_outcome"] == "unknown"
