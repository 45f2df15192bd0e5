"""An egress proxy: every connection goes through it, and its own faults are ours, never a destination's."""

from __future__ import annotations

import asyncio
import base64
import datetime as dt
import errno
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from ipaddress import ip_address
from typing import Any

import pytest

from service.bootstrap import doctor
from service.domain.address import AllowList, EgressProxy, IPAddress, parse_proxy
from service.domain.delivery import Release
from service.domain.outcome import Exchange, Fault, Outcome, Phase, classify
from service.domain.retry import Budget, RetryPolicy, decide
from service.egress import dial, tunnel
from service.egress.sender import HttpSender
from service.settings import Settings
from tests.servers import SECRET_KEYS
from tests.wire.certificates import Authority
from tests.wire.posting import post
from tests.wire.receiver import (
    Answer,
    Receiver,
    Wire,
    after_reading,
    close,
    drip,
    flood,
    hang,
    ok,
    reset,
    send,
    signal,
)

PATIENCE = 2.0  # the deadline of what must run into it
USER, PASSWORD = "herodotus", "p:ss/wörd"
CREDENTIALS = "herodotus:p%3Ass%2Fw%C3%B6rd"
PUBLIC = "93.184.215.14"
ESTABLISHED = b"HTTP/1.1 200 Connection established\r\n\r\n"


class Connects:
    """What a proxy was asked, head by head. Its answers take the tunnel's further end as well:
    whoever is connected to is the receiver itself, so that this process dials the proxy and nothing else."""

    def __init__(self) -> None:
        self.heads: list[bytes] = []

    def tunnel(self, tls: ssl.SSLContext | None = None, *answers: bytes) -> Answer:
        """Give each CONNECT the next answer (an empty one is silence); after one of 200 the receiver takes over."""
        script = list(answers)

        async def step(wire: Wire) -> None:
            head = b""
            while b"\r\n\r\n" not in head:
                data = await wire.read()
                if not data:
                    raise ConnectionResetError
                head += data
            self.heads.append(head)
            answer = script.pop(0) if script else ESTABLISHED
            await wire.write(answer)
            if not answer:
                while await wire.read():
                    pass
            if not answer.startswith(b"HTTP/1.1 200"):
                raise ConnectionAbortedError
            if tls is not None:
                await wire.writer.start_tls(tls)

        return Answer(step)

    @property
    def targets(self) -> list[bytes]:
        """The addresses that were asked for."""
        return [head.split(b" ")[1] for head in self.heads]


def proxy_at(port: int, credentials: str = "") -> EgressProxy:
    proxy = parse_proxy(f"http://{credentials}127.0.0.1:{port}")
    assert proxy is not None
    return proxy


async def everything_is_public(host: str, port: int) -> list[IPAddress]:
    return [ip_address(PUBLIC)]


MakeSender = Callable[..., HttpSender]


@pytest.fixture
async def through(authority: Authority) -> AsyncIterator[MakeSender]:
    """Makes senders that go through a proxy on the loopback, and may use no address that is not public."""
    made: list[HttpSender] = []

    def make(port: int, *, credentials: str = "", resolve: Any = everything_is_public) -> HttpSender:
        proxy = proxy_at(port, credentials)
        made.append(HttpSender(AllowList(), proxy=proxy, tls=authority.client_context(), resolve=resolve))
        return made[-1]

    yield make
    for sender in made:
        await sender.close()


# The way through


async def test_a_plain_request_goes_through_a_tunnel_to_the_judged_address_and_names_its_host(
    through: MakeSender, dialled: list[Any]
) -> None:
    connects = Connects()
    async with Receiver(at_connect=connects.tunnel()) as receiver:
        exchange = await through(receiver.port).send(post("http://hooks.example:8080/a%2Fb?x=1", b"exactly this"))
        assert exchange.status_code == 200, exchange
        assert connects.heads == [b"CONNECT 93.184.215.14:8080 HTTP/1.1\r\nHost: 93.184.215.14:8080\r\n\r\n"]
        [request] = receiver.requests
        assert (request.target, request.body) == (b"/a%2Fb?x=1", b"exactly this")
        assert request.values("host") == [b"hooks.example:8080"]
        assert dialled == [("127.0.0.1", receiver.port)], "the proxy, and nothing else"


async def test_tls_inside_the_tunnel_is_with_the_destination_by_its_name(
    through: MakeSender, authority: Authority, dialled: list[Any]
) -> None:
    connects = Connects()
    server = authority.server_of_names("hooks.example")  # ends a handshake that tells no name
    async with Receiver(at_connect=connects.tunnel(server)) as receiver:
        exchange = await through(receiver.port).send(post("https://hooks.example/hook"))
        assert exchange.status_code == 200, exchange
        assert connects.targets == [b"93.184.215.14:443"]
        assert receiver.requests[0].values("host") == [b"hooks.example"]
        assert dialled == [("127.0.0.1", receiver.port)]


async def test_a_certificate_for_another_name_is_the_destinations_fault_and_nothing_is_sent(
    through: MakeSender, authority: Authority
) -> None:
    connects = Connects()
    async with Receiver(at_connect=connects.tunnel(authority.server_context("other.example"))) as receiver:
        exchange = await through(receiver.port).send(post("https://hooks.example/hook"))
        assert (exchange.phase, exchange.fault) == (Phase.NOT_SENT, Fault.TLS)
        assert receiver.requests == []


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://93.184.215.14/", b"93.184.215.14:80"),
        ("http://[2606:4700::1111]/", b"[2606:4700::1111]:80"),
        ("http://[2606:4700:0:0::1111]:8443/", b"[2606:4700::1111]:8443"),
    ],
)
async def test_a_literal_address_is_asked_for_as_it_was_judged(through: MakeSender, url: str, target: bytes) -> None:
    connects = Connects()
    async with Receiver(at_connect=connects.tunnel()) as receiver:
        assert (await through(receiver.port).send(post(url))).status_code == 200
        assert connects.targets == [target]


BLOCKED = {
    "a literal": "http://10.0.0.1/",
    "the metadata service": "http://169.254.169.254/latest/",
    "an IPv4 address in disguise": "http://[::ffff:127.0.0.1]/",
    "a name with one private answer": "https://mixed.example/",
    "a number": "http://2130706433/",
    "a scheme": "ftp://hooks.example/",
}


@pytest.mark.parametrize("url", BLOCKED.values(), ids=BLOCKED.keys())
async def test_the_guard_judges_before_the_proxy_is_asked(through: MakeSender, dialled: list[Any], url: str) -> None:
    async def mixed(host: str, port: int) -> list[IPAddress]:
        return [ip_address(PUBLIC), ip_address("10.0.0.1")]

    async with Receiver() as receiver:
        exchange = await through(receiver.port, resolve=mixed).send(post(url))
        assert (exchange.phase, exchange.fault) == (Phase.NOT_SENT, Fault.BLOCKED)
        assert dialled == []


async def test_an_allowed_private_address_goes_through_the_proxy_as_well(dialled: list[Any]) -> None:
    connects = Connects()
    async with Receiver(at_connect=connects.tunnel()) as receiver:
        sender = HttpSender(AllowList.parse("10.0.0.0/8:*"), proxy=proxy_at(receiver.port))
        assert (await sender.send(post("http://10.1.2.3/"))).status_code == 200
        assert (connects.targets, dialled) == ([b"10.1.2.3:80"], [("127.0.0.1", receiver.port)])
        await sender.close()


async def test_the_proxys_own_name_is_looked_up_and_not_judged() -> None:
    asked: list[str] = []

    async def resolve(host: str, port: int) -> list[IPAddress]:
        asked.append(host)
        return [ip_address("127.0.0.1" if host == "proxy.internal" else PUBLIC)]

    connects = Connects()
    async with Receiver(at_connect=connects.tunnel()) as receiver:
        proxy = parse_proxy(f"http://proxy.internal:{receiver.port}")
        sender = HttpSender(AllowList(), proxy=proxy, resolve=resolve)
        assert (await sender.send(post("http://hooks.example/"))).status_code == 200
        assert asked == ["hooks.example", "proxy.internal"]
        await sender.close()


async def test_the_credentials_go_to_the_proxy_alone(through: MakeSender) -> None:
    connects = Connects()
    async with Receiver(at_connect=connects.tunnel()) as receiver:
        await through(receiver.port, credentials=f"{CREDENTIALS}@").send(post("http://hooks.example/"))
        expected = base64.b64encode(f"{USER}:{PASSWORD}".encode())
        assert connects.heads[0].endswith(b"\r\nProxy-Authorization: Basic " + expected + b"\r\n\r\n")
        assert receiver.requests[0].values("proxy-authorization") == []
        assert receiver.requests[0].values("authorization") == []


# The pool


async def test_a_tunnel_is_kept_for_its_destination_and_shared_by_nobody(
    through: MakeSender, authority: Authority
) -> None:
    connects = Connects()
    server = authority.server_of_names("a.test", "b.test")
    async with Receiver(at_connect=connects.tunnel(server)) as receiver:
        sender = through(receiver.port)
        for name, key in [("a.test", "one"), ("b.test", "one"), ("a.test", "two")] * 2:
            assert (await sender.send(post(f"https://{name}/", pool_key=key))).status_code == 200
        assert [request.connection for request in receiver.requests] == [0, 1, 2, 0, 1, 2]
        assert len(connects.heads) == 3


async def test_a_tunnel_that_the_proxy_ended_while_idle_is_not_used_again(through: MakeSender) -> None:
    gone = asyncio.Event()
    connects = Connects()
    async with Receiver(ok() + close() + signal(gone), ok(), at_connect=connects.tunnel()) as receiver:
        sender = through(receiver.port)
        assert (await sender.send(post("http://hooks.example/"))).status_code == 200
        await gone.wait()
        assert (await sender.send(post("http://hooks.example/"))).status_code == 200
        assert [request.connection for request in receiver.requests] == [0, 1]


# Inside a tunnel that stands


async def test_a_reset_inside_the_tunnel_after_the_request_is_written(through: MakeSender) -> None:
    connects = Connects()
    async with Receiver(reset(), at_connect=connects.tunnel()) as receiver:
        exchange = await through(receiver.port).send(post("http://hooks.example/"))
        assert (exchange.phase, exchange.fault) == (Phase.WRITTEN, Fault.RESET)


async def test_a_502_of_the_destinations_is_the_destinations(through: MakeSender) -> None:
    connects = Connects()
    async with Receiver(ok(b"", "502 Bad Gateway"), at_connect=connects.tunnel()) as receiver:
        exchange = await through(receiver.port).send(post("http://hooks.example/"))
        assert (exchange.phase, exchange.status_code) == (Phase.RESPONDED, 502)


# The proxy's own faults


def charged_to_nobody(exchange: Exchange) -> bool:
    """Whether the delivery is released uncharged, and not at once."""
    now = dt.datetime(2026, 12, 1, tzinfo=dt.UTC)
    outcome = classify(exchange, {})
    budget = Budget(number=18, attempts_max=18, deadline_at=now + dt.timedelta(days=1))
    decision = decide(outcome, exchange, RetryPolicy(), budget, now=now, wall_now=now, jitter=0.5)
    return outcome is Outcome.NOT_SENT and isinstance(decision, Release) and decision.delay_seconds >= 1


def assert_the_proxys_fault(exchange: Exchange) -> None:
    assert (exchange.phase, exchange.fault, exchange.status_code) == (Phase.NOT_SENT, Fault.PROXY, None), exchange
    assert charged_to_nobody(exchange)
    assert exchange.error is not None
    assert exchange.error.startswith("the egress proxy ")
    assert exchange.error.isprintable()
    for secret in (USER, PASSWORD, CREDENTIALS, base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode(), "token"):
        assert secret not in exchange.error


def answers(text: str) -> Answer:
    return after_reading(1) + send(f"HTTP/1.1 {text}\r\nContent-Length: 4\r\n\r\noops".encode()) + hang()


PROXY_FAULTS = {
    "407": (answers(f"407 {USER} is unknown"), "407"),
    "403: not this destination": (answers("403 Forbidden"), "403"),
    "405: no CONNECT": (answers("405 Method Not Allowed"), "405"),
    "500": (answers("500 Oh"), "500"),
    "502: it did not reach the destination": (answers("502 Bad Gateway"), "502"),
    "503": (answers("503 Busy"), "503"),
    "504": (answers("504 Gateway Timeout"), "504"),
    "302": (answers("302 Found\r\nLocation: http://login.example/"), "302"),
    "close before it is asked": (close(), "closed the connection|cut the connection"),
    "close during CONNECT": (after_reading(1) + close(), "closed the connection|cut the connection"),
    "reset during CONNECT": (after_reading(1) + reset(), "cut the connection"),
    "half an answer, then close": (after_reading(1) + send(b"HTTP/1.1 200 Conn") + close(), "closed the connection"),
    "it speaks TLS": (after_reading(1) + send(b"\x15\x03\x01\x00\x02\x02\x16") + hang(), "does not speak HTTP"),
    "garbage": (after_reading(1) + send(b"hello\r\n\r\n") + hang(), "does not speak HTTP"),
    "a head without an end": (after_reading(1) + send(b"HTTP/1.1 200 OK\r\n") + flood(b"X: y\r\n" * 99), "head"),
    "an answer to what was not yet asked": (
        after_reading(1) + send(ESTABLISHED + b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n") + hang(),
        "more than its answer",
    ),
    "silence": (after_reading(1) + hang(), "in time"),
    "a drip": (after_reading(1) + send(b"HTTP/1.1 200 OK\r\n") + drip(b"X: y\r\n", 0.02), "in time"),
}


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize(("at_connect", "said"), PROXY_FAULTS.values(), ids=PROXY_FAULTS.keys())
async def test_a_fault_of_the_proxys_is_ours_nothing_is_sent_and_nobody_is_charged(
    through: MakeSender, dialled: list[Any], scheme: str, at_connect: Answer, said: str
) -> None:
    async with Receiver(at_connect=at_connect) as receiver:
        sender = through(receiver.port, credentials=f"{CREDENTIALS}@")
        runs_into_it = said == "in time"
        timeout_seconds = PATIENCE if runs_into_it else 20.0
        exchange = await sender.send(post(f"{scheme}://hooks.example/?token=1", timeout_seconds=timeout_seconds))
        assert_the_proxys_fault(exchange)
        assert exchange.error is not None
        assert any(each in exchange.error for each in said.split("|")), exchange.error
        assert b"POST" not in b"".join(bytes(wire.raw) for wire in receiver.wires)
        assert set(dialled) == {("127.0.0.1", receiver.port)}, "no way around the proxy is tried"
        if runs_into_it:
            assert exchange.latency_ms <= PATIENCE * 1_000 + 1_000
            await receiver.wait_for_ended(1)


async def test_a_proxy_that_refuses_connections_is_our_fault(through: MakeSender) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert_the_proxys_fault(await through(port).send(post("http://hooks.example/")))


async def test_a_proxy_that_accepts_nothing_ends_at_the_deadline_and_is_our_fault(through: MakeSender) -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        exchange = await through(listener.getsockname()[1]).send(post("http://a.test/", timeout_seconds=PATIENCE))
    assert_the_proxys_fault(exchange)


@pytest.mark.parametrize("answer", [[], socket.gaierror(socket.EAI_NONAME, "Name or service not known")])
async def test_a_proxy_whose_name_does_not_resolve_is_our_fault(dialled: list[Any], answer: Any) -> None:
    async def resolve(host: str, port: int) -> list[IPAddress]:
        if host != "proxy.internal":
            return [ip_address(PUBLIC)]
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, list)
        return answer

    sender = HttpSender(AllowList(), proxy=parse_proxy("http://proxy.internal:3128"), resolve=resolve)
    assert_the_proxys_fault(await sender.send(post("http://hooks.example/")))
    assert dialled == []
    await sender.close()


async def test_a_destination_whose_name_does_not_resolve_is_the_destinations_fault_behind_a_proxy_too(
    through: MakeSender, dialled: list[Any]
) -> None:
    async def fail(host: str, port: int) -> list[IPAddress]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    exchange = await through(1, resolve=fail).send(post("http://hooks.example/"))
    assert (exchange.phase, exchange.fault, dialled) == (Phase.NOT_SENT, Fault.DNS, [])


async def test_what_our_own_machine_lacks_on_the_way_to_the_proxy_is_not_the_proxys_fault(
    through: MakeSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> socket.socket:
        raise OSError(errno.EMFILE, "no")

    monkeypatch.setattr(dial, "_dial_one", fail)
    exchange = await through(1).send(post("http://hooks.example/"))
    assert (exchange.phase, exchange.fault) == (Phase.NOT_SENT, Fault.INTERNAL)


# Names with several addresses


async def two_addresses(host: str, port: int) -> list[IPAddress]:
    return [ip_address("2606:4700::1111"), ip_address(PUBLIC)]


@pytest.mark.parametrize("status", ["502 Bad Gateway", "503 Busy", "504 Gateway Timeout"])
async def test_an_address_that_the_proxy_does_not_reach_gives_way_to_the_next(through: MakeSender, status: str) -> None:
    connects = Connects()
    at_connect = connects.tunnel(None, f"HTTP/1.1 {status}\r\n\r\n".encode())
    async with Receiver(at_connect=at_connect) as receiver:
        assert (await through(receiver.port, resolve=two_addresses).send(post("http://two.test/"))).status_code == 200
        assert connects.targets == [b"[2606:4700::1111]:80", b"93.184.215.14:80"]


async def test_an_address_on_which_the_proxy_hangs_gives_way_to_the_next(
    through: MakeSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunnel, "DIAL_PATIENCE_SECONDS", 0.5)
    connects = Connects()
    async with Receiver(at_connect=connects.tunnel(None, b"")) as receiver:
        assert (await through(receiver.port, resolve=two_addresses).send(post("http://two.test/"))).status_code == 200
        assert connects.targets == [b"[2606:4700::1111]:80", b"93.184.215.14:80"]


async def test_a_proxy_that_wants_other_credentials_is_asked_once(through: MakeSender) -> None:
    connects = Connects()
    at_connect = connects.tunnel(None, *[b"HTTP/1.1 407 Who\r\n\r\n"] * 2)
    async with Receiver(at_connect=at_connect) as receiver:
        assert_the_proxys_fault(await through(receiver.port, resolve=two_addresses).send(post("http://two.test/")))
        assert len(connects.heads) == 1


# Cancellation and shutdown


async def test_cancellation_during_connect_closes_the_connection(through: MakeSender) -> None:
    begun = asyncio.Event()
    async with Receiver(at_connect=after_reading(1) + signal(begun) + hang()) as receiver:
        task = asyncio.ensure_future(through(receiver.port).send(post("https://hooks.example/")))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await receiver.wait_for_ended(1)


async def test_one_deadline_covers_the_tunnel_and_what_happens_in_it(through: MakeSender) -> None:
    connects = Connects()
    async with Receiver(hang(), at_connect=connects.tunnel()) as receiver:
        exchange = await through(receiver.port).send(post("http://hooks.example/", timeout_seconds=PATIENCE))
        assert (exchange.phase, exchange.fault) == (Phase.WRITTEN, Fault.TIMEOUT)
        assert PATIENCE * 1_000 - 5 <= exchange.latency_ms <= PATIENCE * 1_000 + 1_000


async def test_the_doctor_says_whether_the_proxy_can_be_reached() -> None:
    def settings(port: int) -> Settings:
        values = {"database_url": "postgresql://x@127.0.0.1:1/x", "redis_url": "redis://127.0.0.1:1/0"}
        proxy = f"http://{CREDENTIALS}@127.0.0.1:{port}"
        return Settings.model_validate({**values, "secret_keys": SECRET_KEYS, "egress_proxy": proxy})

    async with Receiver() as receiver:
        found = await asyncio.to_thread(doctor, settings(receiver.port))
        assert found[-1] == ("proxy", True, "accepts connections")
        assert receiver.requests == []
    [part, well, sentence] = (await asyncio.to_thread(doctor, settings(receiver.port)))[-1]
    assert (part, well) == ("proxy", False)
    assert sentence == "the egress proxy cannot be reached: the connection was refused: check EGRESS_PROXY"


def test_the_credentials_are_in_no_text_of_the_proxy() -> None:
    proxy = proxy_at(3128, f"{CREDENTIALS}@")
    assert proxy.authorization is not None
    assert proxy.authorization not in repr(proxy)
    assert proxy.authorization not in str(proxy)
