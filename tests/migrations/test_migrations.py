"""Migrations and models are one schema, however a database came to it."""

from __future__ import annotations

import asyncio
import datetime as dt
import os
import sys
from collections.abc import Callable
from pathlib import Path

import asyncpg
import pytest
import sqlalchemy as sa
from alembic import command
from sqlalchemy.ext.asyncio import create_async_engine
from sqlmodel import SQLModel

from service.errors import LedgerRefused, StartError
from service.ledger import migrate, partitions, tables
from service.ledger.session import Ledger, open_ledger, sqlalchemy_url
from service.settings import Settings
from tests.servers import SECRET_KEYS, Servers, name_of
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


def opened(url: str) -> Ledger:
    return open_ledger(
        url, connections_max=1, acquire_timeout_seconds=5.0, statement_timeout_seconds=10.0, name="migrations"
    )


async def test_the_migrated_schema_is_the_models(database_url: str, empty_database_url: str) -> None:
    engine = create_async_engine(sqlalchemy_url(empty_database_url))
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


async def test_a_partition_has_all_that_its_parent_has(ledger: Ledger) -> None:
    world = World(ledger)
    await partitions.ensure_ahead(ledger, dt.datetime.now(dt.UTC) + dt.timedelta(weeks=10), 0)
    differing = await world.fetch("""
        WITH parts AS (
            SELECT inhrelid, inhparent FROM pg_inherits JOIN pg_class ON oid = inhrelid WHERE relkind = 'r'
        ), lacking AS (
            SELECT inhrelid, attname FROM parts JOIN pg_attribute parent ON parent.attrelid = inhparent
            WHERE attnum > 0 AND NOT EXISTS (
                SELECT FROM pg_attribute own WHERE own.attrelid = inhrelid AND own.attname = parent.attname
                    AND own.atttypid = parent.atttypid AND own.attnotnull = parent.attnotnull
                    AND own.attstorage = parent.attstorage AND own.atthasdef = parent.atthasdef
            )
        ), counted AS (
            SELECT inhrelid,
                (SELECT count(*) FROM pg_index WHERE indrelid = inhrelid AND indisvalid) AS own,
                (SELECT count(*) FROM pg_index WHERE indrelid = inhparent) AS parents,
                (SELECT count(*) FROM pg_constraint WHERE conrelid = inhrelid AND contype = 'c') AS own_checks,
                (SELECT count(*) FROM pg_constraint WHERE conrelid = inhparent AND contype = 'c') AS parents_checks
            FROM parts
        )
        SELECT inhrelid::regclass::text FROM lacking
        UNION ALL
        SELECT inhrelid::regclass::text FROM counted WHERE own <> parents OR own_checks <> parents_checks
    """)
    assert differing == []
    bodies = await world.fetch("""
        SELECT DISTINCT attstorage::text FROM pg_attribute
        WHERE attname = 'body' AND attrelid IN (SELECT inhrelid FROM pg_inherits WHERE inhparent = 'payloads'::regclass)
    """)
    assert [row["attstorage"] for row in bodies] == ["e"]


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


async def test_one_row_in_a_default_partition_does_not_keep_the_other_weeks_from_being_made(ledger: Ledger) -> None:
    world = World(ledger)
    destination = await world.destination()
    later = dt.datetime.now(dt.UTC) + dt.timedelta(weeks=10)
    first, second = partitions.weeks(later, ahead=1)
    await world.accepted(destination.id, id=first.first)
    with pytest.raises(LedgerRefused, match=f"deliveries_{first.suffix}, payloads_{first.suffix}$"):
        await partitions.ensure_ahead(ledger, later, 1)
    # The stray is still found where it was, and its neighbours are accepted.
    await world.accepted(destination.id, id=second.first)
    found = await world.fetch("SELECT tableoid::regclass::text AS partition FROM deliveries ORDER BY id")
    assert [row["partition"] for row in found] == ["deliveries_default", f"deliveries_{second.suffix}"]


async def test_a_table_that_is_read_at_length_is_given_up_soon_and_not_called_an_outage(
    ledger: Ledger, database_url: str
) -> None:
    later = dt.datetime.now(dt.UTC) + dt.timedelta(weeks=10)
    dump = await asyncpg.connect(database_url)
    try:
        async with dump.transaction():
            await dump.execute("LOCK TABLE payloads_default IN ACCESS SHARE MODE")
            with pytest.raises(LedgerRefused, match="payloads is in use"):
                await partitions.ensure_ahead(ledger, later, 0)
        made = await partitions.ensure_ahead(ledger, later, 0)
    finally:
        await dump.close()
    assert [name.partition("_")[0] for name in made] == ["payloads", "attempts"]


async def test_with_nothing_to_make_no_lock_is_asked_for(ledger: Ledger, database_url: str) -> None:
    other = await asyncpg.connect(database_url)
    try:
        async with other.transaction():
            await other.execute("LOCK TABLE deliveries, payloads, attempts IN EXCLUSIVE MODE")
            await other.execute("SELECT pg_advisory_xact_lock($1)", partitions._LOCK)
            assert await partitions.ensure_ahead(ledger, dt.datetime.now(dt.UTC)) == []
    finally:
        await other.close()


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


def nowhere(url: str) -> str:
    return url.rsplit("/", 1)[0] + "/nowhere"


def stranger(url: str) -> str:
    return url.replace("://", "://nobody_", 1)


def closed_port(_: str) -> str:
    return "postgresql://u:p@127.0.0.1:1/x"


def unreadable(_: str) -> str:
    return "postgresql://u:p@127.0.0.1:port/x"


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (nowhere, "The database named in DATABASE_URL does not exist: create it first."),
        (closed_port, "The database in DATABASE_URL does not answer: check its address, and that it is running."),
        (stranger, "The database refuses the user or password in DATABASE_URL."),
        (unreadable, "DATABASE_URL cannot be read: is it postgresql://user:password@host:port/name?"),
    ],
)
async def test_what_keeps_a_migration_from_running_is_one_sentence(
    empty_database_url: str, spoil: Callable[[str], str], sentence: str
) -> None:
    with pytest.raises(StartError) as refused:
        await asyncio.to_thread(migrate.upgrade, settings_for(spoil(empty_database_url)))
    assert str(refused.value) == sentence


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [(nowhere, "does not exist"), (stranger, "refuses the user or password")],
)
async def test_a_ledger_that_lets_nobody_in_is_one_sentence(
    database_url: str, spoil: Callable[[str], str], sentence: str
) -> None:
    ledger = opened(spoil(database_url))
    try:
        assert sentence in str(await migrate.check_migrated(ledger))
    finally:
        await ledger.close()


async def test_a_user_who_may_not_create_or_read_tables_is_told_so(
    servers: Servers, empty_database_url: str, database_url: str
) -> None:
    connection = await asyncpg.connect(empty_database_url)
    try:
        if await connection.fetchval("SELECT rolsuper FROM pg_roles WHERE rolname = current_user"):
            pytest.skip("the role in DATABASE_URL may do everything")
        # The owner of a database may take rights from itself.
        await connection.execute("REVOKE CREATE ON SCHEMA public FROM pg_database_owner, PUBLIC")
    finally:
        await connection.close()
    with pytest.raises(StartError, match="may not create tables"):
        await asyncio.to_thread(migrate.upgrade, settings_for(empty_database_url))
    ledger = opened(database_url)
    try:
        await World(ledger).execute("REVOKE ALL ON alembic_version FROM CURRENT_USER")
        assert "may not read the ledger" in str(await migrate.check_migrated(ledger))
    finally:
        await ledger.close()


async def test_a_read_only_database_is_told_so(servers: Servers, empty_database_url: str) -> None:
    servers.execute(f"ALTER DATABASE {name_of(empty_database_url)} SET default_transaction_read_only = on")
    with pytest.raises(StartError, match="read-only"):
        await asyncio.to_thread(migrate.upgrade, settings_for(empty_database_url))


async def test_a_postgres_that_is_too_old_is_neither_migrated_nor_served(
    ledger: Ledger, empty_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrate, "POSTGRES_MAJOR_MIN", 99)
    with pytest.raises(StartError, match="is too old: Hookledger needs 99 or later"):
        await asyncio.to_thread(migrate.upgrade, settings_for(empty_database_url))
    assert not any((await catalog(empty_database_url)).values())
    assert "is too old" in str(await migrate.check_migrated(ledger))


async def test_an_installation_without_migrations_does_not_blame_the_database(
    empty_database_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(migrate, "_SCRIPTS", tmp_path / "alembic")
    with pytest.raises(StartError, match="lacks the folder alembic/"):
        await asyncio.to_thread(migrate.upgrade, settings_for(empty_database_url))


async def test_a_newer_database_is_not_migrated_by_older_code(database_url: str, ledger: Ledger) -> None:
    await World(ledger).execute("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(StartError, match="newer version"):
        await asyncio.to_thread(migrate.upgrade, settings_for(database_url))
