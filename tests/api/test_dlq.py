"""The dead-letter queue's routes and the deeds on one delivery, as a client sees them."""

from __future__ import annotations

import uuid
from typing import Any

import httpx
import pytest

from service import redrive
from service.domain.ids import Prefix, parse_typeid, to_typeid
from service.ledger.session import Ledger
from tests.api.conftest import make_key
from tests.dead import dead, put
from tests.world import World


@pytest.fixture
def known_id(destination_id: str) -> uuid.UUID:
    """The destination's id, as the ledger has it."""
    parsed = parse_typeid(Prefix.DESTINATION, destination_id)
    assert parsed is not None
    return parsed


async def dead_texts(world: World, known_id: uuid.UUID, count: int) -> list[str]:
    return [to_typeid(Prefix.DELIVERY, await dead(world, known_id)) for _ in range(count)]


async def as_other_tenant(client: httpx.AsyncClient, ledger: Ledger) -> None:
    client.headers["authorization"] = f"Bearer {await make_key(ledger, 'other')}"


# The list and the summary


async def test_the_queue_is_paged_with_a_cursor_that_is_bound_to_its_filters(
    api: httpx.AsyncClient, world: World, known_id: uuid.UUID
) -> None:
    texts = await dead_texts(world, known_id, 3)
    first = (await api.get("/dlq?limit=2&reason=rejected")).json()
    assert [item["delivery_id"] for item in first["items"]] == [texts[2], texts[1]]
    assert first["items"][0]["reason"] == "rejected"
    assert first["items"][0]["first_attempt_at"] is not None
    rest = (await api.get("/dlq", params={"limit": 2, "reason": "rejected", "cursor": first["next_cursor"]})).json()
    assert ([item["delivery_id"] for item in rest["items"]], rest["next_cursor"]) == ([texts[0]], None)
    elsewhere = await api.get("/dlq", params={"cursor": first["next_cursor"]})
    assert (elsewhere.status_code, elsewhere.json()["type"]) == (400, "/problems/malformed-cursor")


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=251",
        "limit=x",
        "reason=odd",
        "outcome=odd",
        "dead_after=2026-01-01T00:00:00",
        "dead_after=0001-01-01T00:00:00%2B14:00",
        "event_type=%00",
        "cursor=!",
        "cursor=W10",
    ],
)
async def test_a_malformed_parameter_is_a_400(api: httpx.AsyncClient, query: str) -> None:
    refused = await api.get(f"/dlq?{query}")
    assert refused.status_code == 400, refused.text
    assert refused.headers["content-type"] == "application/problem+json"


async def test_another_tenant_sees_nothing_of_the_queue(
    api: httpx.AsyncClient, world: World, known_id: uuid.UUID, destination_id: str
) -> None:
    await dead_texts(world, known_id, 2)
    summary = (await api.get("/dlq/summary")).json()
    assert (summary["total"], summary["groups"][0]["count"], summary["groups"][0]["reason"]) == (2, 2, "rejected")
    assert summary["oldest_age_seconds"] >= 0
    await as_other_tenant(api, world.ledger)
    nothing: dict[str, Any] = {"items": [], "next_cursor": None}
    assert (await api.get("/dlq")).json() == nothing
    assert (await api.get("/dlq", params={"destination_id": destination_id})).json() == nothing
    unknown = to_typeid(Prefix.DESTINATION, uuid.UUID(int=7))
    assert (await api.get("/dlq", params={"destination_id": unknown})).json() == nothing
    empty: dict[str, Any] = {"total": 0, "oldest_dead_at": None, "oldest_age_seconds": None, "groups": []}
    assert (await api.get("/dlq/summary")).json() == empty


# Redrive


async def test_a_redrive_is_accepted_carried_out_and_told(
    api: httpx.AsyncClient, world: World, known_id: uuid.UUID
) -> None:
    texts = await dead_texts(world, known_id, 2)
    accepted = await api.post("/dlq/redrive", json={"delivery_ids": [*texts, texts[0]], "reason": "fixed 02:40"})
    assert accepted.status_code == 202, accepted.text
    view = accepted.json()
    assert (view["state"], view["selected"], view["requeued"]) == ("running", 2, 0)
    assert view["actor"].startswith("key_")
    await redrive.step(world.ledger)
    told = (await api.get(accepted.headers["location"])).json()
    assert (told["state"], told["requeued"], told["skipped"]) == ("completed", 2, 0)
    page = (await api.get("/dlq/redrives")).json()
    assert page == {"items": [told], "next_cursor": None}
    late = await api.post(f"{accepted.headers['location']}/cancel")
    assert (late.status_code, late.json()["type"]) == (409, "/problems/state-conflict")


async def test_a_repeated_key_replays_the_redrive_and_another_request_under_it_is_refused(
    api: httpx.AsyncClient, world: World, known_id: uuid.UUID
) -> None:
    texts = await dead_texts(world, known_id, 2)
    body: dict[str, Any] = {"delivery_ids": texts, "reason": "fixed"}
    key = {"idempotency-key": "again"}
    first = await api.post("/dlq/redrive", json=body, headers=key)
    again = await api.post("/dlq/redrive", json=body, headers={"idempotency-key": '"again"'})
    assert (first.status_code, again.status_code) == (202, 200)
    assert again.headers["idempotency-replayed"] == "true"
    assert again.json()["id"] == first.json()["id"]
    other = await api.post("/dlq/redrive", json={**body, "reason": "else"}, headers=key)
    assert (other.status_code, other.json()["type"]) == (422, "/problems/idempotency-mismatch")
    empty = await api.post("/dlq/redrive", json=body, headers={"idempotency-key": ""})
    assert empty.status_code == 400


async def test_a_dry_run_shows_count_and_sample_and_changes_nothing(
    api: httpx.AsyncClient, world: World, known_id: uuid.UUID, destination_id: str
) -> None:
    texts = await dead_texts(world, known_id, 2)
    wanted = {"filter": {"destination_id": destination_id}, "limit": 10, "reason": "look", "dry_run": True}
    shown = await api.post("/dlq/redrive", json=wanted)
    assert shown.status_code == 200
    assert (shown.json()["dry_run"], shown.json()["selected"]) == (True, 2)
    assert [item["delivery_id"] for item in shown.json()["sample"]] == texts[::-1]
    discard = await api.post("/dlq/discard", json=wanted)
    assert discard.json() == {"dry_run": True, "selected": 2, "discarded": 0}
    assert (await api.get("/dlq/redrives")).json()["items"] == []
    assert (await api.get("/dlq/summary")).json()["total"] == 2


async def test_a_dry_run_says_what_would_be_skipped(
    api: httpx.AsyncClient, world: World, known_id: uuid.UUID, destination_id: str
) -> None:
    texts = await dead_texts(world, known_id, 2)
    await world.execute("UPDATE destinations SET state = 'disabled', disabled_reason = 'gone'")
    shown = await api.post("/dlq/redrive", json={"delivery_ids": texts, "reason": "look", "dry_run": True})
    assert (shown.json()["selected"], shown.json()["would_skip"]) == (2, {"destination-disabled": 2})


UNKNOWN = to_typeid(Prefix.DELIVERY, uuid.UUID(int=7))


@pytest.mark.parametrize("path", ["/dlq/redrive", "/dlq/discard"])
@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        ({}, ""),
        ({"filter": {"reason": "gone"}}, "/limit"),
        ({"filter": {}, "limit": 5}, "/filter"),
        ({"filter": {"reason": None}, "limit": 5}, "/filter"),
        ({"filter": {"reason": "odd"}, "limit": 5}, "/filter/reason"),
        ({"filter": {"outcome": "odd"}, "limit": 5}, "/filter/outcome"),
        ({"filter": {"destination_id": "odd"}, "limit": 5}, "/filter/destination_id"),
        ({"filter": {"dead_after": "0001-01-01T00:00:00+14:00"}, "limit": 5}, "/filter/dead_after"),
        ({"filter": {"reason": "gone"}, "limit": 10_001}, "/limit"),
        ({"filter": {"reason": "gone"}, "limit": 5, "delivery_ids": [UNKNOWN]}, ""),
        ({"delivery_ids": [UNKNOWN], "limit": 5}, "/limit"),
        ({"delivery_ids": []}, "/delivery_ids"),
        ({"delivery_ids": [UNKNOWN]}, "/delivery_ids/0"),
        ({"delivery_ids": ["odd"]}, "/delivery_ids/0"),
        ({"delivery_ids": [UNKNOWN], "reason": " "}, "/reason"),
        ({"delivery_ids": [UNKNOWN], "reason": "a\u0000b"}, "/reason"),
    ],
)
async def test_a_bulk_request_that_is_not_clear_is_refused_with_a_pointer(
    api: httpx.AsyncClient, path: str, body: dict[str, Any], pointer: str
) -> None:
    refused = await api.post(path, json={"reason": "fixed", **body})
    assert refused.status_code == 422, refused.text
    assert [error["pointer"] for error in refused.json()["errors"]] == [pointer]


@pytest.mark.parametrize("rate", [0, 1e-300, 1001])
async def test_a_rate_that_is_none_is_refused(api: httpx.AsyncClient, rate: float) -> None:
    body = {"delivery_ids": [UNKNOWN], "reason": "fixed", "rate_per_second": rate}
    refused = await api.post("/dlq/redrive", json=body)
    assert [error["pointer"] for error in refused.json()["errors"]] == ["/rate_per_second"]


async def test_another_tenants_dead_letters_and_redrives_are_unknown(
    api: httpx.AsyncClient, world: World, known_id: uuid.UUID
) -> None:
    texts = await dead_texts(world, known_id, 1)
    started = await api.post("/dlq/redrive", json={"delivery_ids": texts, "reason": "fixed"})
    location = started.headers["location"]
    await as_other_tenant(api, world.ledger)
    for path in ("/dlq/redrive", "/dlq/discard"):
        refused = await api.post(path, json={"delivery_ids": texts, "reason": "mine?"})
        assert refused.json()["errors"] == [{"pointer": "/delivery_ids/0", "detail": "there is no such delivery"}]
    assert (await api.get(location)).status_code == 404
    assert (await api.post(f"{location}/cancel")).status_code == 404
    assert (await api.get("/dlq/redrives/rdv_odd")).status_code == 404
    assert (await api.get("/dlq/redrives")).json()["items"] == []


async def test_a_running_redrive_is_cancelled(api: httpx.AsyncClient, world: World, known_id: uuid.UUID) -> None:
    texts = await dead_texts(world, known_id, 2)
    started = await api.post("/dlq/redrive", json={"delivery_ids": texts, "reason": "fixed"})
    cancelled = await api.post(f"{started.headers['location']}/cancel")
    assert (cancelled.status_code, cancelled.json()["state"]) == (200, "cancelled")
    assert cancelled.json()["skipped_because"] == {"redrive-cancelled": 2}


async def test_discarded_dead_letters_leave_the_queue(
    api: httpx.AsyncClient, world: World, known_id: uuid.UUID
) -> None:
    texts = await dead_texts(world, known_id, 2)
    done = await api.post("/dlq/discard", json={"delivery_ids": texts[:1], "reason": "stale"})
    assert done.json() == {"dry_run": False, "selected": 1, "discarded": 1}
    assert [item["delivery_id"] for item in (await api.get("/dlq")).json()["items"]] == texts[1:]
    assert (await api.get(f"/deliveries/{texts[0]}")).json()["state"] == "cancelled"


# One delivery


async def test_a_pending_delivery_is_retried_and_cancelled_and_then_neither(
    api: httpx.AsyncClient, world: World, known_id: uuid.UUID
) -> None:
    text = to_typeid(Prefix.DELIVERY, await world.accepted(known_id, delay_seconds=3600.0))
    assert (await api.get(f"/deliveries/{text}")).json()["waiting_for"] == "schedule"
    retried = await api.post(f"/deliveries/{text}/retry")
    assert (retried.status_code, retried.json()["waiting_for"]) == (200, "worker")
    cancelled = await api.post(f"/deliveries/{text}/cancel")
    assert (cancelled.status_code, cancelled.json()["state"]) == (200, "cancelled")
    for verb in ("cancel", "retry"):
        refused = await api.post(f"/deliveries/{text}/{verb}")
        assert (refused.status_code, refused.json()["type"]) == (409, "/problems/state-conflict")
        assert "cancelled" in refused.json()["detail"]


@pytest.mark.parametrize(("said", "state"), [("delivered", "delivered"), ("retry", "pending"), ("dead", "dead")])
async def test_an_ambiguous_delivery_is_resolved_as_it_is_said(
    api: httpx.AsyncClient, world: World, known_id: uuid.UUID, said: str, state: str
) -> None:
    text = to_typeid(Prefix.DELIVERY, await put(world, await world.accepted(known_id), "ambiguous"))
    path = f"/deliveries/{text}/resolve"
    for body, pointer in [({"as": said, "note": " "}, "/note"), ({"as": "odd", "note": "n"}, "/as")]:
        refused = await api.post(path, json=body)
        assert [error["pointer"] for error in refused.json()["errors"]] == [pointer]
    resolved = await api.post(path, json={"as": said, "note": "their log says so"})
    assert (resolved.status_code, resolved.json()["state"]) == (200, state)
    assert (await api.post(path, json={"as": said, "note": "again"})).status_code == 409


async def test_a_delivery_of_another_tenant_cannot_be_touched(
    api: httpx.AsyncClient, world: World, known_id: uuid.UUID
) -> None:
    text = to_typeid(Prefix.DELIVERY, await put(world, await world.accepted(known_id), "ambiguous"))
    await as_other_tenant(api, world.ledger)
    for one in (text, UNKNOWN, "dlv_odd"):
        assert (await api.post(f"/deliveries/{one}/cancel")).status_code == 404
        assert (await api.post(f"/deliveries/{one}/retry")).status_code == 404
        resolved = await api.post(f"/deliveries/{one}/resolve", json={"as": "dead", "note": "n"})
        assert resolved.status_code == 404
