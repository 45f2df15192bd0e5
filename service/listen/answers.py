"""How the demo receiver answers: `--answer` as a value. Text that is not of a known form is None."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

SCRIPT_ANSWERS_MAX: Final = 100
SLOW_SECONDS_MAX: Final = 3_600.0

FORMS: Final = (
    "a status from 200 to 599 (`200`), one with headers (`429:retry-after=5`), `hang`, `reset`, `close`, `garbage`, "
    "`slow=SECONDS`, or several of them with commas (`503,503,200`: in turn for each webhook-id, the last repeats)"
)


class Misbehaviour(StrEnum):
    """An answer that is none."""

    HANG = "hang"  # reads the request, never answers
    RESET = "reset"  # RST after the request
    CLOSE = "close"  # FIN after the request
    GARBAGE = "garbage"  # bytes that are not HTTP


@dataclass(frozen=True, slots=True)
class Respond:
    """An HTTP response, `after_seconds` from the end of the request."""

    status: int
    headers: tuple[tuple[str, str], ...] = ()
    after_seconds: float = 0.0

    def __str__(self) -> str:
        """The form that `parse_script` reads."""
        if self.after_seconds:
            return f"slow={self.after_seconds:g}"
        return ":".join([str(self.status), *(f"{name}={value}" for name, value in self.headers)])


Answer = Respond | Misbehaviour
Script = tuple[Answer, ...]

_SLOW: Final = re.compile(r"slow=([0-9]{1,4}(?:\.[0-9]{1,3})?)")
_STATUS: Final = re.compile(r"([2-5][0-9]{2})(?::(.*))?")
# A header's value may hold colons, as a Location does: an option begins where a name follows one.
_OPTIONS: Final = re.compile(r":(?=[A-Za-z][A-Za-z0-9-]*=)")
_OPTION: Final = re.compile(r"([A-Za-z][A-Za-z0-9-]*)=([\x20-\x7e]*)")
_FRAMING: Final = frozenset({"content-length", "transfer-encoding"})  # ours: another value would be garbage


def parse_script(text: str) -> Script | None:
    """The answers of an `--answer` text, at least one, or None."""
    parts = text.split(",")
    if len(parts) > SCRIPT_ANSWERS_MAX:
        return None
    answers = [_parse_answer(part.strip()) for part in parts]
    known = tuple(answer for answer in answers if answer is not None)
    return known if len(known) == len(answers) else None


def nth(script: Script, number: int) -> Answer:
    """The answer to the request of this number, from 1 on, of one webhook-id."""
    return script[min(number, len(script)) - 1]


def _parse_answer(text: str) -> Answer | None:
    if text in list(Misbehaviour):
        return Misbehaviour(text)
    if slow := _SLOW.fullmatch(text):
        seconds = float(slow[1])
        return Respond(200, after_seconds=seconds) if seconds <= SLOW_SECONDS_MAX else None
    status = _STATUS.fullmatch(text)
    if status is None:
        return None
    headers = _parse_options(_OPTIONS.split(status[2])) if status[2] is not None else ()
    return None if headers is None else Respond(int(status[1]), headers)


def _parse_options(options: Sequence[str]) -> tuple[tuple[str, str], ...] | None:
    matches = [match for option in options if (match := _OPTION.fullmatch(option))]
    headers = tuple((match[1].lower(), match[2]) for match in matches)
    if len(headers) < len(options) or any(name in _FRAMING for name, _ in headers):
        return None
    return headers
