"""Every answer of the case file, played byte for byte: what the sender makes of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from service.domain.limits import EXCERPT_BYTES_MAX, RESPONSE_BYTES_MAX, RESPONSE_CHUNK_LINES_MAX
from service.domain.outcome import Exchange, Fault, Phase
from service.egress.sender import HttpSender
from tests.wire.answers import BOTTOMLESS, CHUNKED, FAULTS, HEAD, RESPONDED, RETRY_AFTER, Row
from tests.wire.posting import post
from tests.wire.receiver import (
    Answer,
    Receiver,
    after_reading,
    close,
    deaf,
    drip,
    hang,
    ok,
    reset,
    send,
    signal,
    wait_for,
)

PATIENCE = 2.0  # the deadline of what must run into it, and has to be written before: also on a busy machine
SLACK_MS = 1_000


async def _send_one(sender: HttpSender, *answers: Answer, timeout_seconds: float = 20.0) -> tuple[Exchange, Receiver]:
    """One exchange with a receiver that plays these answers, and exactly one request at it."""
    async with Receiver(*answers) as receiver:
        exchange = await sender.send(post(receiver.url, timeout_seconds=timeout_seconds))
        await receiver.wait_for_requests(1)
        # The sentinel: had the sender sent anything twice, it would have come before this.
        assert (await sender.send(post(receiver.url, b"sentinel"))).phase
        bodies = [request.body for request in receiver.requests]
        assert bodies.count(b'{"a":1}') == 1
    return exchange, receiver


@pytest.mark.parametrize("row", RESPONDED.values(), ids=RESPONDED.keys())
async def test_a_complete_head_decides_however_the_body_goes(sender: HttpSender, row: Row) -> None:
    exchange, _ = await _send_one(sender, send(row.answer) + close(), ok())
    assert exchange.phase is Phase.RESPONDED
    assert (exchange.status_code, exchange.fault, exchange.excerpt) == (row.status_code, None, row.excerpt)
    assert (exchange.error is None) if row.note is None else (exchange.error and row.note in exchange.error)


STATUSES = (400, 401, 403, 404, 408, 409, 410, 422, 425, 429, 500, 501, 502, 503, 504)


@pytest.mark.parametrize("status_code", STATUSES)
async def test_each_status_is_reported_with_its_body(sender: HttpSender, status_code: int) -> None:
    exchange, _ = await _send_one(sender, ok(b"why", f"{status_code} No"))
    assert (exchange.phase, exchange.status_code, exchange.excerpt) == (Phase.RESPONDED, status_code, b"why")
    assert exchange.error is None


@pytest.mark.parametrize(("answer", "fault"), FAULTS.values(), ids=FAULTS.keys())
async def test_a_request_without_a_complete_head_is_written_and_not_sent_again(
    sender: HttpSender, answer: Answer, fault: Fault
) -> None:
    timeout_seconds = PATIENCE if fault is Fault.TIMEOUT else 20.0
    exchange, _ = await _send_one(sender, answer, ok(), timeout_seconds=timeout_seconds)
    assert (exchange.phase, exchange.fault, exchange.status_code) == (Phase.WRITTEN, fault, None)
    assert exchange.error
    assert "\n" not in exchange.error
    if fault is Fault.TIMEOUT:
        assert exchange.latency_ms <= PATIENCE * 1_000 + SLACK_MS


async def test_a_reset_while_the_body_is_still_going_up_is_written(sender: HttpSender) -> None:
    async with Receiver(at_connect=after_reading(100_000) + reset(), receive_buffer_bytes=4_096) as receiver:
        exchange = await sender.send(post(receiver.url, bytes(8_000_000)))
        assert (exchange.phase, exchange.fault) == (Phase.WRITTEN, Fault.RESET)
        assert receiver.connections == 1


async def test_an_answer_before_the_whole_body_is_taken_counts_and_ends_the_connection(sender: HttpSender) -> None:
    early = after_reading(10_000) + ok(b"too much", "413 Too Large") + hang()
    async with Receiver(at_connect=early, receive_buffer_bytes=4_096) as receiver:
        exchange = await sender.send(post(receiver.url, bytes(8_000_000)))
        assert (exchange.phase, exchange.status_code) == (Phase.RESPONDED, 413)
        await receiver.wait_for_ended(1)


@pytest.mark.parametrize("size", [1_000_000, 8_000_000])
async def test_a_receiver_that_never_reads_the_body_ends_at_the_deadline(sender: HttpSender, size: int) -> None:
    async with Receiver(at_connect=deaf(), receive_buffer_bytes=4_096) as receiver:
        exchange = await sender.send(post(receiver.url, bytes(size), timeout_seconds=PATIENCE))
        assert (exchange.phase, exchange.fault) == (Phase.WRITTEN, Fault.TIMEOUT)
        assert PATIENCE * 1_000 <= exchange.latency_ms + 5 <= PATIENCE * 1_000 + SLACK_MS


async def test_a_body_that_drips_ends_at_the_deadline_and_its_200_counts(sender: HttpSender) -> None:
    answer = send(HEAD + b"Content-Length: 6000\r\n\r\n") + drip(b"x", 0.02)
    async with Receiver(answer) as receiver:
        exchange = await sender.send(post(receiver.url, timeout_seconds=PATIENCE))
        await receiver.wait_for_ended(1)
    assert (exchange.phase, exchange.status_code) == (Phase.RESPONDED, 200)
    assert exchange.error == "the deadline passed inside the response body"
    assert set(exchange.excerpt) == {ord("x")}
    assert exchange.latency_ms <= PATIENCE * 1_000 + SLACK_MS


@pytest.mark.parametrize("answer", BOTTOMLESS.values(), ids=BOTTOMLESS.keys())
async def test_a_bottomless_body_is_cut_off_and_judged_by_its_status(sender: HttpSender, answer: Answer) -> None:
    async with Receiver(answer) as receiver:
        exchange = await sender.send(post(receiver.url))
        await receiver.wait_for_ended(1)
    assert (exchange.phase, exchange.status_code) == (Phase.RESPONDED, 200)
    assert len(exchange.excerpt) <= EXCERPT_BYTES_MAX
    assert exchange.error
    assert f"{RESPONSE_BYTES_MAX} bytes" in exchange.error or f"{RESPONSE_CHUNK_LINES_MAX} chunks" in exchange.error


async def test_a_5_mb_answer_to_a_5_mb_body_is_one_request(sender: HttpSender) -> None:
    async with Receiver(ok(bytes(5_000_000))) as receiver:
        exchange = await sender.send(post(receiver.url, b"x" * 5_000_000))
        assert (exchange.phase, exchange.status_code) == (Phase.RESPONDED, 200)
        assert exchange.excerpt == bytes(EXCERPT_BYTES_MAX)
        await receiver.wait_for_ended(1)
        assert [len(request.body) for request in receiver.requests] == [5_000_000]


async def test_every_seam_between_two_packets_reads_alike(sender: HttpSender) -> None:
    answer = CHUNKED + b"2\r\nok\r\n0\r\n\r\n"

    async with Receiver(Answer(*(step for byte in answer for step in send(bytes([byte])).steps))) as receiver:
        exchange = await sender.send(post(receiver.url))
    assert (exchange.status_code, exchange.excerpt, exchange.error) == (200, b"ok", None)


REDIRECTS = {
    "to a good URL": ("Location: https://other.example/a?token=secret", "other.example"),
    "to a private address": ("Location: http://10.0.0.1/a", "10.0.0.1"),
    "to a relative URL": ("Location: /a?token=secret", "without a valid host"),
    "to nowhere": ("X: y", "without a Location"),
    "to bytes": ("Location: http://caf\xe9/", "without a valid host"),
}


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
@pytest.mark.parametrize(("header", "noted"), REDIRECTS.values(), ids=REDIRECTS.keys())
async def test_a_redirect_is_noted_by_host_and_not_followed(
    sender: HttpSender, dialled: list[Any], status: int, header: str, noted: str
) -> None:
    exchange, receiver = await _send_one(sender, ok(b"", f"{status} Moved", header))
    assert exchange.status_code == status
    assert exchange.error
    assert noted in exchange.error
    assert "secret" not in exchange.error
    assert {tuple(address) for address in dialled} == {("127.0.0.1", receiver.port)}


async def test_a_redirect_to_itself_is_not_followed(sender: HttpSender) -> None:
    async with Receiver(ok(b"", "307 Again", "Location: /hook")) as receiver:
        await sender.send(post(receiver.url))
        await sender.send(post(receiver.url, b"sentinel"))
        await receiver.wait_for_requests(2)
        assert [request.body for request in receiver.requests] == [b'{"a":1}', b"sentinel"]


@pytest.mark.parametrize(("header", "value"), RETRY_AFTER.values(), ids=RETRY_AFTER.keys())
async def test_retry_after_is_handed_on_as_it_came(sender: HttpSender, header: bytes, value: str | None) -> None:
    exchange, _ = await _send_one(sender, send(b"HTTP/1.1 429 No\r\n" + header + b"Content-Length: 0\r\n\r\n"))
    assert (exchange.status_code, exchange.retry_after) == (429, value)


async def test_race_an_idle_connection_reset_as_the_next_request_goes_out_is_written_once(sender: HttpSender) -> None:
    reset_now = after_reading(1) + reset()
    async with Receiver(ok() + reset_now, ok()) as receiver:
        assert (await sender.send(post(receiver.url, b"first"))).status_code == 200
        exchange = await sender.send(post(receiver.url, b"second"))
        assert (exchange.phase, exchange.fault) == (Phase.WRITTEN, Fault.RESET)
        assert (await sender.send(post(receiver.url, b"third"))).status_code == 200
        assert [request.body for request in receiver.requests] == [b"first", b"third"]
        assert receiver.wires[0].raw.count(b"POST /hook") == 2


@pytest.mark.parametrize("end", [close(), reset()], ids=["closed", "reset"])
async def test_an_idle_connection_that_has_ended_is_not_used_again(sender: HttpSender, end: Answer) -> None:
    go, gone = asyncio.Event(), asyncio.Event()
    async with Receiver(ok() + wait_for(go) + end + signal(gone), ok()) as receiver:
        assert (await sender.send(post(receiver.url, b"first"))).status_code == 200
        go.set()
        await gone.wait()
        exchange = await sender.send(post(receiver.url, b"second"))
        assert (exchange.phase, exchange.status_code) == (Phase.RESPONDED, 200)
        assert [request.connection for request in receiver.requests] == [0, 1]


async def test_an_answer_that_nobody_asked_for_is_not_taken_for_the_next_request(sender: HttpSender) -> None:
    go, gone = asyncio.Event(), asyncio.Event()
    unasked = wait_for(go) + ok(b"unasked", "500 Late") + signal(gone)
    async with Receiver(ok() + unasked, ok(b"asked")) as receiver:
        assert (await sender.send(post(receiver.url))).status_code == 200
        go.set()
        await gone.wait()
        assert (await sender.send(post(receiver.url))).excerpt == b"asked"
        assert receiver.connections == 2


LAST_RESPONSES = {
    "Connection: close": HEAD + b"Connection: Close\r\nContent-Length: 2\r\n\r\nok",
    "HTTP/1.0": b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok",
    "a body without an end": HEAD + b"Content-Length: 999999\r\n\r\n" + b"x" * 70_000,
    "more than the response": HEAD + b"Content-Length: 2\r\n\r\nokHTTP/1.1 500 Injected\r\n\r\n",
    "a length beside a coding": HEAD + b"Content-Length: 99\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    "a malformed header": HEAD + b"X Bad : 1\r\nContent-Length: 2\r\n\r\nok",
    "a receiver that leaves at once": HEAD + b"Keep-Alive: timeout=1\r\nContent-Length: 2\r\n\r\nok",
}


@pytest.mark.parametrize("answer", LAST_RESPONSES.values(), ids=LAST_RESPONSES.keys())
async def test_a_connection_is_used_again_only_after_a_response_that_leaves_no_doubt(
    sender: HttpSender, answer: bytes
) -> None:
    async with Receiver(send(answer)) as receiver:
        for _ in range(2):
            assert (await sender.send(post(receiver.url))).status_code == 200
        assert [request.connection for request in receiver.requests] == [0, 1]


KEEPING_RESPONSES = {
    "a length": HEAD + b"Content-Length: 2\r\n\r\nok",
    "chunks": CHUNKED + b"2\r\nok\r\n0\r\n\r\n",
    "204": b"HTTP/1.1 204 No Content\r\n\r\n",
    "a failure": b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n",
    "a receiver that waits": HEAD + b"Keep-Alive: timeout=5, max=9\r\nContent-Length: 0\r\n\r\n",
}


@pytest.mark.parametrize("answer", KEEPING_RESPONSES.values(), ids=KEEPING_RESPONSES.keys())
async def test_a_connection_is_used_again_after_a_whole_response(sender: HttpSender, answer: bytes) -> None:
    async with Receiver(send(answer)) as receiver:
        for _ in range(3):
            assert (await sender.send(post(receiver.url))).phase is Phase.RESPONDED
        assert receiver.connections == 1
