"""Runs migrations on the database of DATABASE_URL, one process at a time, in one transaction."""

from __future__ import annotations

import asyncio
import os

from alembic import context
from sqlalchemy import text
from sqlalchemy.engine import Connection
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool
from sqlmodel import SQLModel

from service.errors import StartError
from service.ledger import tables
from service.ledger.migrate import too_old
from service.ledger.session import sqlalchemy_url

assert tables.PARTITIONED, "importing the tables fills the metadata"

# Any number will do that nobody else takes: it makes parallel migrations queue.
_LOCK = 0x686F6F6B6C6564


def _run(connection: Connection) -> None:
    context.configure(connection=connection, target_metadata=SQLModel.metadata)
    with context.begin_transaction():
        [major] = connection.execute(text("SELECT current_setting('server_version_num')::int / 10000")).one()
        if sentence := too_old(major):
            raise StartError(sentence)
        connection.execute(text("SET LOCAL statement_timeout = 0"))
        # Another migration may take its time. The lock is held to the end of the transaction, so it
        # works behind a transaction-pooling proxy.
        connection.execute(text("SET LOCAL lock_timeout = '60s'"))
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        # A migration that waits for a table makes everybody behind it wait: rather give up and say so.
        connection.execute(text("SET LOCAL lock_timeout = '5s'"))
        context.run_migrations()


async def _migrate() -> None:
    url = context.config.get_main_option("sqlalchemy.url") or os.environ["DATABASE_URL"]
    engine = create_async_engine(sqlalchemy_url(url), poolclass=NullPool, connect_args={"timeout": 5.0})
    try:
        async with engine.connect() as connection:
            await connection.run_sync(_run)
            await connection.commit()
    finally:
        await engine.dispose()


asyncio.run(_migrate())
