"""API keys: only the hash of a key's secret is kept, and a key is found by its id, never by its secret."""

from __future__ import annotations

import datetime as dt
import uuid
from dataclasses import dataclass

from service.ledger.session import Ledger, Statement


@dataclass(frozen=True, slots=True)
class StoredKey:
    """A key as the ledger knows it."""

    id: uuid.UUID
    tenant: str
    name: str
    secret_sha256: bytes
    created_at: dt.datetime
    revoked_at: dt.datetime | None


_FIND = Statement("SELECT id, tenant, name, secret_sha256, created_at, revoked_at FROM api_keys WHERE id = :id")
_LIST = Statement("""
SELECT id, tenant, name, secret_sha256, created_at, revoked_at FROM api_keys ORDER BY id LIMIT 1000
""")
_ADD = Statement("""
INSERT INTO api_keys (id, tenant, name, secret_sha256) VALUES (:id, :tenant, :name, :secret_sha256)
ON CONFLICT (id) DO NOTHING
""")
_REVOKE = Statement("UPDATE api_keys SET revoked_at = now() WHERE id = :id AND revoked_at IS NULL RETURNING id")


async def find(ledger: Ledger, key_id: uuid.UUID) -> StoredKey | None:
    """Read one key by its id (primary key)."""
    async with ledger.statement() as connection:
        found = await connection.rows(_FIND, {"id": key_id})
    return StoredKey(**found[0]) if found else None


async def list_all(ledger: Ledger) -> list[StoredKey]:
    """Read the keys, oldest first, a thousand at most."""
    async with ledger.statement() as connection:
        return [StoredKey(**row) for row in await connection.rows(_LIST, {})]


async def add(ledger: Ledger, key_id: uuid.UUID, *, tenant: str, name: str, secret_sha256: bytes) -> None:
    """Keep a new key; the same id again changes nothing."""
    values = {"id": key_id, "tenant": tenant, "name": name, "secret_sha256": secret_sha256}
    async with ledger.statement() as connection:
        await connection.execute(_ADD, values)


async def revoke(ledger: Ledger, key_id: uuid.UUID) -> bool:
    """End a key; answers whether it was alive."""
    async with ledger.statement() as connection:
        return bool(await connection.rows(_REVOKE, {"id": key_id}))
