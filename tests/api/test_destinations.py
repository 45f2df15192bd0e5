"""The destination routes, as a client sees them."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from service.domain import signing
from service.ledger.session import Ledger
from tests.api.conftest import is_problem
from tests.world import World


async def test_a_destination_is_made_with_readable_defaults_and_its_secret_is_told_once(api: httpx.AsyncClient) -> None:
    created = await api.post("/destinations", json={"url": "http://127.0.0.1:9/hook?b=2&a=1"})
    assert created.status_code == 201
    view = created.json()
    assert signing.parse_secret(view.pop("secret")) is not None
    assert (view["name"], view["url"], view["state"]) == ("127.0.0.1", "http://127.0.0.1:9/hook?b=2&a=1", "active")
    assert view["retry"]["max_attempts"] == 18
    assert (await api.get(created.headers["location"])).json() == view


async def test_the_secret_is_encrypted_in_the_ledger(api: httpx.AsyncClient, ledger: Ledger) -> None:
    created = await api.post("/destinations", json={"url": "http://127.0.0.1:9/"})
    key = signing.parse_secret(created.json()["secret"])
    assert key is not None
    [row] = await World(ledger).fetch("SELECT ciphertext FROM destination_secrets")
    assert key not in row["ciphertext"]
    assert row["ciphertext"].startswith(b"test:")


async def test_a_destination_is_changed_field_by_field(api: httpx.AsyncClient, destination_id: str) -> None:
    path = f"/destinations/{destination_id}"
    changed = await api.patch(
        path,
        json={
            "name": "School district",
            "owner": "team-grades",
            "url": "http://127.0.0.1:10/",
            "headers": {"x-a": "1"},
            "timeout_seconds": 5,
            "retry": {"schedule_seconds": [1, 60]},
            "on_ambiguous": "hold",
            "response_rules": {"404": "retryable"},
        },
    )
    assert changed.status_code == 200, changed.text
    view = changed.json()
    assert (view["name"], view["owner"], view["timeout_seconds"]) == ("School district", "team-grades", 5.0)
    assert (view["retry"]["schedule_seconds"], view["retry"]["max_attempts"]) == ([1.0, 60.0], 3)
    again = await api.patch(path, json={"owner": None, "retry": {"base_seconds": 2}})
    assert (again.json()["owner"], again.json()["retry"]["schedule_seconds"]) == (None, None)
    assert (await api.patch(path, json={})).json() == again.json()


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({"url": "http://10.0.0.1/"}, "/url"),
        ({"timeout_seconds": 0.5}, "/timeout_seconds"),
        ({"timeout_seconds": 61}, "/timeout_seconds"),
        ({"retry": {"max_attempts": 0}}, "/retry/max_attempts"),
        ({"retry": {"schedule_seconds": []}}, "/retry/schedule_seconds"),
        ({"retry": {"schedule_seconds": [1, -1]}}, "/retry/schedule_seconds/1"),
        ({"retry": {"schedule_seconds": [1], "base_seconds": 1}}, "/retry"),
        ({"retry": {"base_seconds": 100, "cap_seconds": 10}}, "/retry/base_seconds"),
        ({"on_ambiguous": "guess"}, "/on_ambiguous"),
        ({"response_rules": {"200x": "success"}}, None),
        ({"response_rules": {"404": "delivered"}}, None),
        ({"headers": {"webhook-signature": "x"}}, "/headers/webhook-signature"),
        ({"headers": {"x": "a\nb"}}, "/headers/x"),
        ({"name": ""}, "/name"),
        ({"name": "a\u202eb\x00"}, "/name"),
        ({"state": "disabled"}, None),
        ({"id": "dst_x"}, None),
    ],
)
async def test_a_bad_value_is_refused_at_creation_and_change(
    api: httpx.AsyncClient, destination_id: str, body: dict[str, Any], pointer: str | None
) -> None:
    for response in (
        await api.post("/destinations", json={"url": "http://127.0.0.1:9/", **body}),
        await api.patch(f"/destinations/{destination_id}", json=body),
    ):
        assert response.status_code == 422, response.text
        if pointer is not None:
            assert response.json()["errors"][0]["pointer"] == pointer


async def test_pause_resume_and_enable_say_when_the_state_does_not_allow_them(
    api: httpx.AsyncClient, destination_id: str
) -> None:
    path = f"/destinations/{destination_id}"
    assert (await api.post(f"{path}/resume")).status_code == 409
    assert (await api.post(f"{path}/pause")).json()["state"] == "paused"
    assert (await api.post(f"{path}/pause")).status_code == 409
    assert (await api.post(f"{path}/resume")).json()["state"] == "active"
    assert (await api.post(f"{path}/enable")).status_code == 409
    unknown = "/destinations/dst_01jdyv1xv1e0ga2m6whmq3q9yd/pause"
    assert (await api.post(unknown)).status_code == 404


async def test_a_bare_url_is_one_destination_however_many_use_it_at_once(api: httpx.AsyncClient) -> None:
    answers = await asyncio.gather(
        *(
            api.post(
                "/deliveries",
                json={"url": "http://127.0.0.1:9/x", "payload": n},
                headers={"idempotency-key": f"k{n}"},
            )
            for n in range(20)
        )
    )
    assert len({answer.json()["destination_id"] for answer in answers}) == 1
    identity = answers[0].json()["destination_id"]
    refused = await api.patch(f"/destinations/{identity}", json={"url": "http://127.0.0.1:9/y"})
    assert refused.status_code == 409


async def test_destinations_are_listed_newest_first_page_by_page(api: httpx.AsyncClient) -> None:
    made = [(await api.post("/destinations", json={"url": "http://127.0.0.1:9/"})).json()["id"] for _ in range(3)]
    first = (await api.get("/destinations", params={"limit": 2})).json()
    second = (await api.get("/destinations", params={"limit": 2, "cursor": first["next_cursor"]})).json()
    assert [item["id"] for item in first["items"] + second["items"]] == made[::-1]
    assert second["next_cursor"] is None


async def test_every_change_leaves_a_record_with_its_actor(
    api: httpx.AsyncClient, destination_id: str, ledger: Ledger
) -> None:
    await api.patch(f"/destinations/{destination_id}", json={"headers": {"authorization": "Bearer s3cret"}})
    await api.post(f"/destinations/{destination_id}/pause")
    records = await World(ledger).fetch("SELECT actor, action, subject, detail FROM audit_log ORDER BY id")
    assert [record["action"] for record in records] == ["destination.create", "destination.change", "destination.pause"]
    assert all(record["actor"].startswith("key_") and record["subject"] == destination_id for record in records)
    assert "s3cret" not in str(records)


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({"response_rules": {"404\n": "success"}}, "/response_rules"),
        ({"retry": {"base_seconds": 100_000}}, "/retry/base_seconds"),
        ({"retry": {"cap_seconds": 1}}, "/retry/cap_seconds"),
    ],
)
async def test_a_change_that_cannot_be_is_refused_where_it_stands(
    api: httpx.AsyncClient, destination_id: str, body: dict[str, Any], pointer: str
) -> None:
    refused = is_problem(await api.patch(f"/destinations/{destination_id}", json=body), 422, "validation")
    assert refused["errors"][0]["pointer"].startswith(pointer)


async def test_a_schedule_can_be_taken_back(api: httpx.AsyncClient, destination_id: str) -> None:
    path = f"/destinations/{destination_id}"
    await api.patch(path, json={"retry": {"schedule_seconds": [1, 2]}})
    changed = (await api.patch(path, json={"retry": {"max_attempts": 5}})).json()
    assert (changed["retry"]["schedule_seconds"], changed["retry"]["max_attempts"]) == ([1, 2], 5)
    changed = (await api.patch(path, json={"retry": {"schedule_seconds": None}})).json()
    assert changed["retry"]["schedule_seconds"] is None
