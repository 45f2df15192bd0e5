"""The destination routes, as a client sees them."""

from __future__ import annotations

import asyncio
import base64
import datetime as dt
from typing import Any

import httpx
import pytest

from service import ed25519
from service.domain import limits, signing
from service.ledger.session import Ledger
from tests.api.conftest import is_problem, make_key
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


# Secrets

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
SEED = bytes(range(32))
PRIVATE_KEY = "whsk_" + base64.b64encode(SEED + ed25519.public_key(SEED)).decode()
PUBLIC_KEY = signing.format_public_key(ed25519.public_key(SEED))


async def test_a_rotation_tells_the_new_secret_once_and_when_the_old_one_ends(api: httpx.AsyncClient) -> None:
    made = await api.post("/destinations", json={"url": "http://127.0.0.1:9/"})
    path = made.headers["location"]
    rotated = await api.post(f"{path}/rotate-secret", json={"overlap_seconds": 60})
    assert rotated.status_code == 200, rotated.text
    view = rotated.json()
    secret = view.pop("secret")
    assert signing.parse_secret(secret) is not None
    assert secret != made.json()["secret"]
    assert [rotated.headers["cache-control"], made.headers["cache-control"]] == ["no-store"] * 2
    assert [(one["signature"], one["public_key"]) for one in view["secrets"]] == [("v1", None)] * 2
    new, old = view["secrets"]
    assert new["expires_at"] is None
    overlap = dt.datetime.fromisoformat(old["expires_at"]) - dt.datetime.fromisoformat(new["created_at"])
    assert abs(overlap.total_seconds() - 60) < 1
    read = await api.get(path)
    assert read.json() == view
    assert secret not in read.text + (await api.get("/destinations")).text
    assert made.json()["updated_at"] < view["updated_at"]


@pytest.mark.parametrize("request_body", [{}, {"json": {}}], ids=["no body", "an empty object"])
async def test_a_rotation_overlaps_for_a_day_unless_told_otherwise(
    api: httpx.AsyncClient, destination_id: str, request_body: dict[str, Any]
) -> None:
    rotated = await api.post(f"/destinations/{destination_id}/rotate-secret", **request_body)
    assert rotated.status_code == 200, rotated.text
    new, old = rotated.json()["secrets"]
    overlap = dt.datetime.fromisoformat(old["expires_at"]) - dt.datetime.fromisoformat(new["created_at"])
    assert abs(overlap.total_seconds() - 86_400) < 1


async def test_an_overlap_of_zero_leaves_the_new_secret_alone(api: httpx.AsyncClient, destination_id: str) -> None:
    rotated = await api.post(f"/destinations/{destination_id}/rotate-secret", json={"overlap_seconds": 0})
    assert [one["expires_at"] for one in rotated.json()["secrets"]] == [None]


async def test_a_pair_shows_its_public_key_in_every_read_and_its_private_half_in_none(api: httpx.AsyncClient) -> None:
    made = await api.post("/destinations", json={"url": "http://127.0.0.1:9/", "signature": "v1a"})
    assert made.status_code == 201, made.text
    assert made.json()["secret"] is None
    path = made.headers["location"]
    [one] = (await api.get(path)).json()["secrets"]
    assert one["signature"] == "v1a"
    assert signing.parse_public_key(one["public_key"]) is not None
    again = (await api.post(f"{path}/rotate-secret", json={})).json()
    assert again["secret"] is None
    assert [other["signature"] for other in again["secrets"]] == ["v1a", "v1a"]
    assert again["secrets"][0]["public_key"] != again["secrets"][1]["public_key"] == one["public_key"]
    [listed] = (await api.get("/destinations")).json()["items"]
    assert listed["secrets"] == again["secrets"]
    back = (await api.post(f"{path}/rotate-secret", json={"signature": "v1", "overlap_seconds": 0})).json()
    assert signing.parse_secret(back["secret"]) is not None


async def test_a_secret_or_a_pair_may_be_brought_along(api: httpx.AsyncClient) -> None:
    made = await api.post("/destinations", json={"url": "http://127.0.0.1:9/", "secret": PRIVATE_KEY})
    assert made.status_code == 201, made.text
    assert (made.json()["secret"], made.json()["secrets"][0]["public_key"]) == (None, PUBLIC_KEY)
    assert PRIVATE_KEY[5:] not in made.text
    rotate = f"{made.headers['location']}/rotate-secret"
    rotated = await api.post(rotate, json={"secret": SECRET, "signature": "v1"})
    assert (rotated.json()["secret"], rotated.json()["secrets"][1]["public_key"]) == (SECRET, PUBLIC_KEY)


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({"secret": "whsec_" + "A" * 28}, "/secret"),
        ({"secret": SECRET + "="}, "/secret"),
        ({"secret": PUBLIC_KEY}, "/secret"),
        ({"secret": "whsk_" + base64.b64encode(SEED).decode()}, "/secret"),
        ({"secret": "whsk_" + base64.b64encode(SEED + bytes(32)).decode()}, "/secret"),
        ({"secret": "x" * 129}, "/secret"),
        ({"secret": SECRET, "signature": "v1a"}, "/signature"),
        ({"secret": PRIVATE_KEY, "signature": "v1"}, "/signature"),
        ({"signature": "v2"}, "/signature"),
        ({"overlap_seconds": -1}, "/overlap_seconds"),
        ({"overlap_seconds": limits.SECRET_OVERLAP_SECONDS_MAX + 1}, "/overlap_seconds"),
        ({"overlap_seconds": 1.5}, "/overlap_seconds"),
    ],
)
async def test_a_bad_secret_is_refused_where_it_stands_and_never_repeated(
    api: httpx.AsyncClient, destination_id: str, body: dict[str, Any], pointer: str
) -> None:
    path = f"/destinations/{destination_id}"
    before = (await api.get(path)).json()
    responses = [await api.post(f"{path}/rotate-secret", json=body)]
    if "overlap_seconds" not in body:
        responses.append(await api.post("/destinations", json={"url": "http://127.0.0.1:9/", **body}))
    for response in responses:
        refused = is_problem(response, 422, "validation")
        assert refused["errors"][0]["pointer"] == pointer
        assert body.get("secret", "no secret") not in response.text
    assert (await api.get(path)).json() == before


async def test_a_rotation_beyond_the_bound_is_refused_and_says_what_helps(
    api: httpx.AsyncClient, destination_id: str
) -> None:
    rotate = f"/destinations/{destination_id}/rotate-secret"
    for _ in range(limits.SECRETS_MAX - 1):
        assert (await api.post(rotate, json={})).status_code == 200
    refused = is_problem(await api.post(rotate, json={}), 409, "state-conflict")
    assert "4 secrets are in force" in refused["detail"]
    assert "overlap_seconds 0" in refused["detail"]
    assert len((await api.post(rotate, json={"overlap_seconds": 0})).json()["secrets"]) == 1


async def test_a_destination_of_another_tenant_or_none_is_not_rotated(
    api: httpx.AsyncClient, destination_id: str, ledger: Ledger
) -> None:
    known = f"/destinations/{destination_id}/rotate-secret"
    unknown = "/destinations/dst_01jdyv1xv1e0ga2m6whmq3q9yd/rotate-secret"
    other = {"authorization": f"Bearer {await make_key(ledger, 'other')}"}
    for response in (await api.post(known, json={}, headers=other), await api.post(unknown, json={})):
        is_problem(response, 404, "not-found")
    assert len((await api.get(f"/destinations/{destination_id}")).json()["secrets"]) == 1


async def test_a_rotation_is_on_the_record_without_the_secret(
    api: httpx.AsyncClient, destination_id: str, ledger: Ledger
) -> None:
    rotate = f"/destinations/{destination_id}/rotate-secret"
    await api.post(rotate, json={"secret": SECRET, "overlap_seconds": 60})
    await api.post(rotate, json={"secret": PRIVATE_KEY})
    records = await World(ledger).fetch("SELECT actor, action, subject, detail FROM audit_log ORDER BY id OFFSET 1")
    assert [record["action"] for record in records] == ["destination.rotate_secret"] * 2
    assert all(record["actor"].startswith("key_") and record["subject"] == destination_id for record in records)
    assert [record["detail"] for record in records] == [
        {"signature": "v1", "public_key": None, "overlap_seconds": 60},
        {"signature": "v1a", "public_key": PUBLIC_KEY, "overlap_seconds": 86_400},
    ]


async def test_a_destination_is_rotated_whatever_its_state(
    api: httpx.AsyncClient, destination_id: str, ledger: Ledger
) -> None:
    path = f"/destinations/{destination_id}"
    await api.post(f"{path}/pause")
    assert (await api.post(f"{path}/rotate-secret")).json()["state"] == "paused"
    await World(ledger).execute("UPDATE destinations SET state = 'disabled', disabled_reason = 'x'")
    assert (await api.post(f"{path}/rotate-secret")).json()["state"] == "disabled"


async def test_a_bare_urls_secret_is_learnt_by_rotating_it(api: httpx.AsyncClient) -> None:
    accepted = await api.post(
        "/deliveries", json={"url": "http://127.0.0.1:9/x", "payload": 1}, headers={"idempotency-key": "k"}
    )
    rotated = await api.post(f"/destinations/{accepted.json()['destination_id']}/rotate-secret")
    assert signing.parse_secret(rotated.json()["secret"]) is not None


@pytest.mark.parametrize("field", ["name", "owner"])
async def test_a_text_that_is_not_printable_is_pointed_at(api: httpx.AsyncClient, field: str) -> None:
    refused = await api.post("/destinations", json={"url": "http://127.0.0.1:9/hook", field: "a\nb"})
    assert [each["pointer"] for each in is_problem(refused, 422, "validation")["errors"]] == [f"/{field}"]


async def test_a_rule_may_name_any_final_status(api: httpx.AsyncClient) -> None:
    rules = {"200": "retryable", "599": "success", "999": "rejected"}
    created = await api.post("/destinations", json={"url": "http://127.0.0.1:9/hook", "response_rules": rules})
    assert created.json()["response_rules"] == rules
    wrong = await api.post("/destinations", json={"url": "http://127.0.0.1:9/hook", "response_rules": {"102": "gone"}})
    is_problem(wrong, 422, "validation")
