"""The demo receiver over real sockets: what it records and how it answers."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Callable

import pytest

from service import ed25519
from service.domain import signing
from service.domain.signing import Verdict
from service.listen import Listener, receiver, wire
from service.listen.answers import Misbehaviour, Respond
from tests.listening import KEY, SECRET, connected, listening, post, signed

pytestmark = pytest.mark.timeout(20)


# What arrives


async def test_a_request_is_recorded_byte_for_byte() -> None:
    body = bytes(range(256))
    async with listening() as listener, connected(listener) as sender:
        assert await sender.status(post(body, "X-Thing:  two words ", target="/a?b=c")) == 200
        [received] = listener.received
    assert received.request.method == "POST"
    assert received.request.target == "/a?b=c"
    assert received.request.header("x-thing") == "two words"
    assert received.request.body == body
    assert received.sha256 == hashlib.sha256(body).hexdigest()


async def test_a_chunked_body_is_put_together() -> None:
    chunked = (
        b"POST / HTTP/1.1\r\ntransfer-encoding: Chunked\r\n\r\n3\r\nabc\r\nA;x=y\r\n0123456789\r\n0\r\nt: 1\r\n\r\n"
    )
    async with listening() as listener, connected(listener) as sender:
        assert await sender.status(chunked) == 200
        assert await sender.status(post(b"next")) == 200
        assert [received.request.body for received in listener.received] == [b"abc0123456789", b"next"]


async def test_requests_follow_each_other_on_one_connection() -> None:
    async with listening() as listener, connected(listener) as sender:
        sender.writer.write(post(b"1") + post(b"2", "connection: close"))
        first, second = await sender.response(), await sender.response()
        assert b"connection: close" not in first
        assert b"connection: close" in second
        assert await sender.rest() == b""
        assert listener.received_count == 2


async def test_a_sender_of_http_1_0_is_answered_and_closed() -> None:
    async with listening() as listener, connected(listener) as sender:
        assert await sender.status(b"GET / HTTP/1.0\r\n\r\n") == 200
        assert await sender.rest() == b""


async def test_a_sender_that_expects_to_be_told_to_go_on_is_told() -> None:
    async with listening() as listener, connected(listener) as sender:
        request = post(b"late", "expect: 100-continue")
        assert await sender.status(request.removesuffix(b"late")) == 100
        assert await sender.status(b"late") == 200
        assert listener.received[0].request.body == b"late"


async def test_arrivals_wakes_when_the_request_is_there() -> None:
    async with listening() as listener, connected(listener) as sender:
        waiting = asyncio.create_task(listener.arrivals(2))
        await sender.send(post())
        assert not waiting.done()
        await sender.send(post())
        await waiting


async def test_what_is_kept_is_bounded_in_number_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver, "RECEIVED_MAX", 3)
    monkeypatch.setattr(receiver, "RECEIVED_BYTES_MAX", 10)
    async with listening() as listener, connected(listener) as sender:
        for body in (b"1", b"2", b"3", b"4"):
            await sender.send(post(body))
        assert [received.request.body for received in listener.received] == [b"2", b"3", b"4"]
        await sender.send(post(b"123456789"))
        assert [received.request.body for received in listener.received] == [b"4", b"123456789"]
        await sender.send(post(b"more than ten bytes"))
        assert [received.request.body for received in listener.received] == [b"more than ten bytes"]
        assert listener.received_count == 6


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        pytest.param(b"what is this\r\n\r\n", 400, id="no request line"),
        pytest.param(b"GET / HTTP/2.0\r\n\r\n", 400, id="another version"),
        pytest.param(b"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400, id="malformed header"),
        pytest.param(b"GET / HTTP/1.1\r\na: b\r\n folded\r\n\r\n", 400, id="folded header"),
        pytest.param(b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n", 400, id="negative length"),
        pytest.param(b"POST / HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", 400, id="two lengths"),
        pytest.param(
            b"POST / HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", 400, id="two framings"
        ),
        pytest.param(b"POST / HTTP/1.1\r\ntransfer-encoding: gzip\r\n\r\n", 400, id="unknown framing"),
        pytest.param(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n+1\r\n", 400, id="malformed chunk size"),
        pytest.param(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\nabc", 400, id="overlong chunk"),
        pytest.param(
            b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n" + b"t: 1\r\n" * 100,
            400,
            id="endless trailers",
        ),
        pytest.param(
            b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n" + b"1" * 70_000, 400, id="endless chunk size"
        ),
        pytest.param(b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1000001\r\n", 413, id="chunk too large"),
        pytest.param(b"POST / HTTP/1.1\r\ncontent-length: 16777217\r\n\r\n", 413, id="body too large"),
        pytest.param(b"GET / HTTP/1.1\r\na: " + b"a" * 70_000, 431, id="head too large"),
        pytest.param(b"\x16\x03\x01\x02\x00", 400, id="TLS"),
    ],
)
async def test_a_request_that_is_not_one_is_refused_noted_and_not_recorded(raw: bytes, status: int) -> None:
    notes: list[str] = []
    async with listening(on_note=notes.append) as listener:
        async with connected(listener) as sender:
            assert await sender.status(raw) == status
            sender.writer.write_eof()
            assert await sender.rest() == b""
        async with connected(listener) as sender:
            assert await sender.status(post(b"sentinel")) == 200
        assert [received.request.body for received in listener.received] == [b"sentinel"]
    [note] = notes
    assert note.startswith(f"refused with {status}: ")


async def test_a_body_of_16_mib_is_received() -> None:
    async with listening() as listener, connected(listener) as sender:
        assert await sender.status(post(bytes(wire.BODY_BYTES_MAX))) == 200
        assert len(listener.received[0].request.body) == 16 * 1024 * 1024


async def test_a_refused_sender_that_goes_on_sending_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver, "DRAIN_SECONDS", 0.0)
    async with listening() as listener, connected(listener) as sender:
        assert await sender.status(b"no request\r\n\r\n") == 400
        assert await sender.rest() == b""


async def test_a_sender_that_breaks_off_is_noted_and_the_next_is_served() -> None:
    noted = asyncio.Queue[str]()
    async with listening(on_note=noted.put_nowait) as listener:
        async with connected(listener) as sender:
            sender.writer.write(post(b"all of it")[:-3])
        assert "ended within a request" in await noted.get()
        async with connected(listener) as sender:
            assert await sender.status(post()) == 200
        assert listener.received_count == 1


async def test_connections_beyond_the_limit_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver, "CONNECTIONS_MAX", 1)
    async with listening() as listener, connected(listener) as first:
        assert await first.status(post()) == 200
        async with connected(listener) as second:
            with contextlib.suppress(ConnectionError):
                assert await second.rest() == b""
        assert await first.status(post()) == 200


# Signatures and repetition


@pytest.mark.parametrize(
    ("request_bytes", "verdict"),
    [
        (lambda: signed(b"{}"), Verdict.VALID),
        (lambda: signed(b"{}", key=bytes(32)), Verdict.MISMATCH),
        (lambda: signed(b"{}").replace(b"\r\n\r\n{}", b"\r\n\r\n[]"), Verdict.MISMATCH),
        (lambda: signed(b"{}", age_seconds=400), Verdict.TOO_OLD),
        (lambda: signed(b"{}", age_seconds=-400), Verdict.TOO_NEW),
        (lambda: post(b"{}"), Verdict.ID_UNUSABLE),
        (lambda: post(b"{}", "webhook-id: a", "webhook-timestamp: \xff"), Verdict.TIMESTAMP_UNUSABLE),
        (lambda: post(b"{}", "webhook-id: a", "webhook-timestamp: 1"), Verdict.SIGNATURE_MISSING),
        (
            lambda: post(b"{}", "webhook-id: a", "webhook-timestamp: 1", "webhook-signature: v1, v1,\xff"),
            Verdict.MISMATCH,
        ),
    ],
)
async def test_a_signature_gets_its_verdict(request_bytes: Callable[[], bytes], verdict: Verdict) -> None:
    async with listening(secret=SECRET) as listener, connected(listener) as sender:
        assert listener.checks_signatures
        assert await sender.status(request_bytes()) == 200
        assert listener.received[0].verdict is verdict


@pytest.mark.parametrize(
    ("seed", "body", "verdict"),
    [
        (b"s" * 32, b"{}", Verdict.VALID),
        (b"t" * 32, b"{}", Verdict.MISMATCH),
        (b"s" * 32, b"[]", Verdict.MISMATCH),
        (None, b"{}", Verdict.SIGNATURE_MISSING),
    ],
)
async def test_a_public_key_checks_v1a_signatures(seed: bytes | None, body: bytes, verdict: Verdict) -> None:
    now = int(time.time())
    key = KEY if seed is None else ed25519.signer(seed)
    lines = (
        "webhook-id: dlv_1",
        f"webhook-timestamp: {now}",
        f"webhook-signature: {signing.sign('dlv_1', now, b'{}', [key])}",
    )
    public_key = signing.format_public_key(ed25519.public_key(b"s" * 32))
    async with listening(secret=public_key) as listener, connected(listener) as sender:
        assert await sender.status(post(body, *lines)) == 200
        assert listener.received[0].verdict is verdict


async def test_without_a_secret_there_is_no_verdict() -> None:
    async with listening() as listener, connected(listener) as sender:
        assert not listener.checks_signatures
        await sender.send(signed(b"{}"))
        assert listener.received[0].verdict is None


async def test_a_webhook_id_seen_before_is_counted_and_changed_bytes_are_told() -> None:
    async with listening() as listener, connected(listener) as sender:
        for webhook_id, body in (("a", b"1"), ("b", b"1"), ("a", b"1"), ("a", b"2")):
            await sender.send(post(body, f"webhook-id: {webhook_id}"))
        await sender.send(post(b"1"))
        seen = [(received.seen_count, received.changed) for received in listener.received]
    assert seen == [(1, False), (1, False), (2, False), (3, True), (0, False)]


async def test_the_ids_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver, "IDS_REMEMBERED_MAX", 2)
    async with listening() as listener, connected(listener) as sender:
        for webhook_id in ("a", "b", "a", "c", "b", "c"):
            await sender.send(post(b"", f"webhook-id: {webhook_id}"))
        assert [received.seen_count for received in listener.received] == [1, 1, 2, 1, 1, 2]


# Answers


async def test_a_status_is_answered_with_its_headers() -> None:
    answer = "429:retry-after=5:location=http://127.0.0.1:1/x?y=z"
    async with listening(answer) as listener, connected(listener) as sender:
        response = await sender.send(post())
    assert response.startswith(b"HTTP/1.1 429 Too Many Requests\r\n")
    assert b"\r\nretry-after: 5\r\n" in response
    assert b"\r\nlocation: http://127.0.0.1:1/x?y=z\r\n" in response
    assert response.endswith(b"\r\n\r\n429 Too Many Requests\n")


async def test_a_status_without_a_body_or_a_name_is_answered_so() -> None:
    async with listening("204,304,599,200:content-type=text/html") as listener, connected(listener) as sender:
        assert await sender.send(post()) == b"HTTP/1.1 204 No Content\r\n\r\n"
        assert await sender.send(post()) == b"HTTP/1.1 304 Not Modified\r\n\r\n"
        assert (await sender.send(post())).startswith(b"HTTP/1.1 599 \r\n")
        assert (await sender.send(post())).count(b"content-type") == 1


async def test_head_is_answered_without_the_body() -> None:
    async with listening() as listener, connected(listener) as sender:
        sender.writer.write(b"HEAD / HTTP/1.1\r\nconnection: close\r\n\r\n")
        assert (await sender.rest()).endswith(b"connection: close\r\n\r\n")


async def test_an_answer_may_close_its_connection() -> None:
    async with listening("503:connection=close") as listener, connected(listener) as sender:
        response = await sender.send(post())
        assert response.count(b"connection: close") == 1
        assert await sender.rest() == b""


async def test_a_script_runs_once_for_each_webhook_id_and_its_last_answer_repeats() -> None:
    async with listening("503, 429,200") as listener, connected(listener) as sender:
        statuses = [await sender.status(post(b"", f"webhook-id: {one}")) for one in "aabaab"]
        anonymous = [await sender.status(post()) for _ in range(2)]
    assert statuses == [503, 429, 503, 200, 200, 429]
    assert anonymous == [503, 429]


async def test_hang_reads_and_never_answers_until_the_sender_gives_up() -> None:
    noted = asyncio.Queue[str]()
    async with listening("hang", on_note=noted.put_nowait) as listener:
        async with connected(listener) as sender:
            sender.writer.write(post())
            await listener.arrivals(1)
            sender.writer.write_eof()
            assert await sender.rest() == b""
        assert "gave up after" in await noted.get()


async def test_stop_ends_a_hanging_request() -> None:
    async with listening("hang") as listener, connected(listener) as sender:
        sender.writer.write(post())
        await listener.arrivals(1)
        await listener.stop()
        with contextlib.suppress(ConnectionError):
            assert await sender.rest() == b""


async def test_reset_ends_the_connection_with_a_reset() -> None:
    async with listening("reset") as listener, connected(listener) as sender:
        sender.writer.write(post())
        with pytest.raises(ConnectionResetError):
            await sender.rest()
        assert listener.received_count == 1


async def test_close_ends_the_connection_without_an_answer() -> None:
    async with listening("close") as listener, connected(listener) as sender:
        sender.writer.write(post())
        assert await sender.rest() == b""
        assert listener.received_count == 1


async def test_garbage_is_not_http() -> None:
    async with listening("garbage") as listener, connected(listener) as sender:
        sender.writer.write(post())
        answer = await sender.rest()
    assert answer
    assert not answer.startswith(b"HTTP/")


async def test_slow_answers_200_after_its_seconds() -> None:
    async with listening("slow=0.05") as listener, connected(listener) as sender:
        started = time.monotonic()
        assert await sender.status(post()) == 200
        assert time.monotonic() - started >= 0.05


async def test_every_form_of_answer_is_read_and_written_the_same() -> None:
    forms = "200,429:retry-after=5:x=,hang,reset,close,garbage,slow=2.5"
    script = Listener(0, answer=forms).script
    assert script[2:6] == tuple(Misbehaviour)
    assert script[6] == Respond(200, after_seconds=2.5)
    assert ",".join(map(str, script)) == forms
