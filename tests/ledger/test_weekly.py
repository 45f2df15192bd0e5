"""Statements that go straight to a week's partitions, and the ways on which they cannot."""

from __future__ import annotations

import datetime as dt
import uuid

import pytest

from service.domain.ids import uuid7
from service.errors import LedgerRefused
from service.ledger import attempting, partitions
from service.ledger.partitions import Weekly, week_of
from service.ledger.session import Connection, Ledger, Statement
from tests.world import World

MONDAY = dt.datetime(2026, 11, 30, tzinfo=dt.UTC)
READ = "SELECT d.id, tableoid::regclass::text AS table_name FROM {deliveries} d WHERE d.id = ANY(CAST(:ids AS uuid[]))"


def at(moment: dt.datetime) -> uuid.UUID:
    return uuid7(int(moment.timestamp() * 1_000), 7)


@pytest.mark.parametrize(
    ("moments", "week"),
    [
        ([MONDAY], "2026w49"),
        ([MONDAY, MONDAY + dt.timedelta(days=6, hours=23)], "2026w49"),
        ([MONDAY - dt.timedelta(milliseconds=1)], "2026w48"),
        ([MONDAY - dt.timedelta(milliseconds=1), MONDAY], None),
        ([dt.datetime(2027, 1, 3, 23, 59, tzinfo=dt.UTC)], "2026w53"),
        ([], None),
    ],
)
def test_the_week_of_ids_is_that_of_the_partition_that_holds_them(moments: list[dt.datetime], week: str | None) -> None:
    ids = [at(moment) for moment in moments]
    assert week_of(ids) == week
    if week is not None:
        [made] = partitions.weeks(moments[0], ahead=0)
        assert made.suffix == week
        assert all(made.first <= each < made.end for each in ids)


def test_an_id_of_no_time_that_a_calendar_knows_has_no_week() -> None:
    assert week_of([uuid.UUID(int=2**128 - 1)]) is None


async def test_a_statement_names_the_weeks_own_partition(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    real = Connection.rows

    async def noted(self: Connection, statement: Statement, *values: object) -> object:
        sent.append(statement.sql)
        return await real(self, statement, *values)  # type: ignore[arg-type]

    monkeypatch.setattr(Connection, "rows", noted)
    destination = await world.destination()
    delivery_id = await world.accepted(destination.id)
    [claim] = await attempting.claim(world.ledger, [delivery_id], worker="w", lease_margin_seconds=15.0)
    assert claim.delivery_id == delivery_id
    week = week_of([delivery_id])
    assert f"INSERT INTO deliveries_{week} " in sent[-2]
    assert f"UPDATE deliveries_{week} d" in sent[-1]


async def test_a_week_without_a_partition_is_served_through_the_parents(world: World) -> None:
    long_ago = at(dt.datetime(2020, 6, 1, tzinfo=dt.UTC))
    destination = await world.destination()
    await world.execute(
        """
        INSERT INTO deliveries (id, destination_id, tenant, state, next_attempt_at, deadline_at, wake_at, attempts_max)
        VALUES (:id, :destination_id, 'default', 'pending', now(), now() + interval '1 day', now(), 3)
        """,
        {"id": long_ago, "destination_id": destination.id},
    )
    read = Weekly(READ)
    for _ in range(2):
        [row] = await read.rows(world.ledger, [long_ago], {"ids": [long_ago]})
        assert row["table_name"] == "deliveries_default"
    assert set(read._elsewhere) == {"2020w23"}, "asked once, and not again for a while"


async def test_a_role_without_a_right_to_the_partition_itself_is_served_through_the_parents(
    world: World, database_url: str, ledger: Ledger
) -> None:
    destination = await world.destination()
    delivery_id = await world.accepted(destination.id)
    week = week_of([delivery_id])
    await world.execute(f"REVOKE ALL ON deliveries_{week} FROM CURRENT_USER")
    read = Weekly(READ)
    [row] = await read.rows(ledger, [delivery_id], {"ids": [delivery_id]})
    assert row["table_name"] == f"deliveries_{week}"
    assert week in read._elsewhere


async def test_another_refusal_is_not_taken_for_a_missing_partition(world: World) -> None:
    delivery_id = await world.accepted((await world.destination()).id)
    wrong = Weekly("SELECT 1 / 0 AS nothing FROM {deliveries}")
    with pytest.raises(LedgerRefused, match="22012"):
        await wrong.rows(world.ledger, [delivery_id], {})
    assert not wrong._elsewhere
