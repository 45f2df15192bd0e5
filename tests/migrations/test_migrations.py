"""Migrations and models are one schema, however a database came to it."""

from __future__ import annotations

import asyncio
import datetime as dt
import os
import sys

import asyncpg
import pytest
import sqlalchemy as sa
from alembic import command
from sqlalchemy.ext.asyncio import create_async_engine
from sqlmodel import SQLModel

from service.bootstrap import IdSource
from service.errors import LedgerRefused, StartError
from service.ledger import migrate, partitions, tables
from service.ledger.session import Ledger, async_url
from service.settings import Settings
from tests.servers import SECRET_KEYS, Servers
from tests.world import World

CATALOGS = {
    "columns": """
        SELECT c.relname, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity,
            pg_get_expr(d.adbin, d.adrelid)
        FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid LEFT JOIN pg_attrdef d
            ON d.adrelid = a.attrelid AND d.adnum = a.attnum
        WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p') AND a.attnum > 0
            AND NOT c.relispartition
    """,
    "constraints": """
        SELECT c.relname, k.conname, pg_get_constraintdef(k.oid)
        FROM pg_constraint k JOIN pg_class c ON c.oid = k.conrelid
        WHERE c.relnamespace = 'public'::regnamespace AND NOT c.relispartition
    """,
    "indexes": """
        SELECT c.relname, pg_get_indexdef(i.indexrelid) FROM pg_index i JOIN pg_class c ON c.oid = i.indrelid
        WHERE c.relnamespace = 'public'::regnamespace AND NOT c.relispartition
    """,
    "partitioning": "SELECT partrelid::regclass::text, pg_get_partkeydef(partrelid) FROM pg_partitioned_table",
}


async def catalog(url: str) -> dict[str, list[str]]:
    connection = await asyncpg.connect(url)
    try:
        return {
            name: sorted(
                str(tuple(row)) for row in await connection.fetch(query) if "alembic_version" not in str(tuple(row))
            )
            for name, query in CATALOGS.items()
        }
    finally:
        await connection.close()


def settings_for(url: str) -> Settings:
    return Settings.model_validate({"database_url": url, "redis_url": "redis://x/0", "secret_keys": SECRET_KEYS})


async def test_the_migrated_schema_is_the_models(database_url: str, empty_database_url: str) -> None:
    engine = create_async_engine(async_url(empty_database_url))
    async with engine.begin() as connection:
        await connection.run_sync(SQLModel.metadata.create_all)
    await engine.dispose()
    migrated, modelled = await catalog(database_url), await catalog(empty_database_url)
    assert migrated == modelled
    assert len(migrated["columns"]) > 100
    assert set(tables.PARTITIONED) == set(partitions.PARTITIONED)


async def test_down_leaves_nothing_and_up_again_works(empty_database_url: str) -> None:
    settings = settings_for(empty_database_url)
    await asyncio.to_thread(migrate.upgrade, settings)
    before = await catalog(empty_database_url)
    await asyncio.to_thread(command.downgrade, migrate._config(empty_database_url), "base")
    assert not any((await catalog(empty_database_url)).values())
    await asyncio.to_thread(migrate.upgrade, settings)
    assert await catalog(empty_database_url) == before


async def test_two_migrations_at_once_both_end_well(empty_database_url: str) -> None:
    environment = {
        **os.environ,
        "DATABASE_URL": empty_database_url,
        "REDIS_URL": "redis://127.0.0.1/0",
        "SECRET_KEYS": SECRET_KEYS,
    }
    both = [
        await asyncio.create_subprocess_exec(sys.executable, "-m", "service.cli", "migrate", env=environment)
        for _ in range(2)
    ]
    assert [await asyncio.wait_for(process.wait(), 60) for process in both] == [0, 0]


async def test_new_ids_land_in_this_weeks_partition(ledger: Ledger) -> None:
    world = World(ledger)
    destination = await world.destination()
    await world.accepted(destination.id)
    [row] = await world.fetch("SELECT tableoid::regclass::text AS partition FROM deliveries")
    [week] = partitions.weeks(dt.datetime.now(dt.UTC), ahead=0)
    assert row["partition"] == f"deliveries_{week.suffix}"


async def test_an_id_of_a_clock_far_off_finds_the_default_partition(ledger: Ledger) -> None:
    world = World(ledger)
    destination = await world.destination()
    far = partitions.weeks(dt.datetime(2060, 1, 1, tzinfo=dt.UTC), ahead=0)[0].first
    await world.accepted(destination.id, id=far)
    [row] = await world.fetch("SELECT tableoid::regclass::text AS partition FROM deliveries")
    assert row["partition"] == "deliveries_default"


async def test_partitions_are_made_ahead_once_by_two_at_once(ledger: Ledger) -> None:
    later = dt.datetime.now(dt.UTC) + dt.timedelta(weeks=10)
    made = await asyncio.gather(*(partitions.ensure_ahead(ledger, later, 2) for _ in range(2)))
    assert len(made[0]) + len(made[1]) == 9
    assert await partitions.ensure_ahead(ledger, later, 2) == []
    attached = await World(ledger).fetch("SELECT count(*) FROM pg_inherits WHERE inhparent = 'attempts'::regclass")
    assert attached[0]["count"] == 1 + 6 + 3


@pytest.mark.parametrize("deed", ["UPDATE audit_log SET actor = 'x'", "DELETE FROM audit_log", "TRUNCATE audit_log"])
async def test_the_audit_log_cannot_be_rewritten(ledger: Ledger, deed: str) -> None:
    world = World(ledger)
    await world.destination()
    with pytest.raises(LedgerRefused):
        await world.execute(deed)
    assert len(await world.fetch("SELECT 1 FROM audit_log")) == 1


async def test_a_ledger_that_is_bare_or_behind_or_ahead_is_told_apart(
    ledger: Ledger, empty_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await migrate.check_migrated(ledger) is None
    world = World(ledger)
    await world.execute("UPDATE alembic_version SET version_num = '9999'")
    assert await migrate.check_migrated(ledger) is None
    await world.execute("UPDATE alembic_version SET version_num = '0001'")

    class OneMore:
        def walk_revisions(self) -> list[sa.Row[tuple[str]]]:
            return [type("R", (), {"revision": name})() for name in ("0002", "0001")]

    monkeypatch.setattr(migrate, "_script", OneMore)
    assert await migrate.check_migrated(ledger) == "The ledger is behind by 1 migration(s): run `hookledger migrate`."
    await world.execute("DROP TABLE alembic_version")
    assert await migrate.check_migrated(ledger) == "The ledger has no tables yet: run `hookledger migrate`."


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda url: url.replace("@127.0.0.1", "@127.0.0.1").rsplit("/", 1)[0] + "/nowhere", "does not exist"),
        (lambda _: "postgresql://u:p@127.0.0.1:1/x", "does not answer"),
        (lambda url: url.replace("://", "://nobody_", 1), "refuses the user or password"),
    ],
)
async def test_what_keeps_a_migration_from_running_is_one_sentence(
    servers: Servers, empty_database_url: str, spoil: object, sentence: str
) -> None:
    assert callable(spoil)
    with pytest.raises(StartError, match=sentence):
        await asyncio.to_thread(migrate.upgrade, settings_for(spoil(empty_database_url)))


async def test_a_newer_database_is_not_migrated_by_older_code(database_url: str, ledger: Ledger) -> None:
    await World(ledger).execute("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(StartError, match="newer version"):
        await asyncio.to_thread(migrate.upgrade, settings_for(database_url))


def test_a_weeks_range_begins_with_the_ids_of_its_monday() -> None:
    [week] = partitions.weeks(dt.datetime(2026, 12, 2, 23, tzinfo=dt.UTC), ahead=0)
    assert week.suffix == "2026w49"
    assert int(week.first.int >> 80) == int(dt.datetime(2026, 11, 30, tzinfo=dt.UTC).timestamp() * 1000)
    assert week.first < IdSource()() or dt.datetime.now(dt.UTC) < dt.datetime(2026, 11, 30, tzinfo=dt.UTC)
    across = partitions.weeks(dt.datetime(2026, 12, 28, tzinfo=dt.UTC), ahead=1)
    assert [found.suffix for found in across] == ["2026w53", "2027w01"]
    assert across[0].end == across[1].first
