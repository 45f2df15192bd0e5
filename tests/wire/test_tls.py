"""TLS: verified before a byte of the request is written, by the name that was configured."""

from __future__ import annotations

from typing import Any

import pytest

from service.domain.outcome import Fault, Phase
from service.egress.sender import HttpSender
from tests.wire.certificates import Authority
from tests.wire.posting import post
from tests.wire.receiver import Receiver, close, hang, reset, send

PATIENCE = 2.0  # the deadline of what must run into it, and has to connect before: also on a busy machine


async def test_a_good_certificate_is_served_and_the_connection_kept(named: HttpSender, authority: Authority) -> None:
    async with Receiver(tls=authority.server_context("a.test")) as receiver:
        for _ in range(2):
            exchange = await named.send(post(f"https://a.test:{receiver.port}/"))
            assert exchange.status_code == 200, exchange
        assert receiver.connections == 1


async def test_a_numeric_address_is_verified_by_its_address(named: HttpSender, authority: Authority) -> None:
    async with Receiver(tls=authority.server_context("127.0.0.1")) as receiver:
        assert (await named.send(post(receiver.url))).status_code == 200


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("another name", "Hostname mismatch"),
        ("expired", "expired"),
        ("self-signed", "self-signed"),
        ("TLS 1.1", "the TLS handshake"),
        ("a missing intermediate", "unable to get local issuer"),
        ("a name the server does not know", "the TLS handshake"),
    ],
)
async def test_a_server_that_cannot_be_verified_gets_no_byte_of_the_request(
    named: HttpSender, authority: Authority, kind: str, reason: str
) -> None:
    context = {
        "another name": lambda: authority.server_context("b.test"),
        "expired": lambda: authority.server_context("a.test", expired=True),
        "self-signed": lambda: authority.server_context("a.test", self_signed=True),
        "TLS 1.1": lambda: authority.server_of_tls_1_1("a.test"),
        "a missing intermediate": lambda: authority.server_without_its_intermediate("a.test"),
        "a name the server does not know": lambda: authority.server_of_names("b.test"),
    }[kind]()
    async with Receiver(tls=context) as receiver:
        exchange = await named.send(post(f"https://a.test:{receiver.port}/?token=secret"))
        assert (exchange.phase, exchange.fault) == (Phase.NOT_SENT, Fault.TLS)
        assert exchange.error
        assert reason in exchange.error
        assert "secret" not in exchange.error
        assert receiver.requests == []
        assert all(not wire.raw for wire in receiver.wires)


async def test_a_server_that_needs_its_name_to_be_told_works(named: HttpSender, authority: Authority) -> None:
    async with Receiver(tls=authority.server_of_names("a.test", "b.test")) as receiver:
        for name in ("a.test", "b.test"):
            assert (await named.send(post(f"https://{name}:{receiver.port}/"))).status_code == 200


async def test_two_names_at_one_address_never_share_a_connection(named: HttpSender, authority: Authority) -> None:
    async with Receiver(tls=authority.server_of_names("a.test", "b.test")) as receiver:
        for name in ("a.test", "b.test", "a.test", "b.test"):
            assert (await named.send(post(f"https://{name}:{receiver.port}/"))).status_code == 200
        assert [(request.connection, request.values("host")[0].split(b":")[0]) for request in receiver.requests] == [
            (0, b"a.test"),
            (1, b"b.test"),
            (0, b"a.test"),
            (1, b"b.test"),
        ]


@pytest.mark.parametrize("end", [close(), reset(), send(b"HTTP/1.1 400 Plain\r\n\r\n") + close()])
async def test_a_server_that_breaks_the_handshake_off_is_not_sent(named: HttpSender, end: Any) -> None:
    async with Receiver(at_connect=end) as receiver:
        exchange = await named.send(post(f"https://a.test:{receiver.port}/"))
        assert (exchange.phase, exchange.fault) == (Phase.NOT_SENT, Fault.TLS)


async def test_silence_in_the_handshake_ends_at_the_deadline_and_closes(named: HttpSender) -> None:
    async with Receiver(at_connect=hang()) as receiver:
        exchange = await named.send(post(f"https://a.test:{receiver.port}/", timeout_seconds=PATIENCE))
        assert (exchange.phase, exchange.fault) == (Phase.NOT_SENT, Fault.TLS)
        await receiver.wait_for_ended(1)


async def test_a_reset_under_tls_after_the_request_is_written(named: HttpSender, authority: Authority) -> None:
    async with Receiver(reset(), tls=authority.server_context("a.test")) as receiver:
        exchange = await named.send(post(f"https://a.test:{receiver.port}/"))
        assert (exchange.phase, exchange.fault) == (Phase.WRITTEN, Fault.RESET)
        assert len(receiver.requests) == 1


async def test_a_body_under_tls_that_ends_early_keeps_its_status(named: HttpSender, authority: Authority) -> None:
    answer = send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc") + close()
    async with Receiver(answer, tls=authority.server_context("a.test")) as receiver:
        exchange = await named.send(post(f"https://a.test:{receiver.port}/"))
        assert (exchange.status_code, exchange.excerpt) == (200, b"abc")
