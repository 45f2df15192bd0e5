"""Where requests go and where they do not: URLs, addresses, headers, and what has no say in it."""

from __future__ import annotations

import asyncio
import socket
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from service.domain.address import AllowList, IPAddress
from service.domain.outcome import Fault, Phase
from service.egress.guard import tls_context
from service.egress.sender import HttpSender
from tests.wire.certificates import Authority
from tests.wire.posting import HEADERS, post
from tests.wire.receiver import Receiver, ok
from tests.wire.urls import NOT_PUBLIC, REFUSED_URLS

LOOPBACK = AllowList.parse("127.0.0.0/8:*,::1/128:*")


class Names:
    """A resolver whose answers are written down; the last answer to a name is repeated."""

    def __init__(self, **answers: list[list[str]]) -> None:
        self._answers = {name.replace("_", "."): list(each) for name, each in answers.items()}
        self.asked: list[str] = []

    async def __call__(self, host: str, port: int) -> list[IPAddress]:
        self.asked.append(host)
        answers = self._answers[host]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        return [ip_address(text) for text in answer]


async def test_the_request_target_goes_out_as_it_was_submitted(sender: HttpSender) -> None:
    async with Receiver() as receiver:
        target = "/a%2Fb/./c?sig=%26%2B+x&z=a|b&empty=&dup=1&dup=2"
        await sender.send(post(f"http://127.0.0.1:{receiver.port}{target}#frag"))
        assert receiver.requests[0].target == target.encode()


@pytest.mark.parametrize(("path", "target"), [("", b"/"), ("?a=1", b"/?a=1"), ("/..//%zz", b"/..//%zz"), ("#f", b"/")])
async def test_a_target_starts_with_a_slash_and_is_otherwise_left_alone(
    sender: HttpSender, path: str, target: bytes
) -> None:
    async with Receiver() as receiver:
        await sender.send(post(f"http://127.0.0.1:{receiver.port}{path}"))
        assert receiver.requests[0].target == target


async def test_the_wire_carries_exactly_one_of_each_header_and_the_exact_body(sender: HttpSender) -> None:
    body = '{"b":1.0, "a":"é/😀", "z":[1e2, -0.0]}'.encode()
    async with Receiver() as receiver:
        await sender.send(post(receiver.url, body, headers=[*HEADERS, ("Authorization", "Bearer x")]))
        request = receiver.requests[0]
    assert request.method == b"POST"
    assert request.body == body
    assert request.headers == [
        (b"Host", f"127.0.0.1:{receiver.port}".encode()),
        (b"Webhook-Id", b"msg_1"),
        (b"Content-Type", b"application/json"),
        (b"Authorization", b"Bearer x"),
        (b"Content-Length", str(len(body)).encode()),
        (b"Accept-Encoding", b"identity"),
    ]


async def test_an_empty_body_goes_out_with_a_length_of_zero(sender: HttpSender) -> None:
    async with Receiver() as receiver:
        assert (await sender.send(post(receiver.url, b""))).status_code == 200
        assert receiver.requests[0].values("content-length") == [b"0"]


async def test_an_ipv6_literal_stands_in_brackets_with_its_port(sender: HttpSender) -> None:
    async with Receiver(host="::1") as receiver:
        exchange = await sender.send(post(f"http://[0:0::0:1]:{receiver.port}/"))
        assert exchange.status_code == 200, exchange
        assert receiver.requests[0].values("host") == [f"[::1]:{receiver.port}".encode()]


@pytest.mark.parametrize("url", REFUSED_URLS, ids=lambda url: ascii(url)[:40])
async def test_a_url_that_is_refused_at_intake_and_stored_anyway_is_blocked_unsent(
    sender: HttpSender, dialled: list[Any], url: str
) -> None:
    exchange = await sender.send(post(url))
    assert (exchange.phase, exchange.fault) == (Phase.NOT_SENT, Fault.BLOCKED)
    assert exchange.error
    assert exchange.error.startswith("the URL is not allowed: ")
    assert dialled == []


@pytest.mark.parametrize("address", NOT_PUBLIC)
@pytest.mark.parametrize("as_name", [False, True], ids=["literal", "answer"])
async def test_a_non_public_address_is_blocked_and_no_connection_is_opened(
    dialled: list[Any], address: str, as_name: bool
) -> None:
    names = Names(hooks_example=[[address]])
    sender = HttpSender(AllowList(), resolve=names)
    host = "hooks.example" if as_name else f"[{address}]" if ":" in address else address
    exchange = await sender.send(post(f"http://{host}/"))
    assert (exchange.phase, exchange.fault) == (Phase.NOT_SENT, Fault.BLOCKED)
    assert exchange.error
    assert "is not a public address" in exchange.error
    assert dialled == []
    assert names.asked == (["hooks.example"] if as_name else [])
    await sender.close()


async def test_our_own_address_is_refused_by_default(dialled: list[Any]) -> None:
    sender = HttpSender(AllowList())
    async with Receiver() as receiver:
        for host in ("127.0.0.1", "localhost"):
            exchange = await sender.send(post(f"http://{host}:{receiver.port}/"))
            assert (exchange.phase, exchange.fault) == (Phase.NOT_SENT, Fault.BLOCKED)
        assert receiver.connections == 0
    assert dialled == []
    await sender.close()


async def test_the_allow_list_opens_a_range_for_its_port_alone(dialled: list[Any]) -> None:
    async with Receiver() as open_port, Receiver() as other_port:
        sender = HttpSender(AllowList.parse(f"127.0.0.0/8:{open_port.port}"))
        assert (await sender.send(post(other_port.url))).fault is Fault.BLOCKED
        assert (await sender.send(post(open_port.url))).status_code == 200
        assert (open_port.connections, other_port.connections) == (1, 0)
        assert dialled == [("127.0.0.1", open_port.port)]
        await sender.close()


@pytest.mark.parametrize("answer", [["127.0.0.1", "10.0.0.1"], ["10.0.0.1", "127.0.0.1"], ["127.0.0.1", "fd00::1"]])
async def test_a_name_with_one_denied_answer_is_refused_whole(dialled: list[Any], answer: list[str]) -> None:
    sender = HttpSender(LOOPBACK, resolve=Names(mixed_example=[answer]))
    exchange = await sender.send(post("http://mixed.example/", timeout_seconds=2.0))
    assert (exchange.phase, exchange.fault) == (Phase.NOT_SENT, Fault.BLOCKED)
    assert dialled == []
    await sender.close()


async def test_a_name_is_looked_up_once_for_each_connection_and_judged_anew(dialled: list[Any]) -> None:
    names = Names(rebinds_example=[["127.0.0.1"], ["10.0.0.1"]])
    sender = HttpSender(LOOPBACK, resolve=names)
    async with Receiver(ok(b"", "200 OK", "Connection: close")) as receiver:
        url = f"http://rebinds.example:{receiver.port}/"
        assert (await sender.send(post(url))).status_code == 200
        assert names.asked == ["rebinds.example"]
        assert receiver.requests[0].values("host") == [f"rebinds.example:{receiver.port}".encode()]
        assert (await sender.send(post(url))).fault is Fault.BLOCKED
        assert names.asked == ["rebinds.example"] * 2
        assert dialled == [("127.0.0.1", receiver.port)]
    await sender.close()


async def test_the_next_address_of_a_name_is_tried_when_one_refuses() -> None:
    sender = HttpSender(LOOPBACK, resolve=Names(two_example=[["::1", "127.0.0.1"]]))
    async with Receiver() as receiver:  # on 127.0.0.1 alone
        assert (await sender.send(post(f"http://two.example:{receiver.port}/"))).status_code == 200
        assert len(receiver.requests) == 1
    await sender.close()


FORCED_HEADERS = {
    **{
        f"{name!r}": (name, "x")
        for name in (
            *("host", "Host", "HOST", "content-length", "transfer-encoding", "Connection", "expect", "te", "trailer"),
            *("upgrade", "keep-alive", "proxy-authorization", "accept-encoding", " host", "host ", "ho:st", ""),
        )
    },
    "a second signature": ("WEBHOOK-ID", "forged"),
    "CR and LF": ("X-A", "a\r\nHost: evil"),
    "LF": ("X-A", "a\nb"),
    "NUL": ("X-A", "a\x00b"),
    "Latin-1": ("X-A", "é"),
    "a surrogate": ("X-A", "\ud800"),
    "a name of bytes": ("X-\xe9", "a"),
    "a name that holds a header": ("Host:evil", "a"),
    "a name with a line end": ("X-A\r\nHost: evil\r\nX-B", "a"),
    "64 kB": ("X-A", "a" * 65_536),
    "a padded value": ("X-A", " a "),
}


@pytest.mark.parametrize("header", FORCED_HEADERS.values(), ids=FORCED_HEADERS.keys())
async def test_a_header_forced_into_the_row_blocks_the_attempt_and_nothing_is_sent(
    sender: HttpSender, dialled: list[Any], header: tuple[str, str]
) -> None:
    exchange = await sender.send(post("http://127.0.0.1/", headers=[*HEADERS, header]))
    assert (exchange.phase, exchange.fault) == (Phase.NOT_SENT, Fault.BLOCKED)
    assert exchange.error
    assert exchange.error.startswith("header ")
    assert exchange.error.isprintable()
    assert dialled == []


async def test_a_cookie_is_never_sent_back_to_anyone(sender: HttpSender) -> None:
    async with Receiver(ok(b"", "200 OK", "Set-Cookie: a=1; Path=/")) as first, Receiver() as second:
        for receiver in (first, first, second):
            await sender.send(post(receiver.url))
        assert [request.values("cookie") for request in first.requests + second.requests] == [[], [], []]


async def test_the_environment_has_no_say(
    authority: Authority, dialled: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with Receiver() as proxy, Receiver() as receiver:
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
            monkeypatch.setenv(name.lower(), proxy.url)
        netrc = tmp_path / ".netrc"
        netrc.write_text("machine 127.0.0.1 login a password b\n")
        netrc.chmod(0o600)
        monkeypatch.setenv("NETRC", str(netrc))
        monkeypatch.setenv("HOME", str(tmp_path))
        sender = HttpSender(LOOPBACK)
        assert (await sender.send(post(receiver.url))).status_code == 200
        assert receiver.requests[0].values("authorization") == []
        assert proxy.connections == 0
        assert dialled == [("127.0.0.1", receiver.port)]
        await sender.close()


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "SSL_CERT_DIR"])
async def test_certificates_named_by_the_environment_are_not_trusted(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    file = authority.root_file
    monkeypatch.setenv(variable, str(file if variable == "SSL_CERT_FILE" else file.parent))
    sender = HttpSender(LOOPBACK, tls=tls_context())
    async with Receiver(tls=authority.server_context("127.0.0.1")) as receiver:
        exchange = await sender.send(post(receiver.url))
        assert (exchange.phase, exchange.fault) == (Phase.NOT_SENT, Fault.TLS)
        assert receiver.requests == []
    await sender.close()


def test_certifi_serves_where_the_system_has_no_certificates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import ssl

    class _Paths:
        openssl_cafile = str(tmp_path / "none.pem")
        openssl_capath = str(tmp_path)

    monkeypatch.setattr(ssl, "get_default_verify_paths", _Paths)
    assert len(tls_context().get_ca_certs()) > 100


NOT_ANSWERED = {
    "the name is unknown": (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), Fault.DNS),
    "the name server is down": (socket.gaierror(socket.EAI_AGAIN, "Temporary failure"), Fault.DNS),
    "our memory is short": (socket.gaierror(socket.EAI_MEMORY, "Memory allocation failure"), Fault.INTERNAL),
    "our descriptors are used up": (socket.gaierror(socket.EAI_SYSTEM, "System error"), Fault.INTERNAL),
    "our own bug": (KeyError("?"), Fault.INTERNAL),
}


@pytest.mark.parametrize(("error", "fault"), NOT_ANSWERED.values(), ids=NOT_ANSWERED.keys())
async def test_a_name_that_does_not_resolve_is_not_sent(dialled: list[Any], error: Exception, fault: Fault) -> None:
    async def fail(host: str, port: int) -> list[IPAddress]:
        raise error

    sender = HttpSender(AllowList(), resolve=fail)
    exchange = await sender.send(post("http://hooks.example/?token=secret"))
    assert (exchange.phase, exchange.fault, dialled) == (Phase.NOT_SENT, fault, [])
    assert exchange.error
    assert "secret" not in exchange.error
    await sender.close()


async def test_a_name_without_an_address_is_not_sent() -> None:
    sender = HttpSender(AllowList(), resolve=Names(empty_example=[[]]))
    exchange = await sender.send(post("http://empty.example/"))
    assert (exchange.phase, exchange.fault) == (Phase.NOT_SENT, Fault.DNS)
    await sender.close()


async def test_a_lookup_that_does_not_end_is_given_up_at_the_deadline() -> None:
    async def silence(host: str, port: int) -> list[IPAddress]:
        await asyncio.Event().wait()
        raise AssertionError

    sender = HttpSender(AllowList(), resolve=silence)
    exchange = await sender.send(post("http://hooks.example/", timeout_seconds=0.05))
    assert (exchange.phase, exchange.fault) == (Phase.NOT_SENT, Fault.DNS)
    await sender.close()
