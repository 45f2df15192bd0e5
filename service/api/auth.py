"""Who asks: `Authorization: Bearer hlk_<key id>_<secret>`, checked before anything else is read.

Every path needs a key but those in PUBLIC_PATHS: a route that is added is closed until it is opened.
A key is looked up by its id and its secret compared in constant time; a look-up is kept for
KEY_CACHE_SECONDS, which bounds how long a revoked key still works.
"""

from __future__ import annotations

import hashlib
import hmac
import time
import uuid
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final, TypeVar

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.bodies import RawHeaders
from service.api.failures import as_response, refusal
from service.api.problems import Problem, ProblemError
from service.domain import limits
from service.domain.ids import Prefix, parse_typeid, to_typeid
from service.errors import LedgerUnavailable
from service.ledger import keys
from service.ledger.session import Ledger

PUBLIC_PATHS: Final = frozenset({"/healthz", "/readyz", "/openapi.json", "/docs"})
KEY_PREFIX: Final = "hlk_"
_HEADER_BYTES_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class Principal:
    """The key that asks, and the tenant it belongs to."""

    tenant: str
    actor: str


@dataclass(frozen=True, slots=True)
class _Kept:
    key: keys.StoredKey | None
    until: float


class KeyCheck:
    """Looks keys up, and keeps what it found for a moment."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._kept: OrderedDict[uuid.UUID, _Kept] = OrderedDict()
        # Of headers that held a valid key, by their hash: so that no secret is kept.
        self._principals: OrderedDict[bytes, tuple[Principal, float]] = OrderedDict()

    async def __call__(self, authorization: bytes | None) -> Principal | None:
        """The principal of a header, or None when it holds no valid key. Raises LedgerUnavailable."""
        if authorization is None or len(authorization) > _HEADER_BYTES_MAX:
            return None
        header_hash = hashlib.sha256(authorization).digest()
        known = self._principals.get(header_hash)
        if known is not None and known[1] >= time.monotonic():
            return known[0]
        presented = _parse(authorization.decode("latin-1"))
        if presented is None:
            return None
        key_id, secret = presented
        kept = await self._find(key_id)
        key = kept.key
        given_hash = hashlib.sha256(secret.encode()).digest()
        if key is None or not hmac.compare_digest(given_hash, key.secret_sha256) or key.revoked_at is not None:
            return None
        principal = Principal(key.tenant, to_typeid(Prefix.KEY, key.id))
        _keep(self._principals, header_hash, (principal, kept.until))
        return principal

    async def _find(self, key_id: uuid.UUID) -> _Kept:
        now = time.monotonic()
        kept = self._kept.get(key_id)
        if kept is None or kept.until < now:
            kept = _Kept(await keys.find(self._ledger, key_id), now + limits.KEY_CACHE_SECONDS)
            _keep(self._kept, key_id, kept)
        return kept

    def forget(self) -> None:
        """Look everything up anew."""
        self._kept.clear()
        self._principals.clear()


K = TypeVar("K")
V = TypeVar("V")


def _keep(kept: OrderedDict[K, V], key: K, value: V) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > limits.KEY_CACHE_ENTRIES_MAX:
        kept.popitem(last=False)


def _parse(authorization: str) -> tuple[uuid.UUID, str] | None:
    """The key id and secret of a header, or None when it is not of the form."""
    scheme, _, token = authorization.partition(" ")
    if scheme.lower() != "bearer" or not token.startswith(KEY_PREFIX):
        return None
    key_text, _, secret = token.removeprefix(KEY_PREFIX).partition("_")
    key_id = parse_typeid(Prefix.KEY, Prefix.KEY + key_text)
    return None if key_id is None or not secret.isascii() else (key_id, secret)


class Authentication:
    """The outermost layer of the application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through with its principal, or answer 401."""
        if scope["type"] != "http" or scope["path"] in PUBLIC_PATHS:
            await self._app(scope, receive, send)
            return
        check: KeyCheck = scope["app"].state.key_check
        try:
            principal = await check(authorization_of(scope["headers"]))
        except LedgerUnavailable:
            await _refuse(scope, send, ProblemError(Problem.UNAVAILABLE, "the ledger does not answer"))
            return
        if principal is None:
            await _refuse(scope, send, unauthenticated())
            return
        scope.setdefault("state", {})["principal"] = principal
        await self._app(scope, receive, send)


def authorization_of(headers: RawHeaders) -> bytes | None:
    """The `Authorization` of a request that has exactly one."""
    found = [value for name, value in headers if name == b"authorization"]
    return found[0] if len(found) == 1 else None


def unauthenticated() -> ProblemError:
    """A request without a valid key."""
    return ProblemError(
        Problem.UNAUTHENTICATED,
        "send Authorization: Bearer hlk_…, a key that is known and not revoked",
        headers={"www-authenticate": 'Bearer realm="hookledger"'},
    )


async def _refuse(scope: Scope, send: Send, error: ProblemError) -> None:
    await as_response(refusal(scope["path"], error))(scope, _no_more, send)


async def _no_more() -> Message:
    return {"type": "http.disconnect"}


def principal_of(request: Request) -> Principal:
    """Who asks, as the authentication found it."""
    principal: Principal = request.state.principal
    return principal
