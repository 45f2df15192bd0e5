"""The statements of the delivery path use the index they name, whatever the statistics say.

A partial index that can be picked for a statement *by id* is walked whole once the statistics were
taken while it was empty; so each plan is looked at under both kinds.
"""

from __future__ import annotations

import datetime as dt
import json
import uuid
from collections.abc import Sequence
from typing import Any

import pytest

from service.domain.delivery import Complete
from service.domain.outcome import Exchange, Outcome, Phase
from service.ledger import accepting, attempting, dispatching, partitions
from service.ledger.attempting import Settlement
from service.ledger.partitions import Weekly
from service.ledger.session import Statement, open_ledger
from tests.world import World

ROWS = 2_000

STATES = {
    "pending": "state = 'pending'",
    "delivering": "state = 'delivering', wake_at = NULL, lease_until = now() + interval '1 h', claimed_at = now(),"
    " attempt_count = 1, worker = 'w'",
    "delivered": "state = 'delivered', wake_at = NULL, completed_at = now(), attempt_count = 1",
}


async def fill(world: World, state: str) -> list[uuid.UUID]:
    """Many deliveries in one state."""
    destination = await world.destination()
    ids = [world.new_id() for _ in range(ROWS)]
    await world.execute(
        """
        INSERT INTO deliveries (id, destination_id, tenant, state, next_attempt_at, deadline_at, wake_at, attempts_max)
        SELECT id, :destination, 'default', 'pending', now(), now() + interval '1 day', now(), 5
        FROM unnest(CAST(:ids AS uuid[])) AS id
        """,
        {"ids": ids, "destination": destination.id},
    )
    await world.execute(f"UPDATE deliveries SET {STATES[state]}")
    await world.execute(
        """
        INSERT INTO payloads (delivery_id, destination_id, tenant, event_id, content_type, body_sha256, body)
        SELECT id, destination_id, tenant, id::text, 'application/json', '', '1' FROM deliveries
        """
    )
    return ids


async def indexes_of(world: World, statement: Statement, values: dict[str, Any]) -> set[str]:
    """The indexes, or sequentially read tables, that a plan touches: their partitioned parents' names."""
    [row] = await world.fetch(f"EXPLAIN (FORMAT JSON) {statement.text}", values)
    found: set[str] = set()

    def walk(node: dict[str, Any]) -> None:
        if "Index Name" in node:
            found.add(node["Index Name"])
        elif node["Node Type"] == "Seq Scan":
            found.add(f"seq:{node['Relation Name']}")
        for child in node.get("Plans", ()):
            walk(child)

    walk(json.loads(row["QUERY PLAN"])[0]["Plan"])
    return found


def on_deliveries(indexes: set[str]) -> set[str]:
    """What is read of the one partition that holds the rows."""
    [week] = partitions.weeks(dt.datetime.now(dt.UTC), ahead=0)
    return {name for name in indexes if f"deliveries_{week.suffix}" in name}


async def before_and_after(world: World, state_at_statistics: str, state: str) -> list[uuid.UUID]:
    """Rows in `state`, with statistics that were taken while all were in another."""
    ids = await fill(world, state_at_statistics)
    await world.execute("ANALYZE deliveries")
    await world.execute(
        f"UPDATE deliveries SET wake_at = now(), lease_until = NULL, completed_at = NULL, {STATES[state]}"
        if state == "pending"
        else f"UPDATE deliveries SET completed_at = NULL, {STATES[state]}"
        if state == "delivering"
        else f"UPDATE deliveries SET lease_until = NULL, {STATES[state]}"
    )
    return ids


@pytest.mark.parametrize("at_statistics", ["pending", "delivered"])
async def test_a_claim_goes_by_the_primary_key(world: World, at_statistics: str) -> None:
    ids = await before_and_after(world, at_statistics, "pending")
    used = on_deliveries(
        await indexes_of(world, attempting._CLAIM.everywhere, {"ids": ids[:50], "worker": "w", "margin_seconds": 15.0})
    )
    assert used
    assert all(name.endswith("_pkey") for name in used), used


@pytest.mark.parametrize("at_statistics", ["delivering", "delivered"])
async def test_a_settle_goes_by_the_primary_key(world: World, at_statistics: str) -> None:
    ids = await before_and_after(world, at_statistics, "delivering")
    given = attempting._given(settlements(world, ids[:50]))
    used = on_deliveries(await indexes_of(world, attempting._SETTLE.everywhere, given))
    assert used
    assert all(name.endswith("_pkey") for name in used), used


@pytest.mark.parametrize("at_statistics", ["pending", "delivered"])
@pytest.mark.parametrize("statement", [dispatching._TAKE_DUE, dispatching._TAKE_UNSENDABLE], ids=["due", "unsendable"])
async def test_the_due_step_goes_by_wake_at(world: World, at_statistics: str, statement: Statement) -> None:
    await before_and_after(world, at_statistics, "pending")
    used = on_deliveries(await indexes_of(world, statement, {"visibility_seconds": 2.0, "batch": 100}))
    assert any("wake_at" in name for name in used), used
    assert not any(name.startswith("seq:") for name in used), used


async def test_the_rescue_goes_by_lease(world: World) -> None:
    await before_and_after(world, "delivered", "delivered")
    used = on_deliveries(
        await indexes_of(world, dispatching._LOST, {"stale_seconds": 10.0, "skipped": [], "batch": 100})
    )
    assert used
    assert all("lease_until" in name for name in used), used


def settlements(world: World, ids: Sequence[uuid.UUID]) -> list[Settlement]:
    now = world.clock.now()
    return [
        Settlement(
            delivery_id=delivery_id,
            number=1,
            scheduled_at=now,
            claimed_at=now,
            trigger="schedule",
            worker="w",
            outcome=Outcome.SUCCESS,
            decision=Complete(),
            exchange=Exchange(Phase.RESPONDED, 1, 200),
        )
        for delivery_id in ids
    ]


PLAN = """
CREATE OR REPLACE FUNCTION pg_temp.plan_of(statement text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE plan text;
BEGIN EXECUTE 'EXPLAIN (GENERIC_PLAN, FORMAT JSON) ' || statement INTO plan; RETURN plan; END $$
"""


@pytest.mark.parametrize(
    ("weekly", "by_key"),
    [(accepting._INSERT, False), (attempting._CLAIM, True), (attempting._SETTLE, True)],
    ids=["insert", "claim", "settle"],
)
@pytest.mark.parametrize("place", ["in its week", "everywhere"])
async def test_no_batch_costs_as_its_square(database_url: str, weekly: Weekly, by_key: bool, place: str) -> None:
    """A nested loop with a join filter compares each row of a batch with each other: 100 rows cost 10,000 looks."""
    ledger = open_ledger(
        database_url,
        connections_max=1,
        acquire_timeout_seconds=5.0,
        statement_timeout_seconds=5.0,
        name="plans",
        by_key=by_key,
    )
    [week] = partitions.weeks(dt.datetime.now(dt.UTC), ahead=0)
    statement = weekly.everywhere if place == "everywhere" else weekly._remembered(week.suffix, alone=False)
    try:
        async with ledger.transaction() as connection:
            await connection.execute(Statement(PLAN))
            [row] = await connection.rows(
                Statement("SELECT pg_temp.plan_of(:statement) AS plan"), {"statement": statement.sql}
            )
    finally:
        await ledger.close()
    filters: list[str] = []

    def walk(node: dict[str, Any]) -> None:
        if "Join Filter" in node:
            filters.append(node["Join Filter"])
        for child in node.get("Plans", ()):
            walk(child)

    walk(json.loads(row["plan"])[0]["Plan"])
    assert not filters
