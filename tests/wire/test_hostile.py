"""Answers that were made to cost us something: time, memory, or the next request's answer."""

from __future__ import annotations

import asyncio
import time

import pytest

from service.domain.limits import (
    RESPONSE_BYTES_MAX,
    RESPONSE_CHUNK_LINES_MAX,
    RESPONSE_HEADER_BYTES_KEPT_MAX,
)
from service.domain.outcome import Fault, Phase
from service.egress.response import NotHttp, ResponseReader
from service.egress.sender import HttpSender
from tests.wire.answers import BOTTOMLESS, CHUNKED, HEAD
from tests.wire.certificates import Authority
from tests.wire.posting import post
from tests.wire.receiver import Receiver, deaf, hang, ok, send

ONE_READ_BYTES = 256_000  # as much as an event loop hands over at once
HEALTHY_SECONDS_MAX = 1.0  # of a request beside 64 hostile ones; it was 3.5 s


def read(*parts: bytes) -> ResponseReader:
    reader = ResponseReader()
    for part in parts:
        if reader.feed(part):
            break
    return reader


@pytest.mark.parametrize(
    "body", [b"1\na\n", b"1\r\na\r\n", b"0\r\nX: y\r\n" + b"X: y\r\n"], ids=["chunks", "CRLF", "trailers"]
)
def test_a_read_full_of_tiny_chunks_is_not_parsed_to_its_end(body: bytes) -> None:
    reader = read(CHUNKED + body * (ONE_READ_BYTES // len(body)))
    assert reader.done
    assert not reader.reusable
    assert reader.head is not None
    assert reader.note is not None
    assert reader._chunk_lines_count <= 2 * RESPONSE_CHUNK_LINES_MAX + 1


def test_a_body_in_as_many_chunks_as_are_read_is_read_to_its_end() -> None:
    reader = read(CHUNKED + b"1\r\na\r\n" * (RESPONSE_CHUNK_LINES_MAX - 1) + b"0\r\n\r\n")
    assert reader.done
    assert reader.reusable
    assert reader.note is None


@pytest.mark.parametrize("framing", [b"Content-Length: 999999\r\n\r\n", b"\r\n"], ids=["length", "to the end"])
def test_what_lies_beyond_the_limit_of_a_body_is_not_looked_at(framing: bytes) -> None:
    reader = read(HEAD + framing, b"a" * ONE_READ_BYTES)
    assert reader.done
    assert reader.note == f"the response body was not read beyond {RESPONSE_BYTES_MAX} bytes"


def test_interim_heads_count_towards_the_limit_however_they_arrive() -> None:
    interim = b"HTTP/1.1 102 Processing\r\n\r\n"
    with pytest.raises(NotHttp, match="longer than"):
        read(interim * (ONE_READ_BYTES // len(interim)) + HEAD + b"Content-Length: 0\r\n\r\n")
    assert read(interim * 20 + HEAD + b"Content-Length: 0\r\n\r\n").reusable


def test_of_ten_thousand_headers_those_are_kept_that_are_looked_at() -> None:
    location = b"Location: http://a.example/" + b"x" * 5_000 + b"\r\n"
    reader = read(HEAD + b"ab:c\r\n" * 9_000 + location + b"Content-Length: 9\r\n\r\n")
    assert reader.head is not None
    assert [name for name, _ in reader.head.headers] == [b"Location", b"Content-Length"]
    assert max(len(value) for _, value in reader.head.headers) == RESPONSE_HEADER_BYTES_KEPT_MAX
    assert not reader.done, "its body is waited for"


@pytest.mark.parametrize("value", [b"a\x00b", b"a\rb"])
def test_a_header_that_holds_a_nul_or_a_bare_carriage_return_costs_the_connection(value: bytes) -> None:
    reader = read(HEAD + b"X: " + value + b"\r\nContent-Length: 0\r\n\r\n")
    assert reader.head is not None
    assert not reader.reusable


async def test_64_endless_answers_leave_a_healthy_receiver_its_time(sender: HttpSender) -> None:
    async with Receiver(BOTTOMLESS["endless"]) as endless, Receiver() as healthy:
        hostile = [asyncio.create_task(sender.send(post(endless.url, pool_key=str(number)))) for number in range(64)]
        await endless.wait_for_requests(1)
        slowest = 0.0
        while not all(task.done() for task in hostile):
            started = time.perf_counter()
            assert (await sender.send(post(healthy.url, pool_key="healthy"))).status_code == 200
            slowest = max(slowest, time.perf_counter() - started)
        assert {task.result().status_code for task in hostile} == {200}
    print(f"beside 64 endless answers a healthy one took {slowest * 1_000:.0f} ms at most")
    assert slowest < HEALTHY_SECONDS_MAX


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 204 No Content\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 204 No Content\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1 304 Not Modified\r\nContent-Length: 2\r\n\r\n",
    ],
)
async def test_a_bodiless_answer_that_announces_a_body_is_not_followed_on_its_connection(
    sender: HttpSender, head: bytes
) -> None:
    async with Receiver(send(head)) as receiver:
        for _ in range(3):
            exchange = await sender.send(post(receiver.url))
            assert exchange.phase is Phase.RESPONDED
            assert exchange.fault is None
        assert receiver.connections == 3


async def test_a_connection_under_tls_that_still_has_a_request_to_write_is_not_kept(
    named: HttpSender, authority: Authority
) -> None:
    """An early refusal of a large request: what is unwritten lies below TLS, where nobody sees it."""
    refusal = send(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
    context = authority.server_context("127.0.0.1")
    async with Receiver(ok(), at_connect=refusal + deaf(), tls=context) as receiver:
        exchange = await named.send(post(receiver.url, b"x" * 8_000_000, timeout_seconds=5.0))
        assert exchange.status_code == 413
        assert len(named._transport._pool) == 0


async def test_a_large_request_under_tls_that_was_taken_keeps_its_connection(
    named: HttpSender, authority: Authority
) -> None:
    async with Receiver(tls=authority.server_context("127.0.0.1")) as receiver:
        for _ in range(2):
            assert (await named.send(post(receiver.url, b"x" * 200_000))).status_code == 200
        assert receiver.connections == 1


async def test_a_connection_in_the_clear_is_never_used_for_https(sender: HttpSender) -> None:
    """A destination whose URL was changed from http to https, on the same port."""
    async with Receiver() as receiver:
        assert (await sender.send(post(receiver.url))).status_code == 200
        assert len(sender._transport._pool) == 1
        exchange = await sender.send(post(receiver.url.replace("http://", "https://"), timeout_seconds=5.0))
        assert (exchange.phase, exchange.fault) == (Phase.NOT_SENT, Fault.TLS)
        assert len(receiver.requests) == 1


async def test_a_certificate_for_another_address_is_refused(named: HttpSender, authority: Authority) -> None:
    async with Receiver(tls=authority.server_context("127.0.0.2")) as receiver:
        exchange = await named.send(post(receiver.url))
        assert (exchange.phase, exchange.fault) == (Phase.NOT_SENT, Fault.TLS)
        assert receiver.requests == []


@pytest.mark.parametrize(
    ("location", "told"),
    [
        (b"https://b.example/secret?x=y", "302 to b.example; redirects are not followed"),
        (b"//evil.example/x", "302 to evil.example; redirects are not followed"),
        (b"https://user:password@evil.example/x", "302 to evil.example; redirects are not followed"),
        (b"/only/a/path", "302 to a Location without a valid host; redirects are not followed"),
        (b"http://[", "302 to a Location without a valid host; redirects are not followed"),
    ],
)
async def test_where_a_redirect_points_is_told_by_its_host_alone(
    sender: HttpSender, location: bytes, told: str
) -> None:
    answer = b"HTTP/1.1 302 Found\r\nLocation: " + location + b"\r\nContent-Length: 0\r\n\r\n"
    async with Receiver(send(answer) + hang()) as receiver:
        assert (await sender.send(post(receiver.url))).error == told
