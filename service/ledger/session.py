"""The way to Postgres: `statement()` for one statement that commits itself, `transaction()` for several.

Nothing else in the service begins, commits or rolls back. Neither is ever open while a request is
on its way to a receiver: `transactions_open()` is what the sender's caller asserts.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import AsyncAdaptedQueuePool

from service.errors import LedgerBusy, LedgerRefused, LedgerUnavailable

Row = sa.RowMapping  # one row of an answer, by column name

_open_here: contextvars.ContextVar[int] = contextvars.ContextVar("ledger_connections_open", default=0)

# By SQLSTATE class: what says "not now" rather than "not this". 08 connection, 25 the session's state (read-only),
# 40 rollback (serialization, deadlock), 53 resources (disk full), 55P03 lock timeout, 57 operator
# intervention (shutdown, cancelled by statement_timeout), 58 system error.
_NOT_NOW = ("08", "25", "40", "53", "55P03", "57", "58")

_SESSION_STATE = "25"
_CONNECT_TIMEOUT_SECONDS = 5.0


class Ledger:
    """One process's connections to the ledger."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._autocommit = engine.execution_options(isolation_level="AUTOCOMMIT")

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[AsyncConnection]:
        """Several statements, one commit. Raises LedgerUnavailable, LedgerBusy or LedgerRefused."""
        with _translated(), _counted():
            async with self._engine.begin() as connection:
                yield connection

    @contextlib.asynccontextmanager
    async def statement(self) -> AsyncIterator[AsyncConnection]:
        """Statements that each commit themselves: one round trip where `transaction()` needs three."""
        with _translated(), _counted():
            async with self._autocommit.connect() as connection:
                yield connection

    async def close(self) -> None:
        """Close every connection."""
        await self._engine.dispose()


def open_ledger(
    database_url: str,
    *,
    connections_max: int,
    acquire_timeout_seconds: float,
    statement_timeout_seconds: float,
    name: str,
) -> Ledger:
    """Make the pool. Connects lazily; `name` shows in pg_stat_activity."""
    engine = create_async_engine(
        async_url(database_url),
        poolclass=AsyncAdaptedQueuePool,
        pool_size=connections_max,
        max_overflow=0,
        pool_timeout=acquire_timeout_seconds,
        # A dead connection shows itself as an error on the statement that meets it, and the whole
        # pool is replaced then; a ping before each statement would double every round trip.
        pool_pre_ping=False,
        isolation_level="READ COMMITTED",
        connect_args={
            "timeout": _CONNECT_TIMEOUT_SECONDS,
            "command_timeout": statement_timeout_seconds + 1.0,
            "server_settings": {
                "application_name": name,
                "timezone": "UTC",
                "jit": "off",
                "statement_timeout": str(int(statement_timeout_seconds * 1000)),
                "idle_in_transaction_session_timeout": "15000",
            },
        },
    )
    sa.event.listen(engine.sync_engine, "handle_error", _replace_session)
    return Ledger(engine)


def _replace_session(context: sa.engine.ExceptionContext) -> None:
    """A session that is not in the state that we take it to be in is of no more use than a dead one.

    25006: after a failover, it leads to what is a replica now. 25P01: its BEGIN failed, and the driver
    believes that a transaction goes on.
    """
    if str(getattr(context.original_exception, "sqlstate", None)).startswith(_SESSION_STATE):
        context.is_disconnect = True


def async_url(database_url: str) -> str:
    """The SQLAlchemy spelling of a plain `postgres://` or `postgresql://` URL."""
    parts = urlsplit(database_url)
    return urlunsplit(parts._replace(scheme="postgresql+asyncpg"))


def transactions_open() -> int:
    """How many ledger connections the current task holds."""
    return _open_here.get()


async def rows(connection: AsyncConnection, sql: sa.TextClause, values: Mapping[str, Any]) -> list[sa.RowMapping]:
    """Run one statement and read all its rows; the statement bounds how many that can be."""
    return list((await connection.execute(sql, values)).mappings())


@contextlib.contextmanager
def _counted() -> Iterator[None]:
    token = _open_here.set(_open_here.get() + 1)
    try:
        yield
    finally:
        _open_here.reset(token)


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Turn the driver's failures into ours: by type and SQLSTATE, never by message."""
    try:
        yield
    except PoolTimeoutError as error:
        raise LedgerBusy("no connection to the ledger became free in time") from error
    except DBAPIError as error:
        state = str(getattr(error.orig, "sqlstate", None) or "")
        if error.connection_invalidated or not state or state.startswith(_NOT_NOW):
            raise LedgerUnavailable("the ledger did not answer") from error
        if isinstance(error, InterfaceError | OperationalError):
            raise LedgerUnavailable("the ledger did not answer") from error
        raise LedgerRefused(f"the ledger refused a statement ({state})", state) from error
    except (OSError, TimeoutError, asyncpg.PostgresConnectionError, asyncpg.InterfaceError) as error:
        raise LedgerUnavailable("the ledger did not answer") from error
    except asyncpg.PostgresError as error:
        # While connecting: shutting down, starting up, too many connections, a wrong password.
        raise LedgerUnavailable("the ledger did not answer") from error
