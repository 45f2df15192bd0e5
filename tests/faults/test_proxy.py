"""The proxy itself: each fault is what it says, and Postgres took part or did not."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import asyncpg
import pytest

from tests.accepting import Accepting
from tests.faults.harness import until
from tests.faults.proxy import Fault, PostgresWire, Proxy

SILENT_SECONDS = 0.3  # how long a silence is listened to


@pytest.fixture
async def heard() -> list[bytes]:
    return []


@pytest.fixture
async def proxy(heard: list[bytes]) -> AsyncIterator[Proxy]:
    """Before a server that answers each line with the line."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                heard.append(line)
                writer.write(line)

    async with Accepting(answer) as server, Proxy(f"line://127.0.0.1:{server.port}") as made:
        yield made


class Client:
    """One connection to the proxy."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, proxy: Proxy) -> Client:
        port = int(proxy.url.rpartition(":")[2])
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def ask(self, line: bytes) -> bytes | None:
        """The answer; None when the connection ended."""
        try:
            self._writer.write(line)
            return await self._reader.readuntil(b"\n")
        except (ConnectionError, asyncio.IncompleteReadError):
            return None

    async def hears_nothing(self, line: bytes) -> bool:
        self._writer.write(line)
        try:
            async with asyncio.timeout(SILENT_SECONDS):
                await self._reader.read(1)
        except TimeoutError:
            return True
        return False

    def close(self) -> None:
        self._writer.transport.abort()


@pytest.fixture
async def client(proxy: Proxy) -> AsyncIterator[Client]:
    made = await Client.connect(proxy)
    yield made
    made.close()


async def test_without_a_fault_everything_passes_both_ways(proxy: Proxy, client: Client) -> None:
    assert [await client.ask(b"one\n"), await client.ask(b"two\n")] == [b"one\n", b"two\n"]
    assert proxy.connections_count == 1


async def test_a_cut_ends_the_connections_that_stand_and_no_later_one(proxy: Proxy, client: Client) -> None:
    assert await client.ask(b"one\n") == b"one\n"
    proxy.cut()
    assert await client.ask(b"two\n") is None
    later = await Client.connect(proxy)
    assert await later.ask(b"three\n") == b"three\n"
    later.close()


async def test_a_cut_before_keeps_the_request_from_the_server_and_comes_once(
    proxy: Proxy, client: Client, heard: list[bytes]
) -> None:
    struck = proxy.on(b"two", Fault.CUT_BEFORE)
    assert await client.ask(b"one\n") == b"one\n"
    assert await client.ask(b"two\n") is None
    assert (struck.is_set(), heard) == (True, [b"one\n"])
    again = await Client.connect(proxy)
    assert await again.ask(b"two\n") == b"two\n"
    again.close()


async def test_a_cut_after_lets_the_server_act_and_loses_its_answer(
    proxy: Proxy, client: Client, heard: list[bytes]
) -> None:
    proxy.on(b"t", Fault.CUT_AFTER, nth=2)
    assert await client.ask(b"two\n") == b"two\n"
    assert await client.ask(b"three\n") is None
    assert heard == [b"two\n", b"three\n"]


async def test_a_silent_connection_stays_open_and_says_nothing_until_it_is_cut(
    proxy: Proxy, client: Client, heard: list[bytes]
) -> None:
    proxy.silence()
    later = await Client.connect(proxy)
    assert await client.hears_nothing(b"one\n")
    assert await later.hears_nothing(b"two\n")
    assert heard == []
    proxy.heal()
    assert await client.ask(b"three\n") is None
    healed = await Client.connect(proxy)
    assert await healed.ask(b"four\n") == b"four\n"
    healed.close()
    later.close()


async def test_one_connection_may_fall_silent_alone(proxy: Proxy, client: Client) -> None:
    proxy.on(b"one", Fault.SILENCE)
    assert await client.hears_nothing(b"one\n")
    other = await Client.connect(proxy)
    assert await other.ask(b"two\n") == b"two\n"
    other.close()


async def test_who_is_refused_may_come_again_at_the_same_address(proxy: Proxy) -> None:
    url = proxy.url
    await proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        await Client.connect(proxy)
    await proxy.accept()
    assert proxy.url == url
    client = await Client.connect(proxy)
    assert await client.ask(b"one\n") == b"one\n"
    client.close()


async def test_a_delay_is_added_to_every_request(proxy: Proxy, client: Client) -> None:
    proxy.delay_seconds = 0.2
    started = time.monotonic()
    assert await client.ask(b"one\n") == b"one\n"
    assert time.monotonic() - started >= 0.2


@pytest.fixture
async def postgres(database_url: str) -> AsyncIterator[Proxy]:
    async with Proxy(database_url, PostgresWire) as made:
        connection = await asyncpg.connect(database_url)
        await connection.execute("CREATE TABLE noted (word text)")
        await connection.close()
        yield made


async def words(database_url: str) -> list[str]:
    connection = await asyncpg.connect(database_url)
    try:
        return [row["word"] for row in await connection.fetch("SELECT word FROM noted ORDER BY word")]
    finally:
        await connection.close()


NOTE = "INSERT INTO noted VALUES ($1)"


@pytest.mark.parametrize(("fault", "left"), [(Fault.CUT_BEFORE, ["a"]), (Fault.CUT_AFTER, ["a", "b"])])
async def test_a_prepared_statement_is_met_when_it_is_executed_again(
    postgres: Proxy, database_url: str, fault: Fault, left: list[str]
) -> None:
    connection = await asyncpg.connect(postgres.url)
    statement = await connection.prepare(NOTE)
    await statement.fetch("a")
    postgres.on(b"INTO noted", fault)
    with pytest.raises((OSError, asyncpg.PostgresConnectionError)):
        await statement.fetch("b")

    async def as_expected() -> bool:
        return await words(database_url) == left

    await until(as_expected, f"{left} in the table")


@pytest.mark.parametrize(("fault", "left"), [(Fault.CUT_BEFORE, []), (Fault.CUT_AFTER, ["a"])])
async def test_a_commit_is_cut_before_or_after_it_took_effect(
    postgres: Proxy, database_url: str, fault: Fault, left: list[str]
) -> None:
    connection = await asyncpg.connect(postgres.url)
    postgres.on(b"COMMIT;", fault)
    with pytest.raises((OSError, asyncpg.PostgresConnectionError)):
        async with connection.transaction():
            await connection.execute(NOTE, "a")

    async def as_expected() -> bool:
        return await words(database_url) == left

    await until(as_expected, f"{left} in the table")


async def test_a_failure_is_said_in_the_servers_stead_and_the_connection_goes_on(
    postgres: Proxy, database_url: str
) -> None:
    connection = await asyncpg.connect(postgres.url)
    postgres.on(b"INTO noted", Fault.FAIL)
    with pytest.raises(asyncpg.SerializationError):
        await connection.execute(NOTE, "a")
    await connection.execute(NOTE, "b")
    await connection.close()
    assert await words(database_url) == ["b"]
