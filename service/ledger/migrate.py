"""Migrations: run by `hookledger migrate`, asked about by everyone else before they start.

A ledger that is behind this code is refused; one that is ahead is accepted, because migrations
expand before they contract and code of the release before must run on the schema after.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import asyncpg
import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from alembic.util import CommandError
from sqlalchemy.exc import DBAPIError

from service.errors import LedgerRefused, StartError
from service.ledger.session import Ledger, rows
from service.settings import Settings

POSTGRES_MAJOR_MIN = 15
_SCRIPTS = Path(__file__).resolve().parents[2] / "alembic"

_VERSION = sa.text("""
SELECT current_setting('server_version_num')::int / 10000 AS major, to_regclass('alembic_version') IS NULL AS bare
""")
_REVISION = sa.text("SELECT version_num FROM alembic_version")


def upgrade(settings: Settings) -> None:
    """Bring the ledger to this code's schema. Raises StartError."""
    url = settings.database_url.get_secret_value()
    config = _config(url)
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise StartError(
            "The database was migrated by a newer version of Hookledger; run that version, or restore a backup."
        ) from error
    except (DBAPIError, asyncpg.PostgresError, OSError, TimeoutError) as error:
        raise StartError(_sentence(error)) from error


def _config(url: str) -> Config:
    config = Config()
    config.set_main_option("script_location", str(_SCRIPTS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.set_main_option("sqlalchemy.url", url.replace("%", "%%"))
    return config


@functools.cache
def _script() -> ScriptDirectory:
    return ScriptDirectory.from_config(_config("postgresql://"))


def _sentence(error: Exception) -> str:
    """What keeps a migration from running, by the error's type."""
    cause: Any = getattr(error, "orig", None)
    cause = getattr(cause, "__cause__", None) or error
    match cause:
        case asyncpg.InvalidPasswordError() | asyncpg.InvalidAuthorizationSpecificationError():
            return "The database refuses the user or password in DATABASE_URL."
        case asyncpg.InvalidCatalogNameError():
            return "The database named in DATABASE_URL does not exist: create it first."
        case asyncpg.InsufficientPrivilegeError():
            return "The user in DATABASE_URL may not create tables: migrate as the database's owner."
        case asyncpg.LockNotAvailableError():
            return "A table is in use and could not be locked in time: migrate again at a quieter moment."
        case asyncpg.CannotConnectNowError() | OSError() | TimeoutError() | asyncpg.PostgresConnectionError():
            return "The database in DATABASE_URL does not answer: check its address, and that it is running."
        case _:
            return f"The migration failed: {type(cause).__name__}."


async def check_migrated(ledger: Ledger) -> str | None:
    """None when the ledger fits this code, otherwise one plain sentence. Raises LedgerUnavailable."""
    async with ledger.statement() as connection:
        [server] = await rows(connection, _VERSION, {})
        if server["major"] < POSTGRES_MAJOR_MIN:
            return f"Postgres {server['major']} is too old: Hookledger needs {POSTGRES_MAJOR_MIN} or later."
        try:
            found = [] if server["bare"] else await rows(connection, _REVISION, {})
        except LedgerRefused:
            found = []
    current = found[0]["version_num"] if found else None
    ours = [revision.revision for revision in _script().walk_revisions()]  # newest first
    if current is None:
        return "The ledger has no tables yet: run `hookledger migrate`."
    behind_count = ours.index(current) if current in ours else 0
    if behind_count:
        return f"The ledger is behind by {behind_count} migration(s): run `hookledger migrate`."
    return None
