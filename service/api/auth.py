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
from typing import Final

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.problems import MEDIA_TYPE, Problem, ProblemError, as_response_body
from service.domain import limits
from service.domain.ids import Prefix, parse_typeid, to_typeid
from service.errors import LedgerUnavailable
from service.ledger import keys
from service.ledger.session import Ledger

PUBLIC_PATHS: Final = frozenset({"/healthz", "/readyz", "/openapi.json", "/docs"})
KEY_PREFIX: Final = "hlk_"


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

    async def __call__(self, authorization: str | None) -> Principal | None:
        """The principal of a header, or None when it holds no valid key. Raises LedgerUnavailable."""
        presented = _parse(authorization)
        if presented is None:
            return None
        key_id, secret = presented
        key = await self._find(key_id)
        given_hash = hashlib.sha256(secret.encode()).digest()
        if key is None or not hmac.compare_digest(given_hash, key.secret_sha256) or key.revoked_at is not None:
            return None
        return Principal(key.tenant, to_typeid(Prefix.KEY, key.id))

    async def _find(self, key_id: uuid.UUID) -> keys.StoredKey | None:
        now = time.monotonic()
        kept = self._kept.get(key_id)
        if kept is None or kept.until < now:
            kept = _Kept(await keys.find(self._ledger, key_id), now + limits.KEY_CACHE_SECONDS)
            self._kept[key_id] = kept
            if len(self._kept) > limits.KEY_CACHE_ENTRIES_MAX:
                self._kept.popitem(last=False)
        return kept.key


def _parse(authorization: str | None) -> tuple[uuid.UUID, str] | None:
    """The key id and secret of a header, or None when it is not of the form."""
    if authorization is None or len(authorization) > 256:
        return None
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
        authorization = [value for name, value in scope["headers"] if name == b"authorization"]
        try:
            principal = await check(authorization[0].decode("latin-1") if len(authorization) == 1 else None)
        except LedgerUnavailable:
            await _refuse(scope, send, ProblemError(Problem.UNAVAILABLE, "the ledger does not answer"))
            return
        if principal is None:
            problem = ProblemError(
                Problem.UNAUTHENTICATED,
                "send Authorization: Bearer hlk_…, a key that is known and not revoked",
                headers={"www-authenticate": 'Bearer realm="hookledger"'},
            )
            await _refuse(scope, send, problem)
            return
        scope.setdefault("state", {})["principal"] = principal
        await self._app(scope, receive, send)


async def _refuse(scope: Scope, send: Send, error: ProblemError) -> None:
    body = as_response_body(error.body(scope["path"]))
    headers = {"content-type": MEDIA_TYPE, "content-length": str(len(body)), **error.headers}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.problem.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def principal_of(request: Request) -> Principal:
    """Who asks, as the authentication found it."""
    principal: Principal = request.state.principal
    return principal
