"""The application on a real ledger and Redis, asked in-process."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from service.api.app import create_app
from service.bootstrap import IdSource
from service.domain.ids import Prefix, to_typeid
from service.ledger import keys
from service.ledger.session import Ledger
from service.settings import Settings
from tests.servers import SECRET_KEYS

SECRET = "0123456789abcdef"


async def make_key(ledger: Ledger, tenant: str = "default") -> str:
    """A key of the API, whole."""
    key_id = IdSource()()
    await keys.add(ledger, key_id, tenant=tenant, name="test", secret_sha256=hashlib.sha256(SECRET.encode()).digest())
    return f"hlk_{to_typeid(Prefix.KEY, key_id).removeprefix(Prefix.KEY)}_{SECRET}"


async def post(api: httpx.AsyncClient, body: bytes | dict[str, Any], key: str = "k", **headers: str) -> httpx.Response:
    """POST /deliveries."""
    given = {"content": body} if isinstance(body, bytes) else {"json": body}
    return await api.post(
        "/deliveries", headers={"idempotency-key": key, "content-type": "application/json", **headers}, **given
    )


def is_problem(response: httpx.Response, status: int, slug: str) -> dict[str, Any]:
    """The body of a refusal, which is the problem it should be."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = response.json()
    assert body["type"] == f"/problems/{slug}"
    assert body["status"] == status
    return body


@pytest.fixture
def settings(database_url: str, redis_url: str) -> Settings:
    return Settings.model_validate(
        {
            "database_url": database_url,
            "redis_url": redis_url,
            "secret_keys": SECRET_KEYS,
            "egress_allow": "127.0.0.0/8:*",
        }
    )


@pytest.fixture
async def app(settings: Settings) -> AsyncIterator[Any]:
    application = create_app(settings)
    async with application.router.lifespan_context(application):
        yield application


@pytest.fixture
async def anonymous(app: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client without a key."""
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://hookledger.test") as client:
        yield client


@pytest.fixture
async def api(anonymous: httpx.AsyncClient, ledger: Ledger) -> httpx.AsyncClient:
    """A client with a key of the default tenant."""
    anonymous.headers["authorization"] = f"Bearer {await make_key(ledger)}"
    return anonymous


@pytest.fixture
async def destination_id(api: httpx.AsyncClient) -> str:
    """A destination on this machine."""
    created = await api.post("/destinations", json={"url": "http://127.0.0.1:9/hook"})
    assert created.status_code == 201, created.text
    identity: str = created.json()["id"]
    return identity
