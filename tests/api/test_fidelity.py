"""From the API to the wire: exactly these bytes, to exactly that address, or a refusal at once.

A real receiver, a real sender and a worker's part of the story; only the hint is given by hand.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
import redis.asyncio
from standardwebhooks import Webhook

from service import redrive as redriving
from service.bootstrap import deliverer_of
from service.domain.ids import Prefix, parse_typeid
from service.domain.limits import PAYLOAD_BYTES_MAX_DEFAULT
from service.ledger.session import Ledger, Statement
from service.settings import Settings
from service.tallies import Tallies
from tests.api.conftest import post
from tests.wire.receiver import Received, Receiver, ok
from tests.wire.urls import NOT_PUBLIC, NUMBERS, REFUSED_URLS

EXACT = '{"b":1.0, "a":"é/😀", "z":[1e2, -0.0]}'.encode()

Deliver = Callable[[str], Awaitable[dict[str, Any]]]


@pytest.fixture
async def deliver(settings: Settings, ledger: Ledger, api: httpx.AsyncClient) -> AsyncIterator[Deliver]:
    """Makes the next attempt of a delivery now, whenever it is due, and shows what became of it."""
    worker, sender = deliverer_of(settings, ledger, Tallies(ledger), "worker")

    async def now(identity: str) -> dict[str, Any]:
        delivery_id = parse_typeid(Prefix.DELIVERY, identity)
        assert delivery_id is not None
        await execute(ledger, "UPDATE deliveries SET next_attempt_at = now() WHERE state = 'pending'")
        worker.tick()
        await worker.deliver([delivery_id])
        view: dict[str, Any] = (await api.get(f"/deliveries/{identity}")).json()
        return view

    yield now
    await worker.stop(0.0)
    await sender.close()


async def execute(ledger: Ledger, sql: str, **values: Any) -> None:
    async with ledger.transaction() as connection:
        await connection.execute(Statement(sql), values)


async def destination(api: httpx.AsyncClient, url: str, **fields: Any) -> dict[str, Any]:
    created = await api.post("/destinations", json={"url": url, **fields})
    assert created.status_code == 201, created.text
    view: dict[str, Any] = created.json()
    return view


async def accepted(api: httpx.AsyncClient, destination_id: str, payload: bytes, key: str = "k") -> str:
    body = b'{"destination_id":"%s","payload":%s}' % (destination_id.encode(), payload)
    answer = await post(api, body, key)
    assert answer.status_code == 202, answer.text
    identity: str = answer.json()["id"]
    return identity


def verify(secret: str, request: Received) -> None:
    """By a library that is none of ours, over the bytes that came. It reads JSON afterwards, which is no matter."""
    headers = {name.decode().lower(): value.decode() for name, value in request.headers}
    request.body.decode()  # what the library could not decode it would not verify either
    try:
        Webhook(secret).verify(request.body, headers)
    except binascii.Error:  # a ValueError as well: the signature is no base64
        raise
    except ValueError:
        pass


# Payloads


async def test_the_exact_bytes_go_out_on_attempts_1_2_and_3_and_after_a_redrive(
    api: httpx.AsyncClient, ledger: Ledger, deliver: Deliver
) -> None:
    answers = [ok(b"", "503 Busy"), ok(b"", "503 Busy"), ok(b"", "404 Not Found"), ok()]
    async with Receiver(*answers) as receiver:
        target = await destination(api, receiver.url)
        identity = await accepted(api, target["id"], EXACT)
        for state in ("pending", "pending", "dead"):
            assert (await deliver(identity))["state"] == state
        ordered = await api.post("/dlq/redrive", json={"delivery_ids": [identity], "reason": "mended"}, headers=KEY)
        assert ordered.status_code == 202, ordered.text
        await redriving.step(ledger)
        assert (await deliver(identity))["state"] == "delivered"
    assert [request.body for request in receiver.requests] == [EXACT] * 4
    assert {request.values("content-length")[0] for request in receiver.requests} == {str(len(EXACT)).encode()}
    assert {request.values("webhook-id")[0].decode() for request in receiver.requests} == {identity}
    for request in receiver.requests:
        verify(target["secret"], request)


KEY = {"idempotency-key": "redrive"}

ODD_PAYLOADS = {
    "duplicate keys in reversed order": b'{"b":1.0, "a":2, "b":3}',
    "spellings of numbers": b"[1e2, -0.0, 1.10, 1234567890123456789, 0.1234567890123456789, 1e400]",
    "a NUL": b'"\\u0000"',
    "bytes and characters": '{"t":"ść 😱 中"}'.encode(),
    "an empty string": b'""',
    "null": b"null",
    "a string": b'"text"',
    "255 deep": b"[" * 255 + b"]" * 255,
    "300 deep": b"[" * 300 + b"]" * 300,
    "900 deep": b"[" * 900 + b"]" * 900,
    "5,000 digits": b"1" * 5_000,
    "the largest": b'"' + b"x" * (PAYLOAD_BYTES_MAX_DEFAULT - 2) + b'"',
}


@pytest.mark.parametrize("name", ODD_PAYLOADS)
async def test_an_odd_payload_arrives_unchanged(api: httpx.AsyncClient, deliver: Deliver, name: str) -> None:
    payload = ODD_PAYLOADS[name]
    async with Receiver() as receiver:
        target = await destination(api, receiver.url)
        identity = await accepted(api, target["id"], payload)
        assert (await deliver(identity))["state"] == "delivered"
        [request] = receiver.requests
    assert request.body == payload
    assert request.values("content-length") == [str(len(payload)).encode()]
    verify(target["secret"], request)
    assert (await api.get(f"/deliveries/{identity}/payload")).content == payload
    listed = await api.get("/deliveries", params={"state": "delivered"})
    assert [item["id"] for item in listed.json()["items"]] == [identity]


RAW_PAYLOADS = {
    "nothing": (b"", None),
    "a BOM": (b'\xef\xbb\xbf{"a":1}', "application/json"),
    "UTF-16": ('{"a":1}'.encode("utf-16"), "application/json; charset=utf-16"),
    "text": (b"a=1\r\nb=2\n", "text/plain"),
    "XML": ("<a>é</a>".encode(), "text/xml; charset=utf-8"),
    "any bytes": (bytes(range(256)), None),
}


@pytest.mark.parametrize("name", RAW_PAYLOADS)
async def test_bytes_in_base64_go_out_decoded_once_with_their_content_type(
    api: httpx.AsyncClient, deliver: Deliver, name: str
) -> None:
    """Nothing: `Content-Length: 0` (never a 411), and a signature over zero bytes that verifies."""
    data, content_type = RAW_PAYLOADS[name]
    async with Receiver() as receiver:
        target = await destination(api, receiver.url)
        body = {"destination_id": target["id"], "payload_base64": base64.b64encode(data).decode()}
        answer = await post(api, body | ({"content_type": content_type} if content_type else {}))
        assert answer.status_code == 202, answer.text
        assert (await deliver(answer.json()["id"]))["state"] == "delivered"
        [request] = receiver.requests
    assert request.body == data
    assert request.values("content-length") == [str(len(data)).encode()]
    assert request.values("content-type") == [(content_type or "application/octet-stream").encode()]
    if name != "any bytes" and "utf-16" not in (content_type or ""):  # the library reads bodies as UTF-8
        verify(target["secret"], request)


REFUSED_BODIES = {
    "NaN": b'{"url":"http://127.0.0.1/","payload":NaN}',
    "Infinity": b'{"url":"http://127.0.0.1/","payload":[Infinity]}',
    "-Infinity": b'{"url":"http://127.0.0.1/","payload":-Infinity}',
    "half a surrogate": b'{"url":"http://127.0.0.1/","payload":"\\ud800"}',
    "100,000 deep": b'{"url":"http://127.0.0.1/","payload":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "half a surrogate in metadata": b'{"url":"http://127.0.0.1/","payload":1,"metadata":{"a":"\\ud800"}}',
    "half a surrogate in a header": b'{"url":"http://127.0.0.1/","payload":1,"headers":{"a":"\\ud800"}}',
    "half a surrogate in a header's name": b'{"url":"http://127.0.0.1/","payload":1,"headers":{"\\ud800":"a"}}',
    "half a surrogate in the URL": b'{"url":"http://127.0.0.1/\\ud800","payload":1}',
    "half a surrogate in a field that is none": b'{"url":"http://127.0.0.1/","payload":1,"\\ud800":1}',
    "half a surrogate where a number belongs": b'{"url":"http://127.0.0.1/","payload":1,"delay_seconds":"\\ud800"}',
}


@pytest.mark.parametrize("name", REFUSED_BODIES)
async def test_what_cannot_be_kept_is_refused_and_never_a_500(api: httpx.AsyncClient, name: str) -> None:
    answer = await post(api, REFUSED_BODIES[name])
    assert answer.status_code == 422, answer.text
    assert json.loads(answer.content)["type"] == "/problems/validation"
    assert (await api.get("/deliveries")).json()["items"] == []


# URLs and addresses


async def test_a_url_is_echoed_as_it_was_submitted_and_its_target_goes_out_unchanged(
    api: httpx.AsyncClient, deliver: Deliver
) -> None:
    target = "/a%2Fb/./c?sig=%26%2B+x&z=a|b&empty=&dup=1&dup=2"
    async with Receiver() as receiver:
        url = f"http://127.0.0.1:{receiver.port}{target}#frag"
        made = await destination(api, url)
        assert (await api.get(f"/destinations/{made['id']}")).json()["url"] == made["url"] == url
        await deliver(await accepted(api, made["id"], b"1"))
        assert receiver.requests[0].target == target.encode()
    for plain in ("http://h", "http://h:80/A"):
        assert (await destination(api, plain))["url"] == plain


@pytest.mark.parametrize("url", REFUSED_URLS, ids=lambda url: ascii(url)[:40])
async def test_a_url_that_no_two_parsers_read_alike_is_refused_at_intake(api: httpx.AsyncClient, url: str) -> None:
    body = json.dumps({"url": url}).encode()
    answer = await api.post("/destinations", content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (413, 422), answer.text
    if answer.status_code == 422:
        assert answer.json()["errors"][0]["pointer"] in ("/url", "")


async def test_every_address_that_is_not_public_is_refused_at_intake(api: httpx.AsyncClient) -> None:
    """Those of this machine are in the list of what these tests allow; tests/wire denies them all."""
    for address in (*NOT_PUBLIC, *NUMBERS):
        url = f"http://[{address}]/" if ":" in address else f"http://{address}/"
        if not address.startswith("127.") or address in NUMBERS:
            assert (await api.post("/destinations", json={"url": url})).status_code == 422, url


async def test_a_bad_url_in_the_row_is_dead_and_blocked_after_one_try_and_nothing_is_stuck(
    api: httpx.AsyncClient, ledger: Ledger, deliver: Deliver
) -> None:
    """Put into the row behind the API's back: no traceback, and the worker goes on."""
    async with Receiver() as receiver:
        made = await destination(api, receiver.url)
        urls = [url for url in REFUSED_URLS if "\ud800" not in url]
        for number, url in enumerate([*urls, "http://10.0.0.1/", "http://[::ffff:127.0.0.1]/"]):
            identity = await accepted(api, made["id"], b"1", f"k{number}")
            await execute(ledger, "UPDATE destinations SET url = :url", url=url)
            view = await deliver(identity)
            assert (view["state"], view["dead_reason"], view["attempt_count"]) == ("dead", "blocked", 1), url
        await execute(ledger, "UPDATE destinations SET url = :url", url=receiver.url)
        assert (await deliver(await accepted(api, made["id"], b"1")))["state"] == "delivered"
        assert len(receiver.requests) == 1


async def test_a_redrive_passes_the_same_guard(api: httpx.AsyncClient, ledger: Ledger, deliver: Deliver) -> None:
    async with Receiver(ok(b"", "404 Not Found")) as receiver:
        made = await destination(api, receiver.url)
        identity = await accepted(api, made["id"], b"1")
        assert (await deliver(identity))["dead_reason"] == "rejected"
        await execute(ledger, "UPDATE destinations SET url = 'http://169.254.169.254/'")
        await api.post("/dlq/redrive", json={"delivery_ids": [identity], "reason": "mended"}, headers=KEY)
        await redriving.step(ledger)
        assert (await deliver(identity))["dead_reason"] == "blocked"
        assert len(receiver.requests) == 1


# Headers


async def test_custom_headers_arrive_beside_exactly_one_of_ours(api: httpx.AsyncClient, deliver: Deliver) -> None:
    async with Receiver() as receiver:
        made = await destination(api, receiver.url, headers={"Authorization": "Bearer x", "X-A": "b"})
        await deliver(await accepted(api, made["id"], b"1"))
        [request] = receiver.requests
    for name in ("host", "content-length", "webhook-id", "webhook-timestamp", "webhook-signature", "content-type"):
        assert len(request.values(name)) == 1, name
    assert (request.values("authorization"), request.values("x-a")) == ([b"Bearer x"], [b"b"])
    assert [request.values(name) for name in ("transfer-encoding", "cookie", "expect")] == [[], [], []]


FORCED_HEADERS = [
    *({name: "x"} for name in ("Host", "content-length", "Transfer-Encoding", "connection", "EXPECT", " host")),
    {"X-A": "a\r\nHost: evil"},
    {"X-A": "é"},
    {"X-A": "a" * 65_536},
]


async def test_a_header_forced_into_the_row_is_blocked_and_the_worker_lives(
    api: httpx.AsyncClient, ledger: Ledger, deliver: Deliver
) -> None:
    async with Receiver() as receiver:
        made = await destination(api, receiver.url)
        sql = "UPDATE destinations SET headers = CAST(:headers AS jsonb)"
        for number, headers in enumerate(FORCED_HEADERS):
            identity = await accepted(api, made["id"], b"1", f"k{number}")
            await execute(ledger, sql, headers=json.dumps(headers))
            view = await deliver(identity)
            assert (view["state"], view["dead_reason"], view["attempt_count"]) == ("dead", "blocked", 1), headers
        # What is forced in as one of ours loses against ours; a cookie is what it was configured to be.
        await execute(ledger, sql, headers=json.dumps({"WEBHOOK-SIGNATURE": "v1,forged"}))
        assert (await deliver(await accepted(api, made["id"], b"1")))["state"] == "delivered"
        [request] = receiver.requests
    verify(made["secret"], request)
    assert len(request.values("webhook-signature")) == 1


async def test_the_redis_job_of_the_largest_payload_holds_its_id_only(api: httpx.AsyncClient, redis_url: str) -> None:
    made = await destination(api, "http://127.0.0.1:9/")
    identity = await accepted(api, made["id"], b'"' + b"x" * (PAYLOAD_BYTES_MAX_DEFAULT - 2) + b'"')
    delivery_id = parse_typeid(Prefix.DELIVERY, identity)
    async with redis.asyncio.Redis.from_url(redis_url) as client, asyncio.timeout(10):
        while not (jobs := [key async for key in client.scan_iter("arq:job:*")]):
            pass  # the hint follows the answer
        [job] = [await client.get(key) for key in jobs]
    assert str(delivery_id).encode() in job
    assert b"xxxx" not in job
    assert len(job) < 1_000


async def test_the_hash_in_the_ledger_is_that_of_the_bytes_that_arrived(
    api: httpx.AsyncClient, ledger: Ledger, deliver: Deliver
) -> None:
    async with Receiver() as receiver:
        made = await destination(api, receiver.url)
        await deliver(await accepted(api, made["id"], EXACT))
        [request] = receiver.requests
    async with ledger.transaction() as connection:
        [stored] = await connection.rows(Statement("SELECT body_sha256 FROM payloads"))
    assert stored["body_sha256"] == hashlib.sha256(request.body).digest()
