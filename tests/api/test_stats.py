"""GET /stats, as the person on call sees it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from service.api.app import create_app
from service.domain.delivery import DeadReason
from service.domain.ids import Prefix, parse_typeid
from service.domain.outcome import Outcome
from service.ledger import tallies
from service.ledger.session import Ledger
from service.settings import Settings
from tests.api.conftest import is_problem, make_key, post
from tests.dead import dead, put
from tests.world import World

NOTHING: dict[str, Any] = {
    "capped": False,
    "pending": 0,
    "due": 0,
    "oldest_due_at": None,
    "oldest_due_age_seconds": None,
    "parked": 0,
    "in_flight": 0,
    "ambiguous": 0,
    "dead": 0,
    "dead_capped": False,
    "dead_by_reason": {reason.value: 0 for reason in DeadReason},
    "attempts_by_outcome": {outcome.value: 0 for outcome in Outcome},
    "duplicates_rejected": 0,
    "duplicates_rejected_24h": 0,
}
STILL = {"accepted_per_second": 0, "attempts_per_second": 0, "delivered_per_second": 0, "dead_per_second": 0}


async def stats_of(client: httpx.AsyncClient) -> dict[str, Any]:
    answer = await client.get("/stats")
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    assert body.pop("at").endswith("Z")
    return body


async def test_the_numbers_of_every_kind_and_another_tenant_sees_none_of_them(
    api: httpx.AsyncClient, world: World, destination_id: str
) -> None:
    known_id = parse_typeid(Prefix.DESTINATION, destination_id)
    assert known_id is not None
    for state in ("delivering", "delivering", "ambiguous", "delivered"):
        await put(world, await world.accepted(known_id), state)
    await dead(world, known_id, reason="rejected")
    await dead(world, known_id, reason="deadline")
    await world.execute("UPDATE deliveries SET parked = true WHERE id = :id", {"id": await world.accepted(known_id)})
    await world.accepted(known_id, delay_seconds=3600.0)
    await world.accepted(known_id)
    counts = {"accepted": 600, "attempt_success": 300, "attempt_unknown": 2, "delivered": 300, "dead": 60}
    repeated = {"replayed": 3, "duplicate": 4}
    await tallies.add(world.ledger, {("default", name): count for name, count in {**counts, **repeated}.items()})
    found = await stats_of(api)
    rates = found.pop("rates")
    assert found.pop("oldest_due_at").endswith("Z")
    assert 0 <= found.pop("oldest_due_age_seconds") < 60
    assert found == {
        **{name: value for name, value in NOTHING.items() if not name.startswith("oldest")},
        "pending": 3,
        "due": 1,
        "parked": 1,
        "in_flight": 2,
        "ambiguous": 1,
        "dead": 2,
        "dead_by_reason": {**NOTHING["dead_by_reason"], "rejected": 1, "deadline": 1},
        "attempts_by_outcome": {**NOTHING["attempts_by_outcome"], "success": 300, "unknown": 2},
        "duplicates_rejected": 7,
        "duplicates_rejected_24h": 7,
    }
    seconds = rates.pop("window_seconds")
    assert 300 <= seconds < 360
    assert rates == pytest.approx(
        {
            "accepted_per_second": 600 / seconds,
            "attempts_per_second": 302 / seconds,
            "delivered_per_second": 300 / seconds,
            "dead_per_second": 60 / seconds,
        }
    )
    api.headers["authorization"] = f"Bearer {await make_key(world.ledger, 'other')}"
    found = await stats_of(api)
    del found["rates"]["window_seconds"]
    assert found == {**NOTHING, "rates": STILL}


async def test_what_the_api_process_counted_is_in_the_next_ones_numbers(settings: Settings, ledger: Ledger) -> None:
    headers = {"authorization": f"Bearer {await make_key(ledger)}"}
    for life in (1, 2):
        app = create_app(settings)
        transport = httpx.ASGITransport(app=app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://hookledger.test", headers=headers) as api,
        ):
            if life == 1:
                body = {"url": "http://127.0.0.1:9/hook", "event_id": "e", "payload": 1}
                assert (await post(api, body)).status_code == 202
                assert (await post(api, body)).headers["idempotency-replayed"] == "true"
                assert (await post(api, body, key="other")).json()["duplicate"] is True
            else:
                found = await stats_of(api)
                assert (found["pending"], found["duplicates_rejected"]) == (1, 2)
                assert found["rates"]["accepted_per_second"] == pytest.approx(1 / found["rates"]["window_seconds"])


async def test_it_needs_a_key_and_takes_no_parameter(api: httpx.AsyncClient) -> None:
    is_problem(await api.get("/stats?tenant=other"), 400, "malformed-request")
    del api.headers["authorization"]
    is_problem(await api.get("/stats"), 401, "unauthenticated")
