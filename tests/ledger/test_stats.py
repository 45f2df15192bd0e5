"""The numbers of the operational view: each row counted where it stands, within the bounds, by the indexes named."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import uuid
from typing import Any

import asyncpg
import pytest

from service.ledger import stats, tallies
from service.ledger.session import Statement
from tests.dead import dead, put
from tests.world import SIGNALS_WITHIN_SECONDS, TENANT, World

# Where deliveries stand


async def one_of_each(world: World) -> uuid.UUID:
    """Deliveries in every state, more than one of those that are told apart; returns their destination."""
    destination = await world.destination()
    due = [await world.accepted(destination.id) for _ in range(2)]
    await world.execute(
        "UPDATE deliveries SET next_attempt_at = now() - interval '90 s' WHERE id = :id", {"id": due[1]}
    )
    await world.accepted(destination.id, delay_seconds=3600.0)
    parked = await world.accepted(destination.id)
    await world.execute("UPDATE deliveries SET parked = true WHERE id = :id", {"id": parked})
    for state in ("delivering", "delivering", "delivering", "delivered", "cancelled", "ambiguous"):
        await put(world, await world.accepted(destination.id), state)
    for reason in ("rejected", "rejected", "exhausted"):
        await dead(world, destination.id, reason=reason)
    return destination.id


async def test_each_delivery_is_counted_where_it_stands(world: World) -> None:
    await one_of_each(world)
    found = await stats.standings(world.ledger, TENANT)
    assert (found.pending_count, found.due_count, found.parked_count) == (4, 2, 1)
    assert (found.in_flight_count, found.ambiguous_count) == (3, 1)
    assert found.dead_counts == {"rejected": 2, "exhausted": 1}
    assert (found.capped, found.dead_capped) == (False, False)
    assert found.oldest_due_at is not None
    assert dt.timedelta(seconds=90) <= found.at - found.oldest_due_at < dt.timedelta(seconds=120)


async def test_another_tenant_has_none_of_them(world: World) -> None:
    await one_of_each(world)
    found = await stats.standings(world.ledger, "other")
    assert (found.pending_count, found.due_count, found.parked_count) == (0, 0, 0)
    assert (found.in_flight_count, found.ambiguous_count, found.dead_counts) == (0, 0, {})
    assert found.oldest_due_at is None


async def test_beyond_its_bound_only_the_oldest_are_looked_at_whosever_they_are_and_the_answer_says_so(
    world: World,
) -> None:
    destination = await world.destination()
    oldest = [await world.accepted(destination.id) for _ in range(3)]
    await world.execute(
        "UPDATE deliveries SET tenant = 'giant' WHERE id = ANY(CAST(:ids AS uuid[]))", {"ids": oldest[:2]}
    )
    await put(world, await world.accepted(destination.id), "ambiguous")
    await put(world, await world.accepted(destination.id), "delivering")
    found = await stats.standings(world.ledger, TENANT, rows_max=3)
    assert (found.capped, found.pending_count, found.ambiguous_count, found.in_flight_count) == (True, 1, 0, 1)
    found = await stats.standings(world.ledger, TENANT, rows_max=6)
    assert (found.capped, found.pending_count, found.ambiguous_count, found.in_flight_count) == (False, 1, 1, 1)


async def test_the_dead_are_counted_up_to_a_bound_that_the_answer_tells_of(world: World) -> None:
    destination = await world.destination()
    for _ in range(3):
        await dead(world, destination.id)
    found = await stats.standings(world.ledger, TENANT, dead_rows_max=2)
    assert (found.dead_capped, found.dead_counts) == (True, {"rejected": 2})
    assert not (await stats.standings(world.ledger, TENANT, dead_rows_max=4)).dead_capped


async def scans_of(world: World, statement: Statement, values: dict[str, Any], table: str) -> set[str]:
    """How a plan reads a table, once scanning it whole is out of the question, as it is of a large one."""
    async with world.ledger.transaction() as connection:
        await connection.execute(Statement("SET LOCAL enable_seqscan = off"))
        [row] = await connection.rows(Statement(f"EXPLAIN (FORMAT JSON) {statement.text}"), values)
    found: set[str] = set()

    def walk(node: dict[str, Any], relation: str) -> None:
        relation = node.get("Relation Name", relation)
        if relation.startswith(table) and "Scan" in node["Node Type"] and "Bitmap Heap" not in node["Node Type"]:
            found.add(f"{node['Node Type']}: {node.get('Index Name')}")
        for child in node.get("Plans", ()):
            walk(child, relation)

    walk(json.loads(row["QUERY PLAN"])[0]["Plan"], "")
    return found


@pytest.mark.parametrize("state", ["pending", "delivered"])
async def test_the_open_the_claimed_and_the_dead_are_each_read_by_the_index_that_holds_nothing_else(
    world: World, state: str
) -> None:
    destination = await world.destination()
    await world.execute(
        """
        INSERT INTO deliveries (id, destination_id, tenant, state, next_attempt_at, deadline_at, wake_at, attempts_max)
        SELECT id, :destination, 'default', 'pending', now(), now() + interval '1 day', now(), 5
        FROM unnest(CAST(:ids AS uuid[])) AS id
        """,
        {"ids": [world.new_id() for _ in range(2_000)], "destination": destination.id},
    )
    if state == "delivered":
        await world.execute("UPDATE deliveries SET state = 'delivered', wake_at = NULL, completed_at = now()")
    await world.execute("ANALYZE deliveries")
    values = {"tenant": TENANT, "rows_max": 500, "dead_rows_max": 500}
    used = await scans_of(world, stats._STANDINGS, values, "deliveries")
    # A partition's index is named after its columns: `ix_deliveries_open` is the one of `id`.
    kinds = {
        kind for kind in ("_id_idx", "lease_until_idx", "destination_id_dead_reason") for each in used if kind in each
    }
    assert kinds == {"_id_idx", "lease_until_idx", "destination_id_dead_reason"}, used
    others = ("_pkey", "Seq Scan", "tenant_completed_at", "wake_at")
    assert [each for each in used if any(other in each for other in others)] == []
    assert all(each.startswith("Index Only Scan") for each in used if "dead_reason" in each), used


# Tallies


async def tallied(world: World, tenant: str = TENANT) -> dict[str, int]:
    found = await world.fetch(
        "SELECT name, CAST(sum(count) AS bigint) AS count FROM tallies WHERE tenant = :tenant GROUP BY name",
        {"tenant": tenant},
    )
    return {row["name"]: row["count"] for row in found}


async def test_what_is_added_twice_adds_up_and_tenants_and_names_stay_apart(world: World) -> None:
    await tallies.add(world.ledger, {(TENANT, "accepted"): 2, ("other", "accepted"): 5})
    await tallies.add(world.ledger, {(TENANT, "dead"): 1, (TENANT, "accepted"): 40})
    assert await tallied(world) == {"accepted": 42, "dead": 1}
    assert await tallied(world, "other") == {"accepted": 5}
    minutes = await world.fetch("SELECT DISTINCT minute, minute = date_trunc('minute', minute) AS whole FROM tallies")
    assert all(row["whole"] for row in minutes)


async def test_counts_are_locked_in_order_so_that_no_two_processes_wait_for_each_other(
    world: World, database_url: str
) -> None:
    """While the first in order is held by another, the last is still free, in whatever order it was counted."""
    counts = {(TENANT, "z"): 1, (TENANT, "m"): 1, (TENANT, "a"): 1}
    await tallies.add(world.ledger, counts)
    # The minute that the second write is for may be the next; then both rows must be there to be locked.
    await world.execute("INSERT INTO tallies SELECT tenant, minute + interval '1 minute', name, count FROM tallies")
    other = await asyncpg.connect(database_url)
    try:
        async with other.transaction():
            await other.execute("SELECT FROM tallies WHERE name = 'a' FOR UPDATE")
            adding = asyncio.create_task(tallies.add(world.ledger, counts))
            async with asyncio.timeout(SIGNALS_WITHIN_SECONDS):
                while not await other.fetchval("SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)"):
                    pass
            await other.execute("SELECT FROM tallies WHERE name = 'z' FOR UPDATE NOWAIT")
        await adding
    finally:
        await other.close()
    assert await tallied(world) == {"a": 3, "m": 3, "z": 3}


async def at_minutes_ago(world: World, minutes: float, name: str, count: int) -> None:
    await world.execute(
        "INSERT INTO tallies VALUES (:tenant, date_trunc('minute', now()) - make_interval(secs => :seconds), :name,"
        " :count)",
        {"tenant": TENANT, "seconds": minutes * 60, "name": name, "count": count},
    )


async def test_the_window_is_of_whole_minutes_and_the_day_is_a_day(world: World) -> None:
    for minutes, count in ((0, 1), (5, 10), (7, 100), (1438, 1000), (1442, 10_000)):
        await at_minutes_ago(world, minutes, "replayed", count)
    await tallies.add(world.ledger, {("other", "replayed"): 7})
    found = await tallies.recent(world.ledger, TENANT)
    assert found.day == {"replayed": 1111}
    # The minute may have changed since they were written; the oldest of the window is then out of it.
    assert found.window["replayed"] in (11, 1)
    assert 300 <= found.window_seconds < 360


async def test_a_tenant_of_whom_nothing_was_counted_has_a_window_all_the_same(world: World) -> None:
    found = await tallies.recent(world.ledger, TENANT)
    assert (found.window, found.day) == ({}, {})
    assert 300 <= found.window_seconds < 360


async def test_what_is_older_than_a_day_is_forgotten_by_the_batch(world: World) -> None:
    for minutes, name in ((0, "now"), (1438, "today"), (1442, "a"), (1443, "b"), (1444, "c")):
        await at_minutes_ago(world, minutes, name, 1)
    assert await tallies.forget(world.ledger, batch=2) == 2
    assert set(await tallied(world)) == {"now", "today", "a"}
    assert await tallies.forget(world.ledger, batch=2) == 1
    assert set(await tallied(world)) == {"now", "today"}


async def test_a_tenants_counts_are_read_by_their_key_and_old_ones_found_by_their_minute(world: World) -> None:
    values: dict[str, Any] = {"tenant": TENANT, "window_seconds": 300.0, "day_seconds": 86_400.0}
    assert {each.split(": ")[1] for each in await scans_of(world, tallies._RECENT, values, "tallies")} == {"pk_tallies"}
    used = await scans_of(world, tallies._FORGET, {"kept_seconds": 86_400.0, "batch": 5}, "tallies")
    assert {each.split(": ")[1] for each in used} - {"None"} == {"ix_tallies_minute"}, used
