"""Connections: made, verified, kept, shared by nobody, and never leaked."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import socket
import sys
import threading
from contextlib import ExitStack
from ipaddress import ip_address
from typing import Any

import pytest

from service.domain.address import AllowList, IPAddress
from service.domain.limits import KEPT_ALIVE_PER_DESTINATION_MAX
from service.domain.outcome import Exchange, Fault, Phase
from service.egress import dial, guard, pool
from service.egress.connection import Connection
from service.egress.guard import SystemResolver
from service.egress.response import ResponseReader
from service.egress.sender import HttpSender
from tests.wire.answers import BOTTOMLESS, HEAD
from tests.wire.posting import post
from tests.wire.receiver import (
    Receiver,
    after_reading,
    deaf,
    drip,
    hang,
    ok,
    send,
    signal,
    wait_for,
)

LOOPBACK = AllowList.parse("127.0.0.0/8:*")
PATIENCE = 2.0  # the deadline of what must run into it; on a busy machine even 20 requests take a while to be written


# Connecting


async def test_a_refused_connection_is_not_sent(sender: HttpSender) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    exchange = await sender.send(post(f"http://127.0.0.1:{port}/"))
    assert (exchange.phase, exchange.fault) == (Phase.NOT_SENT, Fault.REFUSED)


async def test_a_process_that_was_paused_while_connecting_writes_nothing(sender: HttpSender) -> None:
    async with Receiver(ok()) as receiver:
        paused = dataclasses.replace(post(receiver.url), may_write=lambda: False)
        exchange = await sender.send(paused)
        assert (exchange.phase, exchange.fault) == (Phase.NOT_SENT, Fault.INTERNAL)
        assert (await sender.send(post(receiver.url))).status_code == 200
        assert len(receiver.requests) == 1


@pytest.fixture
def full_port() -> Any:
    """A port that accepts nothing: its queue is full, so the system drops what comes."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


async def test_a_connection_that_is_not_accepted_is_given_up_at_the_deadline(
    sender: HttpSender, full_port: int
) -> None:
    exchange = await sender.send(post(f"http://127.0.0.1:{full_port}/", timeout_seconds=PATIENCE))
    assert (exchange.phase, exchange.fault) == (Phase.NOT_SENT, Fault.CONNECT_TIMEOUT)


async def test_an_address_that_does_not_accept_gives_way_to_the_next(
    full_port: int, monkeypatch: pytest.MonkeyPatch, dialled: list[Any]
) -> None:
    async def two(host: str, port: int) -> list[IPAddress]:
        return [ip_address("127.0.0.1"), ip_address("127.0.0.2")]

    monkeypatch.setattr(dial, "DIAL_PATIENCE_SECONDS", 0.05)
    sender = HttpSender(LOOPBACK, resolve=two)
    exchange = await sender.send(post(f"http://two.test:{full_port}/"))
    assert (exchange.phase, exchange.fault) == (Phase.NOT_SENT, Fault.REFUSED), "by the second"
    assert [host for host, _ in dialled] == ["127.0.0.1", "127.0.0.2"]
    await sender.close()


CONNECT_ERRORS = {
    "unreachable": (errno.EHOSTUNREACH, Fault.CONNECT),
    "reset": (errno.ECONNRESET, Fault.CONNECT),
    "timed out by the system": (errno.ETIMEDOUT, Fault.CONNECT_TIMEOUT),
    "our descriptors are used up": (errno.EMFILE, Fault.INTERNAL),
    "our ports are used up": (errno.EADDRNOTAVAIL, Fault.INTERNAL),
}


@pytest.mark.parametrize(("number", "fault"), CONNECT_ERRORS.values(), ids=CONNECT_ERRORS.keys())
async def test_what_our_own_machine_lacks_is_not_the_receivers_fault(
    sender: HttpSender, monkeypatch: pytest.MonkeyPatch, number: int, fault: Fault
) -> None:
    async def fail(*_: object) -> socket.socket:
        raise OSError(number, "no")

    monkeypatch.setattr(dial, "_dial_one", fail)
    exchange = await sender.send(post("http://127.0.0.1/"))
    assert (exchange.phase, exchange.fault) == (Phase.NOT_SENT, fault)


# Names


async def test_all_who_want_a_name_at_once_share_one_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bytes] = []
    go = threading.Event()

    def look_up(host: bytes, port: int, **_: object) -> Any:
        asked.append(host)
        go.wait(10)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    resolve = SystemResolver()
    waiting = [asyncio.ensure_future(resolve("a.test", 80)) for _ in range(3)]
    given_up = asyncio.ensure_future(resolve("a.test", 80))
    await asyncio.wait({given_up}, timeout=0)
    given_up.cancel()
    go.set()
    assert await asyncio.gather(*waiting) == [[ip_address("192.0.2.1")]] * 3
    assert asked == [b"a.test"]


async def test_names_with_a_dead_name_server_make_no_other_name_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()

    def look_up(host: bytes, port: int, **_: object) -> Any:
        if host.startswith(b"dead"):
            go.wait(10)
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    sender = HttpSender(LOOPBACK)
    async with Receiver() as receiver:
        dead = [
            asyncio.ensure_future(sender.send(post(f"http://dead{number}.test/", timeout_seconds=9)))
            for number in range(64)
        ]
        healthy = await sender.send(post(f"http://alive.test:{receiver.port}/"))
        assert healthy.status_code == 200
        assert not any(task.done() for task in dead)
        go.set()
        assert {exchange.fault for exchange in await asyncio.gather(*dead)} == {Fault.DNS}
    await sender.close()


async def test_too_many_lookups_at_once_are_our_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "LOOKUPS_MAX", 0)
    sender = HttpSender(LOOPBACK)
    exchange = await sender.send(post("http://a.test/"))
    assert (exchange.phase, exchange.fault) == (Phase.NOT_SENT, Fault.INTERNAL)
    await sender.close()


async def test_the_system_resolves_its_own_name() -> None:
    assert ip_address("127.0.0.1") in await SystemResolver()("localhost", 80)


# Our own bugs


async def test_a_bug_while_reading_is_ours_and_the_request_counts_as_written(
    sender: HttpSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: ResponseReader, data: bytes) -> bool:
        raise KeyError("secret")

    async with Receiver() as receiver:
        with monkeypatch.context() as patch:
            patch.setattr(ResponseReader, "feed", fail)
            exchange = await sender.send(post(receiver.url))
        assert (exchange.phase, exchange.fault) == (Phase.WRITTEN, Fault.INTERNAL)
        assert exchange.error == "the sender failed: KeyError"
        await receiver.wait_for_ended(1)


async def test_a_bug_after_the_answer_is_ours_and_never_not_sent(
    sender: HttpSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> Exchange:
        raise KeyError

    async with Receiver() as receiver:
        monkeypatch.setattr("service.egress.sender._facts", fail)
        exchange = await sender.send(post(receiver.url))
        assert (exchange.phase, exchange.fault) == (Phase.WRITTEN, Fault.INTERNAL)


async def test_a_connection_that_ended_before_the_write_is_not_sent(
    sender: HttpSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = guard.Guard.connect

    async def connect_and_lose(*arguments: Any) -> Connection:
        connection = await connect(*arguments)
        connection.abort()
        return connection

    monkeypatch.setattr(guard.Guard, "connect", connect_and_lose)
    async with Receiver() as receiver:
        exchange = await sender.send(post(receiver.url))
        assert (exchange.phase, exchange.fault) == (Phase.NOT_SENT, Fault.CONNECT)
        assert receiver.requests == []


# Cancellation and shutdown


STALLS = {
    "before an answer": {"answers": (hang(),)},
    "inside the body": {"answers": (send(b"HTTP/1.1 200 OK\r\nContent-Length: 60\r\n\r\n") + hang(),)},
    "inside a drip": {"answers": (send(b"HTTP/1.1 200 OK\r\n\r\n") + drip(b"x", 0.01),)},
}


@pytest.mark.parametrize("stall", STALLS.values(), ids=STALLS.keys())
async def test_cancellation_is_raised_and_closes_the_connection(sender: HttpSender, stall: dict[str, Any]) -> None:
    async with Receiver(*stall["answers"]) as receiver:
        task = asyncio.ensure_future(sender.send(post(receiver.url)))
        await receiver.wait_for_requests(1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await receiver.wait_for_ended(1)


async def test_cancellation_in_the_handshake_closes_the_connection(named: HttpSender) -> None:
    begun = asyncio.Event()
    async with Receiver(at_connect=after_reading(1) + signal(begun) + hang()) as receiver:
        task = asyncio.ensure_future(named.send(post(f"https://a.test:{receiver.port}/")))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await receiver.wait_for_ended(1)


async def test_a_cancelled_exchange_leaves_nothing_that_the_next_one_could_read(sender: HttpSender) -> None:
    go = asyncio.Event()
    async with Receiver(wait_for(go) + ok(b"late"), ok(b"mine")) as receiver:
        task = asyncio.ensure_future(sender.send(post(receiver.url)))
        await receiver.wait_for_requests(1)
        task.cancel()
        go.set()
        assert (await sender.send(post(receiver.url))).excerpt == b"mine"
        assert receiver.connections == 2


async def test_closing_the_sender_ends_an_exchange_as_our_own_doing(sender: HttpSender) -> None:
    async with Receiver(hang()) as receiver:
        task = asyncio.ensure_future(sender.send(post(receiver.url)))
        await receiver.wait_for_requests(1)
        await sender.close()
        exchange = await task
        assert (exchange.phase, exchange.fault) == (Phase.WRITTEN, Fault.SHUTDOWN)
        await receiver.wait_for_ended(1)
        unsent = await sender.send(post(receiver.url))
        assert (unsent.phase, unsent.fault) == (Phase.NOT_SENT, Fault.SHUTDOWN)


async def test_closing_the_sender_ends_idle_connections(sender: HttpSender) -> None:
    async with Receiver() as receiver:
        await sender.send(post(receiver.url))
        await sender.close()
        await receiver.wait_for_ended(1)


# The pool


async def test_two_destinations_at_one_url_never_share_a_connection(sender: HttpSender) -> None:
    async with Receiver() as receiver:
        for key in ("one", "two", "one", "two"):
            await sender.send(post(receiver.url, pool_key=key))
        assert [request.connection for request in receiver.requests] == [0, 1, 0, 1]


async def test_20_hanging_receivers_time_out_together_and_a_healthy_one_is_served_at_once(sender: HttpSender) -> None:
    async with Receiver(hang()) as hanging, Receiver() as healthy:
        stuck = [
            asyncio.ensure_future(sender.send(post(hanging.url, timeout_seconds=PATIENCE, pool_key=str(number))))
            for number in range(20)
        ]
        await hanging.wait_for_requests(20)
        meanwhile = await sender.send(post(healthy.url))
        exchanges = await asyncio.gather(*stuck)
        afterwards = await sender.send(post(healthy.url))
        assert {(exchange.phase, exchange.fault) for exchange in exchanges} == {(Phase.WRITTEN, Fault.TIMEOUT)}
        assert max(exchange.latency_ms for exchange in exchanges) <= PATIENCE * 1_000 + 1_000
        latencies = sorted(exchange.latency_ms for exchange in exchanges)
        print(f"20 hanging receivers, deadline {PATIENCE} s: they ended after {latencies[0]} to {latencies[-1]} ms,")
        print(f"a healthy one took {meanwhile.latency_ms} ms meanwhile and {afterwards.latency_ms} ms afterwards")
        assert (meanwhile.status_code, afterwards.status_code) == (200, 200)
        assert max(meanwhile.latency_ms, afterwards.latency_ms) < PATIENCE * 1_000
        await hanging.wait_for_ended(20)


async def test_a_destination_keeps_few_idle_connections_however_many_it_used(sender: HttpSender) -> None:
    used = KEPT_ALIVE_PER_DESTINATION_MAX + 8
    go = asyncio.Event()
    async with Receiver(wait_for(go) + ok()) as receiver:
        sending = [asyncio.ensure_future(sender.send(post(receiver.url))) for _ in range(used)]
        await receiver.wait_for_requests(used)
        go.set()
        assert {exchange.status_code for exchange in await asyncio.gather(*sending)} == {200}
        await receiver.wait_for_ended(8)
        assert len(sender._transport._pool) == KEPT_ALIVE_PER_DESTINATION_MAX


async def test_all_destinations_together_keep_a_bounded_number_of_idle_connections(
    sender: HttpSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "KEPT_ALIVE_MAX", 3)
    async with Receiver() as receiver:
        for number in range(5):
            await sender.send(post(receiver.url, pool_key=str(number)))
        await receiver.wait_for_ended(2)
        await sender.send(post(receiver.url, pool_key="4"))
        assert (receiver.connections, len(sender._transport._pool)) == (5, 3)


async def test_an_idle_connection_is_ended_after_its_time(sender: HttpSender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "KEPT_ALIVE_SECONDS", 0.02)
    async with Receiver() as receiver:
        await sender.send(post(receiver.url))
        await receiver.wait_for_ended(1)


async def test_a_connection_is_not_kept_for_ever(sender: HttpSender, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "CONNECTION_SECONDS_MAX", 0.0)
    async with Receiver() as receiver:
        await sender.send(post(receiver.url))
        await receiver.wait_for_ended(1)


async def test_a_deaf_receiver_leaves_nothing_behind(sender: HttpSender) -> None:
    async with Receiver(at_connect=deaf(), receive_buffer_bytes=4_096) as receiver:
        await sender.send(post(receiver.url, bytes(8_000_000), timeout_seconds=0.05))
        assert (len(sender._transport._pool), sender._transport._busy) == (0, set())


# Memory


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["bomb", "endless", "10 GB Content-Length", "many headers, then silence"])
def test_1000_bombs_at_once_cost_less_than_10_mb(record_property: Any, kind: str) -> None:
    figures = asyncio.run(_memory_beside(kind))
    for name, figure in figures.items():
        record_property(name, figure)
    print(f"1,000 at once, {kind}: {figures}")
    assert figures["statuses"] == [200]
    assert figures["grown_bytes"] < 10 * 1024 * 1024, figures


async def _memory_beside(kind: str) -> dict[str, Any]:
    headers = send(HEAD + b"ab:c\r\n" * 9_000 + b"Content-Length: 9\r\n\r\n") + hang()
    async with Receiver() as calm, Receiver({**BOTTOMLESS, "many headers, then silence": headers}[kind]) as bombs:
        probe = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.wire.memory_probe", calm.url, bombs.url, "1000", "15"),
            stdout=asyncio.subprocess.PIPE,
        )
        output, _ = await probe.communicate()
        figures: dict[str, Any] = json.loads(output)
        assert len(bombs.requests) == 1_000
    return figures
