"""One Postgres and one Redis to break, and for each test a stack of processes on a database of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import redis

from tests.faults.harness import BreakableServers, Stack, breakable_servers, migrated
from tests.faults.receiver import Receiver


@pytest.fixture(scope="session")
def breakable() -> Iterator[BreakableServers]:
    """Servers of these tests' own, whatever DATABASE_URL and REDIS_URL say: they are killed."""
    with breakable_servers() as servers:
        yield servers


@pytest.fixture(scope="session")
def ledger_with_key(breakable: BreakableServers) -> tuple[str, str]:
    """The name of a migrated database to copy, and the API key that it holds."""
    return migrated(breakable)


@pytest.fixture
async def stack(breakable: BreakableServers, ledger_with_key: tuple[str, str], tmp_path: Path) -> AsyncIterator[Stack]:
    """No process yet: a test starts what it needs. The logs are kept where pytest keeps a test's files."""
    template, api_key = ledger_with_key
    database_url = breakable.create_database(template)
    with redis.Redis.from_url(breakable.redis_url) as client:
        client.flushall()
    async with Receiver() as receiver:
        made = Stack(breakable, database_url, api_key, receiver, tmp_path)
        try:
            yield made
        finally:
            await made.close()
    breakable.drop_database(database_url)
