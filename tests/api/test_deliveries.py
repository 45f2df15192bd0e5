"""The delivery routes, as a client sees them."""

from __future__ import annotations

import asyncio
import base64
import datetime as dt
import hashlib
from typing import Any

import httpx
import pytest

from service.ledger.session import Ledger
from tests.api.conftest import is_problem, make_key, post
from tests.world import FrozenClock


async def test_a_delivery_is_accepted_and_read_back(api: httpx.AsyncClient, destination_id: str) -> None:
    payload = '{"b":1.0, "a":"é/😀", "z":[1e2, -0.0], "b":1.10}'.encode()
    created = await post(
        api, b'{ "payload" :  ' + payload + b' , "destination_id": "' + destination_id.encode() + b'"}', "shp-1"
    )
    assert created.status_code == 202
    view = created.json()
    assert created.headers["location"] == f"/deliveries/{view['id']}"
    assert (view["state"], view["event_id"], view["attempts"]) == ("pending", "shp-1", [])
    assert (view["payload_bytes"], view["payload_sha256"]) == (len(payload), hashlib.sha256(payload).hexdigest())
    read = await api.get(created.headers["location"])
    assert read.json() == view
    raw = await api.get(created.headers["location"] + "/payload")
    assert (raw.content, raw.headers["content-type"]) == (payload, "application/json")


async def test_the_identity_table_as_a_client_sees_it(api: httpx.AsyncClient, destination_id: str) -> None:
    body = {"destination_id": destination_id, "event_id": "e", "payload": 1}
    first = await post(api, body, "k1")
    assert first.status_code == 202
    replayed = await post(api, body, "k1")
    assert (replayed.status_code, replayed.headers["idempotency-replayed"]) == (200, "true")
    assert replayed.json()["id"] == first.json()["id"]
    is_problem(await post(api, {**body, "payload": 2}, "k1"), 422, "idempotency-mismatch")
    duplicate = await post(api, body, "k2")
    assert (duplicate.status_code, duplicate.json()["duplicate"]) == (200, True)
    conflict = is_problem(await post(api, {**body, "payload": 2}, "k3"), 409, "event-conflict")
    assert conflict["existing_id"] == first.json()["id"]


@pytest.mark.parametrize(
    "change",
    [{"payload": 10}, {"headers": {"x": "2"}}, {"event_type": "t"}, {"delay_seconds": 5}, {"metadata": {"a": "c"}},
     {"url": "http://127.0.0.1:9/other"}, {"deadline_seconds": 99}],
)  # fmt: skip
async def test_a_key_with_one_thing_changed_is_a_mismatch(api: httpx.AsyncClient, change: dict[str, Any]) -> None:
    body = {"url": "http://127.0.0.1:9/hook", "payload": 1, "headers": {"x": "1"}, "metadata": {"a": "b"}}
    assert (await post(api, body)).status_code == 202
    is_problem(await post(api, {**body, **change}), 422, "idempotency-mismatch")


async def test_the_same_meaning_in_another_spelling_is_a_replay(api: httpx.AsyncClient) -> None:
    first = await post(api, b'{"url":"http://127.0.0.1:9/","payload":{"a":1},"metadata":{"x":"1","y":"2"}}')
    again = await post(api, b'{"metadata": {"y":"2", "x":"1"}, "payload": {"a":1}, "url": "http://127.0.0.1:9/"}')
    assert (first.status_code, again.status_code) == (202, 200)


@pytest.mark.parametrize("deliver_at", ["0001-01-01T00:00:00Z", "2020-01-01T00:00:00+23:59"])
async def test_a_deliver_at_in_the_past_means_now_and_is_never_a_500(api: httpx.AsyncClient, deliver_at: str) -> None:
    answer = await post(api, {"url": "http://127.0.0.1:9/hook", "payload": 1, "deliver_at": deliver_at})
    assert answer.status_code == 202
    assert answer.json()["next_attempt_at"] == answer.json()["created_at"]


async def test_a_bare_urls_destination_is_named_by_its_host_and_shows_no_query(api: httpx.AsyncClient) -> None:
    answer = await post(api, {"url": "http://127.0.0.1:9/hook?token=sesame", "payload": 1})
    shown = await api.get(f"/destinations/{answer.json()['destination_id']}")
    assert shown.json()["name"] == "127.0.0.1"


async def test_a_repetition_after_its_deadline_is_still_a_repetition(
    api: httpx.AsyncClient, app: Any, destination_id: str
) -> None:
    at = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=30)
    body = {"destination_id": destination_id, "payload": 1, "deadline_at": at.isoformat()}
    first = await post(api, body, "k1")
    assert first.status_code == 202
    later = FrozenClock()
    later.instant = at + dt.timedelta(hours=1)
    app.state.parts.clock = later
    again = await post(api, body, "k1")
    assert (again.status_code, again.json()["id"]) == (200, first.json()["id"])
    assert again.headers["idempotency-replayed"] == "true"
    is_problem(await post(api, {**body, "payload": 2}, "k1"), 422, "idempotency-mismatch")
    refused = is_problem(await post(api, body, "k2"), 422, "validation")
    assert refused["errors"][0]["pointer"] == "/deadline_at"
    is_problem(await post(api, {**body, "event_id": "k1", "payload": 2}, "k3"), 409, "event-conflict")


async def test_a_header_in_another_case_is_the_same_request(api: httpx.AsyncClient, destination_id: str) -> None:
    body = {"destination_id": destination_id, "payload": 1}
    first = await post(api, {**body, "headers": {"X-A": "2"}})
    again = await post(api, {**body, "headers": {"x-a": "2"}})
    assert (first.status_code, again.status_code) == (202, 200)


@pytest.mark.parametrize(
    ("body", "detail"),
    [(b"", "the body is empty"), (b'{"url":"http://127.0.0.1/","payload":"\\ud800"}', "half a character")],
)
async def test_a_body_that_is_no_json_is_told_why(api: httpx.AsyncClient, body: bytes, detail: str) -> None:
    assert detail in is_problem(await post(api, body), 422, "validation")["errors"][0]["detail"]


async def test_a_body_in_another_charset_is_refused(api: httpx.AsyncClient) -> None:
    headers = {"idempotency-key": "k", "content-type": "application/json; charset=utf-16"}
    is_problem(await api.post("/deliveries", content=b"{}", headers=headers), 415, "unsupported-media-type")
    headers["content-type"] = 'application/json; charset="UTF-8"'
    is_problem(await api.post("/deliveries", content=b"{}", headers=headers), 422, "validation")


async def test_an_event_id_with_a_line_feed_is_refused(api: httpx.AsyncClient) -> None:
    body = {"url": "http://127.0.0.1:9/", "payload": 1, "event_id": "abc\n"}
    is_problem(await post(api, body), 422, "validation")


async def test_one_key_a_hundred_times_at_once_is_one_delivery(api: httpx.AsyncClient, destination_id: str) -> None:
    answers = await asyncio.gather(*(post(api, {"destination_id": destination_id, "payload": 1}) for _ in range(100)))
    assert sorted({answer.status_code for answer in answers}) == [200, 202]
    assert len({answer.json()["id"] for answer in answers}) == 1


@pytest.mark.parametrize("key", ["a", "k" * 255, '"quoted"', '"a b"'.replace(" ", "-"), "~!#$"])
async def test_a_key_of_any_form_is_taken(api: httpx.AsyncClient, destination_id: str, key: str) -> None:
    assert (await post(api, {"destination_id": destination_id, "payload": 1}, key)).status_code == 202


@pytest.mark.parametrize("key", ["", " ", "k" * 256, "a b", "a\tb", "\xe9", '"', '""', '"open', "k" * 3000])
async def test_a_malformed_key_is_refused(api: httpx.AsyncClient, destination_id: str, key: str) -> None:
    response = await api.post(
        "/deliveries",
        headers=[(b"idempotency-key", key.encode("latin-1")), (b"content-type", b"application/json")],
        json={"destination_id": destination_id, "payload": 1},
    )
    is_problem(response, 400, "malformed-request")


async def test_no_key_and_two_keys_are_refused(api: httpx.AsyncClient, destination_id: str) -> None:
    body = {"destination_id": destination_id, "payload": 1}
    is_problem(await api.post("/deliveries", json=body), 400, "malformed-request")
    two = [("idempotency-key", "a"), ("idempotency-key", "b")]
    is_problem(await api.post("/deliveries", json=body, headers=two), 400, "malformed-request")


async def test_quoted_and_bare_are_one_key(api: httpx.AsyncClient, destination_id: str) -> None:
    body = {"destination_id": destination_id, "payload": 1}
    first, again = await post(api, body, "same"), await post(api, body, '"same"')
    assert (first.status_code, again.status_code) == (202, 200)


BAD_BODIES = {
    "not JSON": (b"{", ""),
    "empty": (b"", ""),
    "a list": (b"[]", ""),
    "NaN": (b'{"url":"http://127.0.0.1/","payload":NaN}', ""),
    "no payload": (b'{"url":"http://127.0.0.1/"}', "/payload"),
    "two payloads": (b'{"url":"http://127.0.0.1/","payload":1,"payload_base64":""}', "/payload"),
    "no destination": (b'{"payload":1}', "/destination_id"),
    "two destinations": (b'{"payload":1,"url":"http://127.0.0.1/","destination_id":"dst_"}', "/destination_id"),
    "unknown destination": (b'{"payload":1,"destination_id":"dst_01jdyv1xv1e0ga2m6whmq3q9yd"}', "/destination_id"),
    "unknown field": (b'{"payload":1,"url":"http://127.0.0.1/","state":"delivered"}', ""),
    "wrong type": (b'{"payload":1,"url":5}', "/url"),
    "bad scheme": (b'{"payload":1,"url":"ftp://h/"}', "/url"),
    "private address": (b'{"payload":1,"url":"http://10.0.0.1/"}', "/url"),
    "disguised address": (b'{"payload":1,"url":"http://2130706433/"}', "/url"),
    "refused header": (b'{"payload":1,"url":"http://127.0.0.1/","headers":{"Host":"x"}}', "/headers/Host"),
    "split header": (b'{"payload":1,"url":"http://127.0.0.1/","headers":{"a":"b\\r\\nc: d"}}', "/headers/a"),
    "bad base64": (b'{"payload_base64":"*","url":"http://127.0.0.1/"}', "/payload_base64"),
    "content type of JSON": (b'{"payload":1,"content_type":"text/x","url":"http://127.0.0.1/"}', "/content_type"),
    "content type that ends in a blank": (
        b'{"payload_base64":"","content_type":"text/plain; charset=utf-8 ","url":"http://127.0.0.1/"}',
        "/content_type",
    ),
    "this service itself": (b'{"payload":1,"url":"http://127.0.0.1:8080/healthz"}', "/url"),
    "bad content type": (b'{"payload_base64":"","content_type":"a\\r\\nb","url":"http://127.0.0.1/"}', "/content_type"),
    "naive time": (b'{"payload":1,"url":"http://127.0.0.1/","deliver_at":"2027-01-01T00:00:00"}', "/deliver_at"),
    "two times": (
        b'{"payload":1,"url":"http://127.0.0.1/","deliver_at":"2027-01-01T00:00:00Z","delay_seconds":1}',
        "/delay_seconds",
    ),
    "time before the calendar": (
        b'{"payload":1,"url":"http://127.0.0.1/","deliver_at":"0001-01-01T00:00:00+14:00"}',
        "/deliver_at",
    ),
    "past deadline": (b'{"payload":1,"url":"http://127.0.0.1/","deadline_at":"2020-01-01T00:00:00Z"}', "/deadline_at"),
    "lone surrogate in metadata": (b'{"payload":1,"url":"http://127.0.0.1/","metadata":{"a":"\\ud800"}}', ""),
    "lone surrogate in url": (b'{"payload":1,"url":"http://127.0.0.1/\\ud800"}', ""),
    "NUL in metadata": (b'{"payload":1,"url":"http://127.0.0.1/","metadata":{"a":"\\u0000"}}', "/metadata"),
    "NUL in event id": (b'{"payload":1,"url":"http://127.0.0.1/","event_id":"a\\u0000"}', "/event_id"),
    "bytes that are no text": (b'{"payload":"\xff","url":"http://127.0.0.1/"}', "/payload"),
    "100,000 deep": (b'{"url":"http://127.0.0.1/","payload":' + b"[" * 100_000 + b"]" * 100_000 + b"}", ""),
}


@pytest.mark.parametrize("name", BAD_BODIES)
async def test_a_bad_body_gets_a_pointer_and_never_a_500(api: httpx.AsyncClient, name: str) -> None:
    body, pointer = BAD_BODIES[name]
    problem = is_problem(await post(api, body), 422, "validation")
    assert problem["errors"][0]["pointer"] == pointer


ODD_PAYLOADS = [
    b'{"b":1.0, "b":2}', b"1e400", b"1e2", b"-0.0", b"1.10", b"9223372036854775808123", b'"\\u0000"', b'""', b"null",
    b'"text"', b"[" * 300 + b"]" * 300, b"1" * 5000, '{"t":"ść 😱 中"}'.encode(), b" [ 1 , 2 ] ".strip(),
]  # fmt: skip


@pytest.mark.parametrize("payload", ODD_PAYLOADS, ids=lambda payload: payload[:24].decode())
async def test_an_odd_payload_is_kept_byte_for_byte_and_every_list_still_works(
    api: httpx.AsyncClient, payload: bytes
) -> None:
    created = await post(api, b'{"url":"http://127.0.0.1:9/","payload":' + payload + b"}")
    assert created.status_code == 202
    assert (await api.get(created.headers["location"] + "/payload")).content == payload
    assert (await api.get("/deliveries")).status_code == 200


@pytest.mark.parametrize(
    ("data", "content_type"), [(b"", None), (b"<x/>", "text/xml; charset=utf-16"), (b"\x00\xff", None)]
)
async def test_bytes_that_are_not_json_come_in_base64(
    api: httpx.AsyncClient, data: bytes, content_type: str | None
) -> None:
    body: dict[str, Any] = {"url": "http://127.0.0.1:9/", "payload_base64": base64.b64encode(data).decode()}
    created = await post(api, {**body, **({"content_type": content_type} if content_type else {})})
    assert created.status_code == 202
    raw = await api.get(created.headers["location"] + "/payload")
    assert (raw.content, raw.headers["content-type"]) == (data, content_type or "application/octet-stream")


@pytest.mark.parametrize(("extra", "status"), [(-1, 202), (0, 202), (1, 413), (2_000_000, 413)])
async def test_the_size_limit_is_exact(api: httpx.AsyncClient, extra: int, status: int) -> None:
    payload = b'"' + b"x" * (256 * 1024 - 2 + extra) + b'"'
    response = await post(api, b'{"url":"http://127.0.0.1:9/","payload":' + payload + b"}")
    assert response.status_code == status
    listed = await api.get("/deliveries")
    assert len(listed.json()["items"]) == (1 if status == 202 else 0)


async def test_a_chunked_body_over_the_limit_is_refused_before_it_is_whole(api: httpx.AsyncClient) -> None:
    sent = 0

    async def endless() -> Any:
        nonlocal sent
        yield b'{"payload":"'
        while sent < 50_000_000:
            sent += 65536
            yield b"x" * 65536

    response = await api.post(
        "/deliveries", content=endless(), headers={"idempotency-key": "k", "content-type": "application/json"}
    )
    is_problem(response, 413, "too-large")


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "", "multipart/form-data"])
async def test_a_content_type_that_is_not_json_is_refused(api: httpx.AsyncClient, content_type: str) -> None:
    response = await api.post(
        "/deliveries", content=b"{}", headers={"idempotency-key": "k", "content-type": content_type}
    )
    is_problem(response, 415, "unsupported-media-type")


@pytest.mark.parametrize("identity", ["x", "dlv_", "dlv_01jdyv1xv1e0ga2m6whmq3q9yd", "dlv_" + "0" * 10_000, "%00"])
async def test_an_unknown_or_impossible_id_is_not_found(api: httpx.AsyncClient, identity: str) -> None:
    is_problem(await api.get(f"/deliveries/{identity}"), 404, "not-found")
    is_problem(await api.get(f"/deliveries/{identity}/payload"), 404, "not-found")


async def test_another_tenants_delivery_answers_like_an_unknown_one(
    api: httpx.AsyncClient, ledger: Ledger, destination_id: str
) -> None:
    created = await post(api, {"destination_id": destination_id, "payload": 1})
    path = created.headers["location"]
    stranger = {"authorization": f"Bearer {await make_key(ledger, 'other')}"}
    theirs = await api.get(path, headers=stranger)
    unknown = await api.get("/deliveries/dlv_01jdyv1xv1e0ga2m6whmq3q9yd", headers=stranger)
    assert {**theirs.json(), "instance": ""} == {**unknown.json(), "instance": ""}
    assert (await api.get("/deliveries", headers=stranger)).json()["items"] == []
    assert (await api.get(f"/destinations/{destination_id}", headers=stranger)).status_code == 404
    refused = await post(api, {"destination_id": destination_id, "payload": 1}, "k2", **stranger)
    is_problem(refused, 422, "validation")


async def test_what_a_pending_delivery_waits_for_is_said(api: httpx.AsyncClient, destination_id: str) -> None:
    later = await post(api, {"destination_id": destination_id, "payload": 1, "delay_seconds": 60}, "k1")
    assert later.json()["waiting_for"] == "schedule"
    assert (await api.get(later.headers["location"])).json()["waiting_for"] == "schedule"
    await api.post(f"/destinations/{destination_id}/pause")
    paused = await post(api, {"destination_id": destination_id, "payload": 1}, "k2")
    assert (paused.status_code, paused.json()["waiting_for"]) == (202, "paused")
    await api.post(f"/destinations/{destination_id}/resume")
    assert (await api.get(paused.headers["location"])).json()["waiting_for"] == "worker"
