"""`hookledger listen` as its user meets it: what it prints, what it refuses to start with, how it stops."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator

import pytest
from rich.console import Console

from service.errors import StartError
from service.listen import Listener
from service.listen.view import View
from tests.listening import SECRET, connected, listening, post, signed

pytestmark = pytest.mark.timeout(20)


class Screen:
    """A view on a console that is not a terminal, or is one, and what it wrote."""

    def __init__(self, *, terminal: bool = False) -> None:
        self._file = io.StringIO()
        console = Console(
            file=self._file,
            force_terminal=terminal,
            color_system="standard" if terminal else "auto",
            highlight=False,
            soft_wrap=True,
        )
        self.unread = False
        self.view = View(console, on_unread=lambda: setattr(self, "unread", True))

    @property
    def text(self) -> str:
        return self._file.getvalue()


# What cannot start


@pytest.mark.parametrize(
    "answer",
    [
        *("", "ok", "hang=1", "99", "199", "600", "200,", "200:", "200:x", "200:content-length=1", "200:x=\x1b"),
        *("429:retry after=5", "slow", "slow=", "slow=-1", "slow=nan", "slow=3601", ",".join(["200"] * 101)),
    ],
)
def test_a_malformed_answer_is_one_sentence_that_lists_the_forms(answer: str) -> None:
    with pytest.raises(StartError, match=r"^--answer takes .*429:retry-after=5.*hang.*503,503,200.*\.$"):
        Listener(0, answer=answer)


def test_a_malformed_secret_is_one_sentence_that_does_not_repeat_it() -> None:
    with pytest.raises(StartError, match=r"^--secret takes `whsec_`.* or the `whpk_") as caught:
        Listener(0, secret="whsec_almost")
    assert "almost" not in str(caught.value)


async def test_a_port_in_use_is_one_sentence() -> None:
    async with listening() as listener:
        port = int(listener.url.rsplit(":", 1)[1])
        with pytest.raises(StartError, match=f"^Another process already listens on 127.0.0.1:{port}: .*[.]$"):
            await Listener(port).start()


@pytest.mark.parametrize("port", [-1, 65536])
async def test_a_port_that_is_none_is_one_sentence(port: int) -> None:
    with pytest.raises(StartError, match=f"^Port {port} is not a port: .*[.]$"):
        await Listener(port).start()


async def test_an_address_that_is_not_ours_is_one_sentence() -> None:
    with pytest.raises(StartError, match=r"^Cannot listen on 192\.0\.2\.1:0: .*\.$"):
        await Listener(0, host="192.0.2.1").start()


async def test_a_lack_of_permission_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    # Root may bind any port, so the refusal itself is made here.
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(StartError, match=r"^There is no permission to listen on 127\.0\.0\.1:80: .*\.$"):
        await Listener(80).start()


async def test_an_address_of_six_is_written_in_brackets() -> None:
    assert Listener(8080, host="::1").url == "http://[::1]:8080"


async def test_stopping_what_never_started_does_nothing() -> None:
    await Listener(0).stop()


# What is printed


async def shown(*requests: bytes, secret: str | None = None, answer: str = "200") -> str:
    screen = Screen()
    shows = screen.view.received
    async with listening(answer, secret=secret, on_received=shows) as listener, connected(listener) as sender:
        for request in requests:
            await sender.send(request)
    return screen.text


async def test_a_request_is_shown_with_all_that_matters() -> None:
    body = b'{"a":{"b":1}}'
    request = signed(body).replace(
        b"\r\n\r\n",
        b"\r\ncontent-type: application/json\r\nhookledger-attempt: 3\r\nhookledger-event-id: evt_9"
        b"\r\nhookledger-event-type: order.paid\r\n\r\n",
    )
    text = await shown(request, request, secret=SECRET, answer="503,200")
    first, second = text.split("POST /hook")[1:]
    assert first.startswith("  -> 503\n")
    assert "id          dlv_1\n" in first
    assert "attempt     3\n" in first
    assert "event       evt_9  order.paid\n" in first
    assert "signature   valid\n" in first
    assert f"13 bytes  application/json  sha256 {hashlib.sha256(body).hexdigest()}\n" in first
    assert '\n  {\n    "a": {\n      "b": 1\n    }\n  }\n' in first
    assert second.startswith("  -> 200\n")
    assert "dlv_1  (again, seen 2x)\n" in second


async def test_what_is_wrong_is_shown_as_wrong() -> None:
    text = await shown(signed(b"1"), signed(b"2", key=bytes(32)), secret=SECRET)
    assert "signature   INVALID: no signature matches the secret and the bytes\n" in text
    assert "(again, seen 2x)  WITH OTHER BYTES THAN BEFORE\n" in text


async def test_what_is_missing_is_shown_as_missing() -> None:
    text = await shown(post(b""))
    assert "id          -\n  attempt     -\n  event       -  -\n  signature   not checked (no --secret)\n" in text
    assert "0 bytes  -  sha256 e3b0c442" in text
    assert text.endswith("  (empty)\n")


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param(b"\x1b[2J\x07\x00\rx", r"\x1b[2J\x07\x00\rx", id="control characters"),
        pytest.param("\u202e\u2066\u200b\x9b".encode(), r"\u202e\u2066\u200b\x9b", id="direction and C1"),
        pytest.param(b'"\\u001b[2J \\u202e \\ud800"', r'"\u001b[2J \u202e \ud800"', id="escapes in JSON"),
        pytest.param(b"\xff\xfe\x80", r"\xff\xfe\x80", id="no text"),
        pytest.param(b"[bold]a[/bold] :smile:", "[bold]a[/bold] :smile:", id="markup"),
        pytest.param("é 中".encode(), "é 中", id="letters"),
        pytest.param(b"[" * 60_000, "[[[[", id="deep JSON"),
        pytest.param(b"1" * 5_000, "1111", id="a number Python does not read"),
    ],
)
async def test_a_body_cannot_reach_the_terminal_unescaped(body: bytes, expected: str) -> None:
    text = await shown(post(body))
    assert f"\n  {expected}" in text
    assert all(char.isprintable() or char == "\n" for char in text)


async def test_json_is_shown_with_each_number_and_escape_as_it_was_sent() -> None:
    text = await shown(post(b'{"amount":12.50,"many":1E2,"of":[{},"\\u00e9"]}'))
    assert '"amount": 12.50,' in text
    assert '"many": 1E2,' in text
    assert '"\\u00e9"' in text


async def test_a_header_or_path_cannot_reach_the_terminal_unescaped() -> None:
    raw = b"POST /\x9b\x85 HTTP/1.1\r\nwebhook-id: a\tb\x9b" + b"c" * 400 + b"\r\n\r\n"
    text = await shown(raw)
    assert r"POST /\x9b\x85  ->" in text
    assert r"id          a\tb\x9bccc" in text
    assert "ccc...\n" in text
    assert "c" * 300 not in text


@pytest.mark.parametrize("body", [b"x" * 3_000, b"[" + b"1," * 2_000 + b"1]", b"x" * 100_000])
async def test_a_long_body_is_cut_and_its_length_told(body: bytes) -> None:
    text = await shown(post(body))
    assert text.endswith(f"\n  ... cut here: {len(body):,} bytes in all\n")
    assert len(text) < 6_000


async def test_a_terminal_gets_colours_and_a_file_none() -> None:
    plain, coloured = Screen(), Screen(terminal=True)
    for screen in (plain, coloured):
        screen.view.note("something \x1b[31m")
    assert plain.text.strip() == r"something \x1b[31m"
    assert "\x1b[33m" in coloured.text
    assert r"something \x1b[31m" in coloured.text


def test_the_heading_says_where_what_and_how_to_get_a_secret() -> None:
    screen = Screen()
    screen.view.heading("http://127.0.0.1:9000", Listener(0, answer="503,200").script, checks=False)
    assert "Listening on http://127.0.0.1:9000" in screen.text
    assert "Answers: 503, then 200 from then on" in screen.text
    assert "POST /destinations," in screen.text
    assert "POST /destinations/{id}/rotate-secret" in screen.text


def test_the_heading_says_that_signatures_are_checked() -> None:
    screen = Screen()
    screen.view.heading("http://127.0.0.1:9000", Listener(0, answer="hang").script, checks=True)
    assert "Answers: hang.\nSignatures are checked.\n" in screen.text


# The command


@contextlib.asynccontextmanager
async def running(answer: str = "200") -> AsyncIterator[tuple[asyncio.subprocess.Process, io.BufferedReader, int]]:
    """`run` in a process of its own, its output, and the port it says it listens on."""
    program = f"import sys; from service.listen import run; sys.exit(run(0, None, {answer!r}))"
    output_fd, process_fd = os.pipe()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=process_fd, stderr=asyncio.subprocess.PIPE
    )
    os.close(process_fd)
    with os.fdopen(output_fd, "rb") as output:
        try:
            heading = [await asyncio.to_thread(output.readline) for _ in range(4)]
            yield process, output, int(heading[0].split(b"127.0.0.1:")[1].split(b",")[0])
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_stops_the_command_cleanly_even_while_a_request_hangs(number: signal.Signals) -> None:
    async with running("hang") as (process, output, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(b"hello"))
        while await asyncio.to_thread(output.readline) != b"  hello\n":
            pass
        process.send_signal(number)
        _, errors = await process.communicate()
        assert process.returncode == 0
        assert errors == b""
        assert output.read() == b"\nStopped after 1 request.\n"
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        writer.close()


async def test_the_command_ends_quietly_when_nobody_reads_its_output() -> None:
    async with running() as (process, output, port):
        output.close()  # as `| head -1` does
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post(b"hello"))
        _, errors = await process.communicate()
        assert process.returncode == 0
        assert errors == b""
        writer.close()
