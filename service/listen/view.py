"""What `hookledger listen` prints. Nothing that came over the wire reaches the terminal unescaped."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Final

from rich.console import Console
from rich.text import Text

from service.domain.signing import Verdict
from service.listen import answers
from service.listen.answers import Respond
from service.listen.receiver import Received
from service.listen.wire import Request

BODY_SHOWN_CHARS_MAX: Final = 2_048
BODY_PARSED_BYTES_MAX: Final = 64 * 1024  # larger JSON is shown as it came: little of it is seen anyway
LINE_SHOWN_CHARS_MAX: Final = 300  # of a path or a header

_LABEL_CHARS: Final = 10


class View:
    """Writes to one console: in colour on a terminal, plain elsewhere.

    `on_unread` is called when nobody reads what is written (`hookledger listen | head`).
    """

    def __init__(self, console: Console, on_unread: Callable[[], None]) -> None:
        """Keep the console."""
        self._console = console
        self._on_unread = on_unread

    def heading(self, url: str, script: answers.Script, *, checks: bool) -> None:
        """Say where it listens, what it answers and whether signatures are checked."""
        self._print(Text.assemble(("Listening on ", "bold"), (url, "bold cyan"), ", Ctrl-C to stop."))
        self._print(Text(f"Answers: {_describe(script)}."))
        if checks:
            self._print(Text("Signatures are checked."))
            return
        self._print(
            Text(
                "Signatures are not checked: no --secret. The server makes the secret and shows it once, in the\n"
                "answer to POST /destinations, or to POST /destinations/{id}/rotate-secret for another one.\n"
                "Then: --secret whsec_...",
                style="yellow",
            )
        )

    def received(self, received: Received) -> None:
        """Show one request."""
        request = received.request
        clock = received.at.astimezone().strftime("%H:%M:%S.%f")[:-3]
        text = Text("\n")
        text.append(f"{clock}  ", "dim")
        text.append(f"{request.method} {_line(request.target)}", "bold")
        text.append(f"  -> {received.answer}\n", _answer_style(received.answer))
        _row(text, "id", _id(received), "bold red" if received.changed else "yellow" if received.seen_count > 1 else "")
        _row(text, "attempt", _header(request, "hookledger-attempt"))
        _row(text, "event", f"{_header(request, 'hookledger-event-id')}  {_header(request, 'hookledger-event-type')}")
        _row(text, "signature", *_signature(received.verdict))
        kind = _header(request, "content-type")
        _row(text, "body", f"{len(request.body):,} bytes  {kind}  sha256 {received.sha256}")
        text.append(_body(request.body))
        self._print(text)

    def note(self, what: str) -> None:
        """Say in a line what happened beside the requests."""
        self._print(Text(f"{'':{_LABEL_CHARS + 4}}{inert(what)}", style="yellow"))

    def farewell(self, received_count: int) -> None:
        """Say how it went."""
        self._print(Text(f"\nStopped after {received_count:,} request{'' if received_count == 1 else 's'}."))

    def _print(self, text: Text) -> None:
        try:
            self._console.print(text)
        except SystemExit:  # what rich makes of a broken pipe, from here on writing nothing
            self._on_unread()


def inert(text: str) -> str:
    """The text with every character that is not plainly printable as its escape, but for line ends and tabs.

    Controls move the cursor or retitle the window, and marks of direction reorder what is read:
    none of them counts as printable.
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in "\n\t" else _escape(char) for char in text)


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')


def pretty(body: bytes) -> str:
    """The body to read, a little more of it than is shown: JSON indented, what is not text as escapes."""
    if len(body) <= BODY_PARSED_BYTES_MAX:
        try:
            text = body.decode()
            json.loads(text)
            return _indented(text)
        except (ValueError, RecursionError):
            pass  # not JSON, or deeper than Python reads: shown as it came
    return body[: BODY_SHOWN_CHARS_MAX * 4 + 4].decode(errors="backslashreplace")  # a character has up to 4 bytes


def _indented(document: str) -> str:
    """JSON over several lines, each token as it was sent: to a signature, 12.50 is not 12.5."""
    text, depth, opened = "", 0, False
    for piece in _TOKEN.findall(document):
        if piece in "}]":
            depth -= 1
            text += piece if opened else f"\n{'  ' * depth}{piece}"
        else:
            text += f"\n{'  ' * depth}" if opened else ""
            text += {",": f",\n{'  ' * depth}", ":": ": "}.get(piece, piece)
        opened = piece in "{["
        depth += opened
        if len(text) > BODY_SHOWN_CHARS_MAX:  # of great depth, a small document is a thousand times its size
            break
    return text


def _describe(script: answers.Script) -> str:
    if len(script) == 1:
        return str(script[0])
    return f"{', then '.join(map(str, script))} from then on, counted for each webhook-id"


def _answer_style(answer: answers.Answer) -> str:
    return "green" if isinstance(answer, Respond) and answer.status < 300 else "red"


def _row(text: Text, label: str, value: str, style: str = "") -> None:
    text.append(f"  {label:<{_LABEL_CHARS}}  ", "dim")
    text.append(f"{value}\n", style)


def _id(received: Received) -> str:
    again = f"  (again, seen {received.seen_count}x)" if received.seen_count > 1 else ""
    changed = "  WITH OTHER BYTES THAN BEFORE" if received.changed else ""
    return f"{_header(received.request, 'webhook-id')}{again}{changed}"


def _signature(verdict: Verdict | None) -> tuple[str, str]:
    match verdict:
        case None:
            return "not checked (no --secret)", "dim"
        case Verdict.VALID:
            return "valid", "green"
        case _:
            return f"INVALID: {verdict}", "bold red"


def _header(request: Request, name: str) -> str:
    value = request.header(name)
    return "-" if value is None else _line(value)


def _line(text: str) -> str:
    shown = text if len(text) <= LINE_SHOWN_CHARS_MAX else f"{text[:LINE_SHOWN_CHARS_MAX]}..."
    return inert(shown).replace("\t", "\\t")


def _body(body: bytes) -> str:
    if not body:
        return "  (empty)"
    text = pretty(body)
    shown = inert(text[:BODY_SHOWN_CHARS_MAX]).replace("\n", "\n  ")
    cut = "" if len(text) <= BODY_SHOWN_CHARS_MAX else f"\n  ... cut here: {len(body):,} bytes in all"
    return f"  {shown.rstrip()}{cut}"


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode()
