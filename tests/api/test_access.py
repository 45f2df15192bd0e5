"""Keys, and what is told without one."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from service.api.auth import PUBLIC_PATHS
from service.domain import limits
from service.ledger import keys
from service.ledger.session import Ledger
from tests.api.conftest import SECRET, make_key


async def test_every_route_but_the_public_ones_is_closed_without_a_key(app: Any, anonymous: httpx.AsyncClient) -> None:
    paths: dict[str, dict[str, Any]] = app.openapi()["paths"]
    routes = [(method.upper(), path) for path, operations in paths.items() for method in operations]
    assert len(routes) > 15
    for method, path in routes:
        response = await anonymous.request(method, path.replace("{", "").replace("}", ""))
        assert (response.status_code == 401) == (path not in PUBLIC_PATHS), (method, path)


async def test_an_unknown_path_is_closed_as_well(anonymous: httpx.AsyncClient) -> None:
    assert (await anonymous.get("/deliveries/../healthz/x")).status_code == 401


@pytest.mark.parametrize(
    "authorization",
    ["", "Bearer", "Bearer x", "Basic {key}", "{key}", "Bearer {key}x", "Bearer hlk_{id}_", "Bearer hlk_{id}_wrong",
     "Bearer hlk_01jdyv1xv1e0ga2m6whmq3q9yd_" + SECRET, "Bearer " + "x" * 5000, "Bearer hlk_\u00e9_x"],
)  # fmt: skip
async def test_anything_but_a_valid_key_is_refused(
    anonymous: httpx.AsyncClient, ledger: Ledger, authorization: str
) -> None:
    key = await make_key(ledger)
    header = authorization.replace("{key}", key).replace("{id}", key.split("_")[1])
    response = await anonymous.get("/deliveries", headers=[(b"authorization", header.encode("latin-1"))])
    assert response.status_code == 401
    assert response.headers["www-authenticate"].startswith("Bearer")
    assert response.json()["type"] == "/problems/unauthenticated"


async def test_a_key_in_the_query_is_no_key(anonymous: httpx.AsyncClient, ledger: Ledger) -> None:
    assert (await anonymous.get("/deliveries", params={"key": await make_key(ledger)})).status_code == 401


async def test_a_revoked_key_ends_within_seconds(
    app: Any, anonymous: httpx.AsyncClient, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    anonymous.headers["authorization"] = f"Bearer {await make_key(ledger)}"
    assert (await anonymous.get("/deliveries")).status_code == 200
    [key] = await keys.list_all(ledger)
    assert await keys.revoke(ledger, key.id)
    assert limits.KEY_CACHE_SECONDS < 5
    app.state.key_check.forget()  # what the passing of KEY_CACHE_SECONDS does
    assert (await anonymous.get("/deliveries")).status_code == 401


async def test_the_secret_of_a_key_is_not_in_the_ledger(ledger: Ledger) -> None:
    await make_key(ledger)
    [key] = await keys.list_all(ledger)
    assert SECRET.encode() not in key.secret_sha256


async def test_health_readiness_and_the_contract_are_told_to_anyone(anonymous: httpx.AsyncClient) -> None:
    assert (await anonymous.get("/healthz")).json()["status"] == "ok"
    assert (await anonymous.get("/readyz")).json() == {"status": "ready", "ledger": "ok", "queue": "ok"}
    assert "/deliveries" in (await anonymous.get("/openapi.json")).json()["paths"]
    assert (await anonymous.get("/docs")).status_code == 200


async def test_another_tenants_things_are_answered_like_unknown_ones(api: httpx.AsyncClient, ledger: Ledger) -> None:
    made = (await api.post("/destinations", json={"url": "http://127.0.0.1:9/hook"})).json()["id"]
    body = {"destination_id": made, "payload": 1}
    delivery = (await api.post("/deliveries", json=body, headers={"idempotency-key": "k"})).json()["id"]
    stranger = {"authorization": f"Bearer {await make_key(ledger, 'stranger')}"}
    reads = [f"/deliveries/{delivery}", f"/deliveries/{delivery}/payload", f"/destinations/{made}"]
    deeds = [f"/deliveries/{delivery}/{deed}" for deed in ("cancel", "retry")]
    deeds += [f"/destinations/{made}/{deed}" for deed in ("pause", "resume", "enable")]
    for method, path in [*(("GET", path) for path in reads), *(("POST", path) for path in deeds)]:
        assert (await api.request(method, path, headers=stranger)).status_code == 404, path
    for path in ("/deliveries", "/destinations", "/dlq", "/dlq/redrives"):
        assert (await api.get(path, headers=stranger)).json()["items"] == [], path
    found_out = {"as": "delivered", "note": "x"}
    assert (await api.post(f"/deliveries/{delivery}/resolve", json=found_out, headers=stranger)).status_code == 404
    posted = await api.post("/deliveries", json=body, headers={**stranger, "idempotency-key": "k"})
    unknown = {**body, "destination_id": made[:-4] + "0000"}
    missing = await api.post("/deliveries", json=unknown, headers={**stranger, "idempotency-key": "k"})
    assert (posted.status_code, posted.json()) == (missing.status_code, missing.json())
    assert (await api.get(f"/deliveries/{delivery}")).json()["state"] == "pending"


async def test_errors_of_the_framework_are_problems_as_well(api: httpx.AsyncClient) -> None:
    for response, slug in (
        (await api.get("/nowhere"), "not-found"),
        (await api.put("/deliveries"), "method-not-allowed"),
    ):
        assert response.headers["content-type"] == "application/problem+json"
        assert response.json()["type"] == f"/problems/{slug}"


@pytest.mark.parametrize(
    ("path", "allowed"),
    [("/deliveries", "GET, POST"), ("/destinations/dst_x", "GET, PATCH"), ("/dlq/redrive", "POST")],
)
async def test_a_405_names_every_method_of_its_path(api: httpx.AsyncClient, path: str, allowed: str) -> None:
    assert (await api.delete(path)).headers["allow"] == allowed


async def test_a_client_that_leaves_before_its_body_is_whole_is_no_fault_of_ours(
    app: Any, ledger: Ledger, capsys: pytest.CaptureFixture[str]
) -> None:
    key = await make_key(ledger)
    headers = [
        (b"authorization", f"Bearer {key}".encode()),
        (b"content-type", b"application/json"),
        (b"idempotency-key", b"k"),
    ]
    scope = {"type": "http", "method": "POST", "path": "/deliveries", "headers": headers, "query_string": b""}
    messages = iter([{"type": "http.request", "body": b'{"url":', "more_body": True}, {"type": "http.disconnect"}])
    sent: list[Any] = []

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    assert sent == []
    assert "request.failed" not in capsys.readouterr().out
