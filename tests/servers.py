"""Real servers for the tests: one Postgres and one Redis for a session, one database for a test.

The rule: nothing outlives pytest, not even its SIGKILL, and no test sees another's rows. With xdist
each process has servers of its own, so that a test may flush, pause or kill them. `DATABASE_URL`
and `REDIS_URL` name servers to use instead; the role in `DATABASE_URL` must be allowed to create
databases.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import tempfile
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest
import redis

from service.embedded.folder import DataFolder
from service.embedded.postgres import EmbeddedPostgres
from service.embedded.redis import EmbeddedRedis

SECRET_KEYS: Final = "test:MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="
ADMIN_SECONDS: Final = 60.0
REDIS_DATABASES: Final = 16


class Servers:
    """A running Postgres and Redis. `postgres` and `redis` are None when the servers were given to us."""

    def __init__(
        self, database_url: str, redis_url: str, postgres: EmbeddedPostgres | None, redis: EmbeddedRedis | None
    ) -> None:
        self.redis_url = redis_url
        self.postgres = postgres
        self.redis = redis
        self._admin_url = database_url
        self._numbers = count(1)

    def create_database(self, template: str | None = None) -> str:
        """Make a database, empty or a copy of another by name, and return its URL."""
        name = f"hookledger_{os.getpid()}_{next(self._numbers)}"
        # Copying files takes a third of the time of the default strategy for a small template.
        copy = f"TEMPLATE {template} STRATEGY file_copy" if template is not None else "TEMPLATE template0"
        self.execute(f"CREATE DATABASE {name} {copy}")
        return self.url_of(name)

    def drop_database(self, url: str) -> None:
        """Drop a database that `create_database` made, and whoever is connected to it."""
        try:
            self.execute(f"DROP DATABASE IF EXISTS {name_of(url)} WITH (FORCE)")
        except asyncpg.InsufficientPrivilegeError:
            # Autovacuum is in it, which is the superuser's to end; the database goes with the server.
            return

    def url_of(self, name: str) -> str:
        """The URL of a database on this server."""
        return urlunsplit(urlsplit(self._admin_url)._replace(path=f"/{name}"))

    def execute(self, statement: str) -> None:
        """Run one statement in autocommit on the maintenance connection's database."""
        _run_aside(_execute(self._admin_url, statement))


def name_of(url: str) -> str:
    """The database that a URL names."""
    return urlsplit(url).path.lstrip("/")


@contextmanager
def running_servers(*, database_url: str | None = None, redis_url: str | None = None) -> Iterator[Servers]:
    """The given servers, or embedded ones in a folder that goes away with them."""
    with ExitStack() as stack:
        postgres: EmbeddedPostgres | None = None
        server: EmbeddedRedis | None = None
        if database_url is None or redis_url is None:
            folder = stack.enter_context(DataFolder.open(stack.enter_context(temporary_folder())))
            if database_url is None:
                postgres = EmbeddedPostgres(folder, fast=True)
                stack.callback(postgres.stop)
                database_url = postgres.start()
            if redis_url is None:
                server = EmbeddedRedis(folder)
                stack.callback(server.stop)
                redis_url = server.start()
        yield Servers(database_url, redis_url, postgres, server)


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that root's servers, which run as another user, can reach. (pytest's own are closed to them.)"""
    folder = Path(tempfile.mkdtemp(prefix="hookledger-test-"))
    folder.chmod(0o711)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    """The session's Postgres and Redis."""
    with running_servers(
        database_url=os.environ.get("DATABASE_URL"), redis_url=_own_redis_database(os.environ.get("REDIS_URL"))
    ) as session_servers:
        yield session_servers


@pytest.fixture(scope="session")
def template_database(servers: Servers) -> Iterator[str]:
    """The name of a database at the newest migration. Nobody may be connected to it."""
    url = servers.create_database()
    _migrate(url, servers.redis_url)
    yield name_of(url)
    servers.drop_database(url)


@pytest.fixture
def database_url(servers: Servers, template_database: str) -> Iterator[str]:
    """A migrated database of this test's own."""
    url = servers.create_database(template_database)
    yield url
    servers.drop_database(url)


@pytest.fixture
def empty_database_url(servers: Servers) -> Iterator[str]:
    """A database of this test's own without a table in it."""
    url = servers.create_database()
    yield url
    servers.drop_database(url)


@pytest.fixture
def redis_url(servers: Servers) -> str:
    """A Redis database with nothing in it."""
    with redis.Redis.from_url(servers.redis_url) as client:
        client.flushdb()
    return servers.redis_url


def _migrate(database_url: str, redis_url: str) -> None:
    from service.ledger import migrate
    from service.settings import Settings

    migrate.upgrade(
        Settings.model_validate({"database_url": database_url, "redis_url": redis_url, "secret_keys": SECRET_KEYS})
    )


def _own_redis_database(url: str | None) -> str | None:
    """On a given Redis, the xdist processes keep apart by database number."""
    worker = re.fullmatch(r"gw(\d+)", os.environ.get("PYTEST_XDIST_WORKER", ""))
    if url is None or worker is None:
        return url
    parts = urlsplit(url)
    number = (int(parts.path.strip("/") or 0) + int(worker[1])) % REDIS_DATABASES
    return urlunsplit(parts._replace(path=f"/{number}"))


async def _execute(url: str, statement: str) -> None:
    connection = await asyncpg.connect(url, timeout=10.0)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


def _run_aside(work: Coroutine[Any, Any, None]) -> None:
    """Run to the end in a thread of its own, so that it works inside a test's running loop too."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        pool.submit(asyncio.run, work).result(ADMIN_SECONDS)
