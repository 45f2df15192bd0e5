"""Migrations: run by `hookledger migrate`, asked about by everyone else before they start.

A ledger that is behind this code is refused; one that is ahead is accepted, because migrations
expand before they contract and code of the release before must run on the schema after.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import asyncpg
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from alembic.script.revision import ResolutionError
from alembic.util import CommandError
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError

from service.errors import LedgerRefused, StartError
from service.ledger.session import Ledger, Statement, sqlalchemy_url
from service.settings import Settings

POSTGRES_MAJOR_MIN = 15
_SCRIPTS = Path(__file__).resolve().parents[2] / "alembic"

_VERSION = Statement("""
SELECT current_setting('server_version_num')::int / 10000 AS major, to_regclass('alembic_version') IS NULL AS bare
""")
_REVISION = Statement("SELECT version_num FROM alembic_version")
_INSUFFICIENT_PRIVILEGE = "42501"


def upgrade(settings: Settings) -> None:
    """Bring the ledger to this code's schema. Raises StartError."""
    url = settings.database_url.get_secret_value()
    if not (_SCRIPTS / "env.py").is_file():
        raise StartError("This installation lacks the folder alembic/: migrate from a checkout or from the image.")
    try:
        make_url(sqlalchemy_url(url))
    except (ArgumentError, ValueError):
        # `from None`: the error's text may hold a part of the URL, and the URL holds a password.
        raise StartError("DATABASE_URL cannot be read: is it postgresql://user:password@host:port/name?") from None
    try:
        command.upgrade(_config(url), "head")
    except CommandError as error:
        if not isinstance(error.__cause__, ResolutionError):
            raise
        raise StartError(
            "The database was migrated by a newer version of Hookledger; run that version, or restore a backup."
        ) from error
    except (DBAPIError, asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError) as error:
        raise StartError(_sentence(error)) from error


def too_old(major: int) -> str | None:
    """What to say of a Postgres of this major version, if anything."""
    if major >= POSTGRES_MAJOR_MIN:
        return None
    return f"Postgres {major} is too old: Hookledger needs {POSTGRES_MAJOR_MIN} or later."


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
    if said := _no_entry(str(getattr(cause, "sqlstate", None))):
        return said
    match cause:
        case asyncpg.InsufficientPrivilegeError():
            return "The user in DATABASE_URL may not create tables: migrate as the database's owner."
        case asyncpg.ReadOnlySQLTransactionError():
            return "The database in DATABASE_URL is read-only: a replica, perhaps. Migrate the primary."
        case asyncpg.LockNotAvailableError():
            return "A table is in use and could not be locked in time: migrate again at a quieter moment."
        case asyncpg.CannotConnectNowError() | OSError() | TimeoutError() | asyncpg.PostgresConnectionError():
            return "The database in DATABASE_URL does not answer: check its address, and that it is running."
        case _:
            return f"The migration failed: {type(cause).__name__}."


def _no_entry(sqlstate: str) -> str | None:
    """What to say when Postgres let nobody in: class 28 authorization, 3D000 no such database."""
    if sqlstate.startswith("28"):
        return "The database refuses the user or password in DATABASE_URL."
    if sqlstate == "3D000":
        return "The database named in DATABASE_URL does not exist: create it first."
    return None


async def check_migrated(ledger: Ledger) -> str | None:
    """None when the ledger fits this code, otherwise one plain sentence. Raises LedgerUnavailable.

    A revision that this code does not know is a newer one, and accepted: see the module's rule.
    """
    try:
        async with ledger.statement() as connection:
            [server] = await connection.rows(_VERSION, {})
            if sentence := too_old(server["major"]):
                return sentence
            found = [] if server["bare"] else await connection.rows(_REVISION, {})
    except LedgerRefused as refused:
        if sentence := _no_entry(refused.sqlstate):
            return sentence
        if refused.sqlstate == _INSUFFICIENT_PRIVILEGE:
            return "The user in DATABASE_URL may not read the ledger: grant it the tables, or use their owner."
        raise
    current = found[0]["version_num"] if found else None
    ours = [revision.revision for revision in _script().walk_revisions()]  # newest first
    if current is None:
        return "The ledger has no tables yet: run `hookledger migrate`."
    behind_count = ours.index(current) if current in ours else 0
    if behind_count:
        return f"The ledger is behind by {behind_count} migration(s): run `hookledger migrate`."
    return None
