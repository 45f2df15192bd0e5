"""Lists: filters, pages, and parameters that mean nothing."""

from __future__ import annotations

import uuid

import httpx
import pytest

from service.domain.ids import Prefix, to_typeid
from tests.api.conftest import is_problem, post


async def test_paging_gives_each_delivery_once_while_others_arrive(api: httpx.AsyncClient) -> None:
    expected: list[str] = []
    for number in range(7):
        created = await post(api, {"url": "http://127.0.0.1:9/", "payload": number}, f"k{number}")
        expected.insert(0, created.json()["id"])
    for size in (1, 2, 3, 7, 8):
        seen: list[str] = []
        cursor = None
        while True:
            page = (
                await api.get("/deliveries", params={"limit": size, **({"cursor": cursor} if cursor else {})})
            ).json()
            seen += [item["id"] for item in page["items"] if item["id"] in expected]
            await post(api, {"url": "http://127.0.0.1:9/", "payload": 0}, f"new{size}-{len(seen)}")
            cursor = page["next_cursor"]
            if cursor is None:
                break
        assert seen == expected


async def test_lists_are_narrowed_by_every_filter(api: httpx.AsyncClient) -> None:
    one = await post(
        api,
        {"url": "http://127.0.0.1:9/a", "payload": 1, "event_id": "e1", "event_type": "t1", "metadata": {"order": "1"}},
        "k1",
    )
    await post(api, {"url": "http://127.0.0.1:9/b", "payload": 1, "delay_seconds": 60}, "k2")
    one_id, destination = one.json()["id"], one.json()["destination_id"]
    for query in (
        {"event_id": "e1"},
        {"event_type": "t1"},
        {"destination_id": destination},
        {"metadata.order": "1"},
        {"state": "pending", "event_id": "e1"},
        {"created_after": "2020-01-01T00:00:00Z", "event_type": "t1"},
    ):
        assert [item["id"] for item in (await api.get("/deliveries", params=query)).json()["items"]] == [one_id]
    for query in (
        {"state": "dead"},
        {"metadata.order": "2"},
        {"dead_reason": "rejected"},
        {"outcome": "success"},
        {"destination_id": to_typeid(Prefix.DESTINATION, uuid.UUID(int=7))},
        {"created_before": "2020-01-01T00:00:00Z"},
        {"event_id": "'; drop table deliveries; --"},
    ):
        assert (await api.get("/deliveries", params=query)).json() == {"items": [], "next_cursor": None}


@pytest.mark.parametrize(
    "query",
    ["limit=0", "limit=251", "limit=-1", "limit=x", "limit=1000000000", "state=x", "outcome=x", "dead_reason=x",
     "cursor=x", "cursor=", "cursor=%00", "cursor=eyJhIjoxfQ", "created_after=x", "created_after=2020-01-01T00:00:00",
     "created_after=0001-01-01T00:00:00%2B14:00", "created_before=9999-12-31T23:59:59-14:00",
     "event_id=%00", "metadata.a=%00"],
)  # fmt: skip
async def test_a_malformed_parameter_is_a_400(api: httpx.AsyncClient, query: str) -> None:
    assert (await api.get(f"/deliveries?{query}")).status_code == 400


async def test_a_cursor_of_another_list_is_refused(api: httpx.AsyncClient) -> None:
    for number in range(2):
        await post(api, {"url": "http://127.0.0.1:9/", "payload": number}, f"k{number}")
    cursor = (await api.get("/deliveries", params={"limit": 1})).json()["next_cursor"]
    is_problem(await api.get("/deliveries", params={"cursor": cursor, "state": "pending"}), 400, "malformed-cursor")
    is_problem(await api.get("/destinations", params={"cursor": cursor}), 400, "malformed-cursor")


@pytest.mark.parametrize(
    ("path", "query"),
    [
        ("/deliveries", "stat=dead"),
        ("/deliveries", "metadata=x"),
        ("/deliveries", "state=dead&state=pending"),
        ("/deliveries", "limit=10&limit=20"),
        ("/deliveries", "limit=1_0"),
        ("/deliveries", "limit=1.0"),
        ("/deliveries", "created_after=2026"),
        ("/deliveries", "created_after=1"),
        ("/deliveries", "destination_id="),
        ("/deliveries", "destination_id=dst_zzz"),
        ("/dlq", "reasons=rejected"),
        ("/dlq", "dead_after=1"),
        ("/dlq", "metadata.a=b"),
        ("/destinations", "state=paused"),
        ("/dlq/redrives", "state=running"),
    ],
)
async def test_a_filter_that_means_nothing_is_refused_and_does_not_widen_the_list(
    api: httpx.AsyncClient, path: str, query: str
) -> None:
    is_problem(await api.get(f"{path}?{query}"), 400, "malformed-request")
