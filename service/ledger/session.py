"""The way to Postgres: `statement()` for one statement that commits itself, `transaction()` for several.

Nothing else in the service begins, commits or rolls back. Neither is ever open while a request is
on its way to a receiver: `transactions_open()` is what the sender's caller asserts.

The driver is used as it is, without SQLAlchemy's layers, which cost several times what a statement
does ([ADR 0011](../../docs/adr/0011-the-driver-itself.md)).
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Final, TypeAlias
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import msgspec
from asyncpg.pool import PoolConnectionProxy

from service.errors import LedgerBusy, LedgerRefused, LedgerUnavailable

Row = asyncpg.Record  # one row of an answer, by column name
_Driver: TypeAlias = "PoolConnectionProxy[asyncpg.Record]"

_open_here: contextvars.ContextVar[int] = contextvars.ContextVar("ledger_connections_open", default=0)

# By SQLSTATE class: what says "not now" rather than "not this". 08 connection, 25 the session's state (read-only),
# 40 rollback (serialization, deadlock), 53 resources (disk full), 55P03 lock timeout, 57 operator
# intervention (shutdown, cancelled by statement_timeout), 58 system error.
_NOT_NOW: Final = ("08", "25", "40", "53", "55P03", "57", "58")

# Of these, what says that the session is of no more use, and that its sisters may not be either. 25006: after a
# failover, it leads to what is a replica now; 25P01: its BEGIN failed, and the driver believes that a transaction
# goes on. 57P: the server is going.
_SESSION_LOST: Final = ("08", "25", "57P")

_CONNECT_TIMEOUT_SECONDS: Final = 5.0
_CLOSE_TIMEOUT_SECONDS: Final = 2.0

# Of a role whose statements find every row by its key: they are planned once for whatever values, for planning
# costs as much as executing; and always as a walk from key to row, whatever a table that was new and small when they
# were planned has become since.
_BY_KEY: Final = {"plan_cache_mode": "force_generic_plan", "enable_hashjoin": "off", "enable_mergejoin": "off"}

_NO_VALUES: Final[Mapping[str, Any]] = {}

# A name after a colon. Not `::`, which is a cast.
_PLACEHOLDER: Final = re.compile(r"(?<![:\w]):([a-z_][a-z0-9_]*)")


class Statement:
    """One SQL statement with named values, `:name`: the driver's `$1` are put in their place here."""

    __slots__ = ("names", "sql", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        names: dict[str, int] = {}
        self.sql = _PLACEHOLDER.sub(lambda found: f"${names.setdefault(found[1], len(names) + 1)}", text)
        self.names = tuple(names)

    def arguments(self, values: Mapping[str, Any]) -> list[Any]:
        """The values in the order of the placeholders. Raises KeyError for one that is missing."""
        return [values[name] for name in self.names]


class Connection:
    """One of the ledger's connections, while a story has it."""

    __slots__ = ("_driver",)

    def __init__(self, driver: _Driver) -> None:
        self._driver = driver

    async def execute(self, statement: Statement, values: Mapping[str, Any] = _NO_VALUES) -> None:
        """Run a statement whose answer does not matter."""
        await self._driver.execute(statement.sql, *statement.arguments(values))

    async def rows(self, statement: Statement, values: Mapping[str, Any] = _NO_VALUES) -> list[Row]:
        """Run a statement and read all its rows; the statement bounds how many that can be."""
        return await self._driver.fetch(statement.sql, *statement.arguments(values))


class Ledger:
    """One process's connections to the ledger. They are made when they are needed."""

    def __init__(self, acquire_timeout_seconds: float, **options: Any) -> None:
        self._acquire_timeout_seconds = acquire_timeout_seconds
        self._options = options
        self._pool: asyncpg.Pool[Row] | None = None

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Connection]:
        """Several statements, one commit. Raises LedgerUnavailable, LedgerBusy or LedgerRefused."""
        async with self._connection() as driver, driver.transaction(isolation="read_committed"):
            yield Connection(driver)

    @contextlib.asynccontextmanager
    async def statement(self) -> AsyncIterator[Connection]:
        """Statements that each commit themselves: one round trip where `transaction()` needs three."""
        async with self._connection() as driver:
            yield Connection(driver)

    async def close(self) -> None:
        """Close every connection."""
        if self._pool is not None:
            try:
                async with asyncio.timeout(_CLOSE_TIMEOUT_SECONDS):
                    await self._pool.close()
            except (OSError, TimeoutError, asyncpg.InterfaceError, asyncpg.PostgresError):
                self._pool.terminate()

    @contextlib.asynccontextmanager
    async def _connection(self) -> AsyncIterator[_Driver]:
        with _translated():
            pool = await self._open_pool()
            try:
                async with asyncio.timeout(self._acquire_timeout_seconds):
                    driver = await pool.acquire()
            except TimeoutError:
                raise LedgerBusy("no connection to the ledger became free in time") from None
            token = _open_here.set(_open_here.get() + 1)
            try:
                yield driver
            except BaseException as error:
                await _judge_session(pool, driver, error)
                raise
            finally:
                _open_here.reset(token)
                await pool.release(driver)

    async def _open_pool(self) -> asyncpg.Pool[Row]:
        if self._pool is None:
            self._pool = asyncpg.create_pool(min_size=0, reset=_as_it_is, init=_set_codecs, **self._options)
            await self._pool  # with nothing to connect, this does not let go of the loop
        return self._pool


async def _judge_session(pool: asyncpg.Pool[Row], driver: _Driver, error: BaseException) -> None:
    """A session that is not in the state that we take it to be in is of no more use than a dead one.

    A dead connection shows itself as an error on the statement that meets it, and the whole pool is
    replaced then; a ping before each statement would double every round trip.
    """
    if isinstance(error, asyncpg.PostgresError):
        lost = _sqlstate(error).startswith(_SESSION_LOST)
    else:
        lost = isinstance(error, (OSError, TimeoutError, asyncpg.InterfaceError, asyncpg.InternalClientError))
    if lost:
        await pool.expire_connections()  # each is replaced when it is next asked for
    if lost or isinstance(error, asyncio.CancelledError):  # cancelled: whether the statement is over is not known
        driver.terminate()


async def _as_it_is(_: object) -> None:
    """Statements leave nothing behind in their session, so nothing is reset: that is a round trip."""


async def _set_codecs(driver: asyncpg.Connection[Row]) -> None:
    """A jsonb value is written as JSON text and read as what it says."""
    await driver.set_type_codec("jsonb", schema="pg_catalog", encoder=str, decoder=msgspec.json.decode, format="text")


def open_ledger(
    database_url: str,
    *,
    connections_max: int,
    acquire_timeout_seconds: float,
    statement_timeout_seconds: float,
    name: str,
    by_key: bool = False,
) -> Ledger:
    """Make the pool. Connects lazily; `name` shows in pg_stat_activity.

    `by_key`: for a role whose statements all find their rows by keys. They are planned once, as walks from key to row.
    """
    return Ledger(
        acquire_timeout_seconds,
        dsn=database_url,
        max_size=connections_max,
        timeout=_CONNECT_TIMEOUT_SECONDS,
        command_timeout=statement_timeout_seconds + 1.0,
        server_settings={
            "application_name": name,
            "timezone": "UTC",
            "jit": "off",
            # Every statement has its index. Without this, one that is planned while a week's partition is new and
            # empty reads all of it, and goes on to do so as it grows, until statistics are next taken.
            "enable_seqscan": "off",
            "random_page_cost": "1.1",
            **(_BY_KEY if by_key else {}),
            "default_transaction_isolation": "read committed",
            "statement_timeout": str(int(statement_timeout_seconds * 1000)),
            "idle_in_transaction_session_timeout": "15000",
        },
    )


def sqlalchemy_url(database_url: str) -> str:
    """The spelling of a plain `postgres://` or `postgresql://` URL that Alembic's engine takes."""
    parts = urlsplit(database_url)
    return urlunsplit(parts._replace(scheme="postgresql+asyncpg"))


def transactions_open() -> int:
    """How many ledger connections the current task holds."""
    return _open_here.get()


def _sqlstate(error: asyncpg.PostgresError) -> str:
    return str(error.sqlstate or "")


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Turn the driver's failures into ours: by type and SQLSTATE, never by message."""
    try:
        yield
    except asyncpg.PostgresError as error:
        state = _sqlstate(error)
        if not state or state.startswith(_NOT_NOW):
            raise LedgerUnavailable("the ledger did not answer") from error
        raise LedgerRefused(f"the ledger refused a statement ({state})", state) from error
    except (OSError, TimeoutError, asyncpg.InterfaceError, asyncpg.InternalClientError) as error:
        raise LedgerUnavailable("the ledger did not answer") from error
