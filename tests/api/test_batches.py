"""Many webhooks in one request."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from service.domain import limits
from service.errors import LedgerUnavailable
from service.ledger import accepting
from tests.api.conftest import is_problem, post


async def batch(api: httpx.AsyncClient, *items: Any) -> list[dict[str, Any]]:
    answer = await api.post("/deliveries/batch", json={"deliveries": items})
    assert answer.status_code == 200, answer.text
    results: list[dict[str, Any]] = answer.json()["results"]
    return results


def item(key: str, **fields: Any) -> dict[str, Any]:
    return {"idempotency_key": key, "url": "http://127.0.0.1:9/hook", "payload": 1, **fields}


async def test_each_item_is_answered_as_its_own_request_would_have_been(api: httpx.AsyncClient) -> None:
    known = await post(api, {"url": "http://127.0.0.1:9/hook", "payload": 1, "event_id": "e"}, "known")
    results = await batch(
        api,
        item("new"),
        item("known", event_id="e"),
        item("other", event_id="e"),
        item("clash", event_id="e", payload=2),
        item("known", payload=3),
        item("late", deadline_at="2020-01-01T00:00:00Z"),
        item("odd", url="ftp://x/"),
        item("nowhere", url=None, destination_id="dst_00000000000000000000000000"),
        item("large", payload="x" * limits.PAYLOAD_BYTES_MAX_DEFAULT),
        {"url": "http://127.0.0.1:9/hook", "payload": 1},
        item("line\n"),
        item("unknown", colour="blue"),
        7,
    )
    assert [each["status"] for each in results] == [202, 200, 200, 409, 422, 422, 422, 422, 413, 422, 422, 422, 422]
    assert [each["delivery"] is None for each in results] == [each["status"] > 202 for each in results]
    assert [each["problem"] is None for each in results] == [each["status"] <= 202 for each in results]
    assert {each["delivery"]["id"] for each in results[1:3]} == {known.json()["id"]}
    assert [each["delivery"]["duplicate"] for each in results[1:3]] == [False, True]
    assert results[3]["problem"]["existing_id"] == known.json()["id"]
    assert [each["problem"]["type"].rpartition("/")[2] for each in results[4:6]] == [
        "idempotency-mismatch",
        "validation",
    ]
    assert results[5]["problem"]["errors"][0]["pointer"] == "/deadline_at"
    alone = await api.get(f"/deliveries/{results[0]['delivery']['id']}")
    assert alone.json() == results[0]["delivery"]


async def test_payloads_of_a_batch_are_kept_byte_for_byte(api: httpx.AsyncClient) -> None:
    payloads = [b'{"b":1.0, "a":[1e2,-0.0] }', b'"\\u00e9"', b"12.50"]
    items = b",".join(
        b' {"payload" : %s ,"url":"http://127.0.0.1:9/hook","idempotency_key":"k%d"}' % (payload, number)
        for number, payload in enumerate(payloads)
    )
    answer = await api.post(
        "/deliveries/batch", content=b'{"deliveries":[' + items + b"]}", headers={"content-type": "application/json"}
    )
    ids = [each["delivery"]["id"] for each in answer.json()["results"]]
    assert [(await api.get(f"/deliveries/{each}/payload")).content for each in ids] == payloads


async def test_a_thousand_items_are_accepted_in_order_and_the_same_again_makes_none(api: httpx.AsyncClient) -> None:
    items = [item(f"k{number}", payload=number) for number in range(limits.BATCH_DELIVERIES_MAX)]
    first = await batch(api, *items)
    assert {each["status"] for each in first} == {202}
    assert [each["delivery"]["event_id"] for each in first] == [each["idempotency_key"] for each in items]
    again = await batch(api, *items)
    assert {each["status"] for each in again} == {200}
    assert [each["delivery"]["id"] for each in again] == [each["delivery"]["id"] for each in first]


async def test_one_key_twice_in_a_batch_is_one_delivery(api: httpx.AsyncClient) -> None:
    first, second, other = await batch(api, item("k"), item("k"), item("k", payload=2))
    assert sorted([first["status"], second["status"]]) == [200, 202]
    assert first["delivery"]["id"] == second["delivery"]["id"]
    assert other["status"] == 422


@pytest.mark.parametrize(
    "body",
    [{}, {"deliveries": []}, {"deliveries": [{}] * (limits.BATCH_DELIVERIES_MAX + 1)}, {"deliveries": {}}, [],
     {"deliveries": [{}], "atomic": True}],
)  # fmt: skip
async def test_what_is_no_batch_is_refused_whole(api: httpx.AsyncClient, body: Any) -> None:
    is_problem(await api.post("/deliveries/batch", json=body), 422, "validation")


async def test_a_batch_over_the_limit_is_refused_before_it_is_read(api: httpx.AsyncClient) -> None:
    content = b" " * (limits.BATCH_BYTES_MAX + 1)
    answer = await api.post("/deliveries/batch", content=content, headers={"content-type": "application/json"})
    is_problem(answer, 413, "too-large")


async def test_what_is_not_known_to_be_committed_is_a_503_for_its_item_and_for_the_whole_if_that_is_all(
    api: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await batch(api, item("before"))  # makes the destination

    async def away(*_: object, **__: object) -> None:
        raise LedgerUnavailable("away")

    with monkeypatch.context() as patch:
        patch.setattr(accepting, "insert_new", away)
        refused, unknown = await batch(api, item("odd", url="ftp://x/"), item("k"))
        assert (refused["status"], unknown["status"]) == (422, 503)
        whole = await api.post("/deliveries/batch", json={"deliveries": [item("k")]})
    is_problem(whole, 503, "unavailable")
    assert whole.headers["retry-after"]
    [repeated] = await batch(api, item("k"))
    assert repeated["status"] == 202
