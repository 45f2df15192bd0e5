"""API keys for people: made, listed and revoked. A key is shown once, when it is made."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from service import bootstrap
from service.domain.ids import Prefix, parse_typeid, to_typeid
from service.errors import LedgerUnavailable, StartError
from service.ledger import keys
from service.ledger.keys import StoredKey
from service.ledger.session import Ledger
from service.settings import Settings

T = TypeVar("T")

TENANT_DEFAULT: Final = "default"
_SECRET_BYTES: Final = 24


def create(settings: Settings, name: str) -> str:
    """Make a key of the default tenant and return it whole: `hlk_<key id>_<secret>`."""
    key_id = bootstrap.IdSource()()
    secret = secrets.token_hex(_SECRET_BYTES)
    secret_sha256 = hashlib.sha256(secret.encode()).digest()
    _with_ledger(
        settings,
        lambda ledger: keys.add(ledger, key_id, tenant=TENANT_DEFAULT, name=name, secret_sha256=secret_sha256),
    )
    return f"hlk_{to_typeid(Prefix.KEY, key_id).removeprefix(Prefix.KEY)}_{secret}"


def list_keys(settings: Settings) -> list[StoredKey]:
    """Every key, oldest first, without its secret."""
    return _with_ledger(settings, keys.list_all)


def revoke(settings: Settings, key: str) -> bool:
    """End a key, named by its TypeID (`key_…`) or by itself; answers whether it was alive."""
    text = key.removeprefix("hlk_").partition("_")[0] if key.startswith("hlk_") else key.removeprefix(Prefix.KEY)
    key_id = parse_typeid(Prefix.KEY, Prefix.KEY + text)
    if key_id is None:
        raise StartError("Name the key by its id, key_ and 26 letters and digits.")
    found = key_id
    return _with_ledger(settings, lambda ledger: keys.revoke(ledger, found))


def _with_ledger(settings: Settings, act: Callable[[Ledger], Awaitable[T]]) -> T:
    async def run() -> T:
        ledger = bootstrap.ledger_of(settings, "keys")
        try:
            await bootstrap.require_ready_ledger(ledger)
            return await act(ledger)
        except LedgerUnavailable as error:
            raise StartError("The database in DATABASE_URL does not answer.") from error
        finally:
            await ledger.close()

    return asyncio.run(run())
