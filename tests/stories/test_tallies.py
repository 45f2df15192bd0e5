"""What happens is counted once, where it happens, and reaches the ledger whatever becomes of the ledger meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import asyncpg
import pytest

from service.accept import Duplicate, KeyMismatch, Replayed
from service.domain import limits
from service.domain.tally import Tallied
from service.ledger import attempting
from service.ledger import tallies as rows
from service.ledger.session import Ledger, open_ledger
from service.tallies import Tallies
from service.telemetry import events
from tests.world import SIGNALS_WITHIN_SECONDS, TENANT, World, answered, captured_logs, lost, unsent


async def written(world: World, tenant: str = TENANT) -> dict[str, int]:
    """What the ledger holds once this process has written."""
    await world.tallies.write()
    found = await world.fetch(
        "SELECT name, CAST(sum(count) AS bigint) AS count FROM tallies WHERE tenant = :tenant GROUP BY name",
        {"tenant": tenant},
    )
    return {row["name"]: row["count"] for row in found}


# What is counted


async def test_a_batch_of_new_and_repeated_requests_is_counted_by_what_each_was_answered(world: World) -> None:
    destination = await world.destination()
    request = world.request(destination.id)
    repeated = world.request(destination.id, key=request.key)
    again = world.request(destination.id, event_id=request.event_id)
    mismatch = world.request(destination.id, key=request.key, body=b"2")
    fresh = [world.request(destination.id) for _ in range(3)]
    answers = await asyncio.gather(*map(world.intake.accept, [request, repeated, again, mismatch, *fresh]))
    assert [type(answer) for answer in answers[1:4]] == [Replayed, Duplicate, KeyMismatch]
    assert await written(world) == {"accepted": 4, "replayed": 1, "duplicate": 1}
    assert await written(world, "other") == {}


async def test_a_repetition_that_is_looked_up_after_its_deadline_is_counted_and_a_new_one_is_not(world: World) -> None:
    destination = await world.destination()
    request = world.request(destination.id)
    await world.intake.accept(request)
    assert isinstance(await world.intake.standing(request), Replayed)
    assert await world.intake.standing(world.request(destination.id)) is None
    assert await written(world) == {"accepted": 1, "replayed": 1}


async def test_each_attempt_is_counted_by_its_outcome_and_each_end_once(world: World) -> None:
    destination = await world.destination(attempts_max=5)
    await world.accepted(destination.id)
    world.sender.script = [answered(503), lost(), answered(429), unsent(), answered(200)]
    for _ in range(5):
        await world.let_pass(7200)
        await world.execute("UPDATE deliveries SET deadline_at = now() + interval '1 day'")
        await world.dispatch()
        await world.work()
    await world.accepted(destination.id)
    world.sender.script = [answered(404)]
    await world.work()
    assert await written(world) == {
        "accepted": 2,
        "attempt_retryable": 1,
        "attempt_unknown": 1,
        "attempt_throttled": 1,
        "attempt_not_sent": 1,
        "attempt_success": 1,
        "delivered": 1,
        "attempt_rejected": 1,
        "dead": 1,
    }


async def test_a_rescued_claim_is_an_unknown_attempt_and_the_zombies_own_is_none(world: World) -> None:
    destination = await world.destination()
    delivery_id = await world.accepted(destination.id)
    await world.hints.drain()
    world.sender.released.clear()
    zombie = asyncio.create_task(world.deliverer.deliver([delivery_id]))
    await asyncio.wait_for(world.sender.hanging.wait(), SIGNALS_WITHIN_SECONDS)
    await world.let_pass(60)
    await asyncio.gather(world.dispatch(), world.make_dispatcher().run_pass())
    world.sender.released.set()
    await zombie
    assert await written(world) == {"accepted": 1, "attempt_unknown": 1}


async def test_a_rescue_that_buries_is_counted_as_a_death(world: World) -> None:
    destination = await world.destination(attempts_max=1)
    delivery_id = await world.accepted(destination.id)
    await attempting.claim(world.ledger, [delivery_id], worker="gone", lease_margin_seconds=5)
    await world.let_pass(60)
    await world.dispatch()
    assert (await world.view(delivery_id))["state"] == "dead"
    assert await written(world) == {"accepted": 1, "attempt_unknown": 1, "dead": 1}


async def test_a_late_success_that_settles_what_was_held_is_a_delivery(world: World) -> None:
    destination = await world.destination(on_ambiguous="hold")
    delivery_id = await world.accepted(destination.id)
    await world.hints.drain()
    world.sender.released.clear()
    zombie = asyncio.create_task(world.deliverer.deliver([delivery_id]))
    await asyncio.wait_for(world.sender.hanging.wait(), SIGNALS_WITHIN_SECONDS)
    await world.let_pass(60)
    await world.dispatch()
    world.sender.released.set()
    await zombie
    assert (await world.view(delivery_id))["state"] == "delivered"
    assert await written(world) == {"accepted": 1, "attempt_unknown": 1, "delivered": 1}


@pytest.mark.parametrize("queue", ["with room", "full"])
async def test_what_expires_while_it_waits_is_a_death_counted_once(world: World, queue: str) -> None:
    destination = await world.destination()
    for _ in range(2):
        await world.accepted(destination.id, deadline_seconds=30.0)
    await world.hints.drain()
    world.queue.take_all()
    await world.let_pass(31)
    if queue == "full":
        world.queue.hinted = [world.new_id()] * limits.HINT_JOBS_MAX
    await asyncio.gather(world.dispatch(), world.make_dispatcher().run_pass())
    assert await written(world) == {"accepted": 2, "dead": 2}


# How it reaches the ledger


async def test_the_counts_of_two_processes_add_up(world: World) -> None:
    one, other = Tallies(world.ledger), Tallies(world.ledger)
    for _ in range(3):
        one.count(TENANT, Tallied.ACCEPTED)
        other.count(TENANT, Tallied.ACCEPTED, 10)
        other.count("other", Tallied.DEAD)
        await asyncio.gather(one.write(), other.write())
    assert await written(world) == {"accepted": 33}
    assert await written(world, "other") == {"dead": 3}


async def test_nothing_is_sent_when_nothing_was_counted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Mapping[tuple[str, str], int]] = []
    add = rows.add

    async def watched(ledger: Ledger, counts: Mapping[tuple[str, str], int]) -> None:
        sent.append(counts)
        await add(ledger, counts)

    monkeypatch.setattr(rows, "add", watched)
    await world.tallies.write()
    world.tallies.count(TENANT, Tallied.DEAD)
    for _ in range(3):
        await world.tallies.write()
    assert sent == [{(TENANT, "dead"): 1}]


async def test_a_ledger_that_does_not_answer_delays_counts_and_loses_none(world: World, database_url: str) -> None:
    hurried = open_ledger(
        database_url, connections_max=1, acquire_timeout_seconds=5.0, statement_timeout_seconds=0.1, name="hurried"
    )
    tallies = Tallies(hurried)
    tallies.count(TENANT, Tallied.ACCEPTED, 2)
    other = await asyncpg.connect(database_url)
    try:
        async with other.transaction():
            await other.execute("LOCK TABLE tallies IN ACCESS EXCLUSIVE MODE")
            await tallies.write()
            tallies.count(TENANT, Tallied.ACCEPTED)
            await tallies.write()
        tallies.count(TENANT, Tallied.DEAD)
        assert await written(world) == {}
        await tallies.write()
        await tallies.write()
    finally:
        await other.close()
        await hurried.close()
    assert await written(world) == {"accepted": 3, "dead": 1}


async def test_counts_that_the_ledger_refuses_are_dropped_and_it_is_said_once(world: World) -> None:
    await world.execute("ALTER TABLE tallies RENAME TO gone")
    with captured_logs() as lines:
        for _ in range(2):
            world.tallies.count(TENANT, Tallied.ACCEPTED)
            await world.tallies.write()
    assert [line["event"] for line in lines] == [events.TALLIES_REFUSED]
    await world.execute("ALTER TABLE gone RENAME TO tallies")
    world.tallies.count(TENANT, Tallied.DEAD)
    assert await written(world) == {"dead": 1}


async def test_beyond_the_limit_of_keys_only_those_that_have_one_are_counted(world: World) -> None:
    tallies = Tallies(world.ledger, keys_max=2)
    for tenant in ("a", "b", "c", "a"):
        tallies.count(tenant, Tallied.ACCEPTED)
    await tallies.write()
    assert [await written(world, tenant) for tenant in ("a", "b", "c")] == [{"accepted": 2}, {"accepted": 1}, {}]


async def test_what_is_left_at_the_stop_is_written(world: World) -> None:
    tallies = Tallies(world.ledger, write_every_seconds=3600.0)
    tallies.start()
    tallies.count(TENANT, Tallied.DELIVERED)
    await tallies.stop()
    assert await written(world) == {"delivered": 1}


async def test_a_process_writes_again_and_again_by_itself(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    wrote: asyncio.Queue[Mapping[tuple[str, str], int]] = asyncio.Queue()
    add = rows.add

    async def watched(ledger: Ledger, counts: Mapping[tuple[str, str], int]) -> None:
        await add(ledger, counts)
        wrote.put_nowait(counts)

    monkeypatch.setattr(rows, "add", watched)
    tallies = Tallies(world.ledger, write_every_seconds=0.01)
    tallies.start()
    for _ in range(2):
        tallies.count(TENANT, Tallied.ACCEPTED)
        assert await asyncio.wait_for(wrote.get(), SIGNALS_WITHIN_SECONDS) == {(TENANT, "accepted"): 1}
    await tallies.stop()
    assert await written(world) == {"accepted": 2}


async def test_a_stop_does_not_wait_for_a_ledger_that_says_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.tallies._LAST_WRITE_SECONDS", 0.05)
    reached = asyncio.Event()

    async def silent(*_: object) -> None:
        reached.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(rows, "add", silent)
    tallies = Tallies(world.ledger)
    tallies.start()
    tallies.count(TENANT, Tallied.ACCEPTED)
    await asyncio.wait_for(tallies.stop(), SIGNALS_WITHIN_SECONDS)
    assert reached.is_set()


async def test_stopped_before_it_was_started_it_has_nothing_to_do(world: World) -> None:
    await Tallies(world.ledger).stop()


# Housekeeping


async def old_rows(world: World, count: int) -> None:
    await world.execute(
        "INSERT INTO tallies SELECT 'default', date_trunc('minute', now()) - interval '25 hours', n::text, 1"
        " FROM generate_series(1, CAST(:count AS int)) n",
        {"count": count},
    )


async def test_the_dispatcher_deletes_what_is_older_than_a_day_a_batch_with_each_pass(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.tallies.count(TENANT, Tallied.ACCEPTED)
    await world.tallies.write()
    await old_rows(world, limits.TALLIES_FORGET_BATCH + 1)
    assert await world.dispatcher.run_pass()
    assert len(await written(world)) == 2
    assert not await world.dispatcher.run_pass()
    assert await written(world) == {"accepted": 1}
    # Then not for an hour.
    await old_rows(world, 1)
    await world.dispatch()
    assert len(await written(world)) == 2
    world.clock.seconds += 3_600.0
    await world.dispatch()
    assert await written(world) == {"accepted": 1}
