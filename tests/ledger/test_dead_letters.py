"""The dead-letter queue's list and counts: each entry once, whatever happens meanwhile, and by its index."""

from __future__ import annotations

import datetime as dt
import uuid
from typing import Any

import pytest

from service import redrive
from service.domain.delivery import DeadReason
from service.domain.outcome import Outcome
from service.ledger import dead_letters
from service.ledger.dead_letters import ByFilter, ByIds, DeadFilter, Place
from service.ledger.session import Statement
from tests.dead import dead
from tests.world import TENANT, World

AT = dt.datetime(2026, 3, 1, 8, 30, 0, 123456, tzinfo=dt.UTC)


async def listed(world: World, wanted: DeadFilter, tenant: str = TENANT) -> list[uuid.UUID]:
    found = await dead_letters.list_page(world.ledger, tenant, wanted, after=None, limit=250)
    return [row["id"] for row in found]


@pytest.mark.parametrize("size", [1, 2, 3])
async def test_seven_of_one_instant_are_each_listed_once_while_others_die_and_are_redriven(
    world: World, size: int
) -> None:
    destination = await world.destination()
    ids = [await dead(world, destination.id, at=AT) for _ in range(7)]
    order = redrive.Order(ByIds((ids[-1],)), "fixed")
    seen: list[uuid.UUID] = []
    after: Place | None = None
    while True:
        page = await dead_letters.list_page(world.ledger, TENANT, DeadFilter(), after=after, limit=size)
        seen += [row["id"] for row in page]
        if len(page) < size:
            break
        after = Place(page[-1]["completed_at"], page[-1]["id"])
        await dead(world, destination.id)
        # Shown already: it is put back, and dies again, later than every page to come.
        await redrive.start(world.ledger, TENANT, "key_test", order, key=None, new_id=world.new_id)
        await redrive.step(world.ledger)
        await world.execute(
            "UPDATE deliveries SET state = 'dead', dead_reason = 'gone', wake_at = NULL, completed_at = now()"
            " WHERE state = 'pending'"
        )
    assert seen == ids[::-1]


async def test_each_filter_narrows_and_all_together_do(world: World) -> None:
    destination, other = await world.destination(), await world.destination()
    hour = dt.timedelta(hours=1)
    plain = await dead(world, destination.id, at=AT)
    elsewhere = await dead(world, other.id, at=AT + hour)
    gone = await dead(world, destination.id, reason="gone", outcome="gone", at=AT + 2 * hour)
    typed = await dead(world, destination.id, event_type="order.paid", at=AT + 3 * hour)
    everything = [typed, gone, elsewhere, plain]
    cases: list[tuple[dict[str, Any], list[uuid.UUID]]] = [
        ({}, everything),
        ({"destination_id": other.id}, [elsewhere]),
        ({"reason": DeadReason.GONE}, [gone]),
        ({"outcome": Outcome.REJECTED}, [typed, elsewhere, plain]),
        ({"event_type": "order.paid"}, [typed]),
        ({"dead_after": AT + hour}, [typed, gone]),
        ({"dead_before": AT + hour}, [plain]),
        ({"destination_id": destination.id, "reason": DeadReason.REJECTED, "dead_after": AT}, [typed]),
    ]
    for values, expected in cases:
        wanted = DeadFilter(**values)
        assert wanted.names_nothing == (not values)
        assert await listed(world, wanted) == expected
        assert await dead_letters.count(world.ledger, TENANT, ByFilter(wanted, 10)) == (len(expected), 0)
        assert await listed(world, wanted, tenant="other") == []


async def test_an_entry_tells_when_it_was_tried_first_and_last(world: World) -> None:
    destination = await world.destination(name="School", owner="team-grades")
    delivery_id = await dead(world, destination.id, event_type="grade.published")
    await world.execute(
        "INSERT INTO attempts (delivery_id, number, scheduled_at, started_at, trigger, outcome)"
        " SELECT delivery_id, 2, now(), started_at + interval '1 hour', 'schedule', 'rejected' FROM attempts"
    )
    [row] = await dead_letters.list_page(world.ledger, TENANT, DeadFilter(), after=None, limit=5)
    assert (row["id"], row["destination_name"], row["owner"]) == (delivery_id, "School", "team-grades")
    assert row["last_attempt_at"] - row["first_attempt_at"] == dt.timedelta(hours=1)


async def test_the_summary_counts_by_destination_and_reason_and_its_totals_cover_all(world: World) -> None:
    destination, other = await world.destination(name="one"), await world.destination(name="two")
    for minutes in range(3):
        await dead(world, destination.id, at=AT + dt.timedelta(minutes=minutes))
    await dead(world, destination.id, reason="gone", at=AT - dt.timedelta(days=1))
    await dead(world, other.id, reason="gone")
    await world.accepted(other.id)
    found = await dead_letters.summary(world.ledger, TENANT)
    groups = {(row["destination_name"], row["dead_reason"]): row["dead_count"] for row in found}
    assert groups == {("one", "rejected"): 3, ("one", "gone"): 1, ("two", "gone"): 1}
    assert found[0]["oldest_dead_at"] == AT
    [largest] = await dead_letters.summary(world.ledger, TENANT, groups_max=1)
    assert (largest["total_count"], largest["oldest_of_all_at"]) == (5, AT - dt.timedelta(days=1))
    assert largest["oldest_age_seconds"] > 0
    assert await dead_letters.summary(world.ledger, "other") == []


@pytest.mark.parametrize(
    ("wanted", "index"),
    [
        (DeadFilter(), "tenant_completed_at_id"),
        (DeadFilter(destination_id=uuid.UUID(int=1), reason=DeadReason.GONE), "destination_id_dead_reason"),
    ],
)
async def test_a_list_reads_an_index_that_holds_nothing_but_the_queue(
    world: World, wanted: DeadFilter, index: str
) -> None:
    query, values = dead_letters.chosen_by(ByFilter(wanted, 50))
    async with world.ledger.transaction() as connection:
        # The tables of a test are so small that a scan would be right.
        await connection.execute(Statement("SET LOCAL enable_seqscan = off"))
        plan = await connection.rows(Statement(f"EXPLAIN {query}"), {**values, "tenant": TENANT})
        scans = [row[0] for row in plan if "Scan" in row[0]]
    assert scans
    assert all(index in scan for scan in scans), scans
