"""Which headers a request may carry. Pure.

The rule this module keeps: a custom header can neither end a line, frame the message, speak for
the connection, nor pose as this service. It is refused when it is configured (`check_headers`), and
looked at once more before it is written (`wire_problem`), because a row can be edited.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from service.domain.limits import (
    HEADER_NAME_CHARS_MAX,
    HEADER_VALUE_CHARS_MAX,
    HEADERS_BYTES_MAX,
    HEADERS_COUNT_MAX,
)

_NAME_CHAR = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]"  # RFC 9110, 5.6.2
_NAME = re.compile(rf"{_NAME_CHAR}+")
_VALUE = re.compile(r"(?:[!-~](?:[ -~]*[!-~])?)?")  # printable ASCII, no blank at either end
# A whole list in one step, because every request passes here: name, line feed, value, line feed.
_WELL_FORMED = re.compile(
    rf"(?:{_NAME_CHAR}{{1,{HEADER_NAME_CHARS_MAX}}}\n(?:[!-~](?:[ -~]{{0,{HEADER_VALUE_CHARS_MAX - 2}}}[!-~])?)?\n)*"
)

# The sender's own, and what speaks for one connection rather than for the message.
_OF_THE_CONNECTION: Final = frozenset(
    {
        "accept-encoding",
        "connection",
        "content-length",
        "expect",
        "host",
        "http2-settings",
        "keep-alive",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_PREFIXES_OF_THE_CONNECTION: Final = ("proxy-",)

# What says who sends, what is sent and that it is genuine.
_OF_THE_SERVICE: Final = frozenset({"content-type", "cookie", "idempotency-key", "user-agent"})
_PREFIXES_OF_THE_SERVICE: Final = ("hookledger-", "webhook-")

# With one of these, a request that reached a cloud's metadata service would be answered.
_OF_METADATA_SERVICES: Final = frozenset({"metadata", "metadata-flavor", "x-google-metadata-request"})
_PREFIXES_OF_METADATA_SERVICES: Final = ("x-aws-ec2-metadata-", "x-metadata-token")


@dataclass(frozen=True, slots=True)
class HeaderProblem:
    """Why a header is refused. `detail` never shows the value: it may be a credential."""

    name: str
    detail: str


def check_headers(headers: Mapping[str, str]) -> list[HeaderProblem]:
    """Every problem of the custom headers of a destination or a delivery; none when they may be kept."""
    problems: list[HeaderProblem] = []
    if len(headers) > HEADERS_COUNT_MAX:
        problems.append(HeaderProblem("", f"There are more than {HEADERS_COUNT_MAX} headers."))
    if sum(len(name) + len(value) + len(": \r\n") for name, value in headers.items()) > HEADERS_BYTES_MAX:
        problems.append(HeaderProblem("", f"The headers are longer than {HEADERS_BYTES_MAX} bytes together."))
    seen: set[str] = set()
    for name, value in headers.items():
        detail = _form_problem(name, value) or _refusal(name.lower().replace("_", "-"))
        if detail is None and name.lower() in seen:
            detail = "The header stands twice: names differ in more than upper and lower case."
        seen.add(name.lower())
        if detail is not None:
            problems.append(HeaderProblem(name, detail))
    return problems


def wire_problem(headers: Sequence[tuple[str, str]]) -> str | None:
    """Say why a complete header list may not be written, the service's own headers included."""
    if _is_well_formed(headers):
        names = {name.lower() for name, _ in headers}
        if len(names) == len(headers) and not any(map(_is_of_the_connection, names)):
            return None
    return next(_wire_problems(headers))


def _wire_problems(headers: Sequence[tuple[str, str]]) -> Iterator[str]:
    seen: set[str] = set()
    for name, value in headers:
        lower = name.lower()
        detail = _form_problem(name, value)
        if detail is None and _is_of_the_connection(lower):
            detail = "The header belongs to the connection."
        if detail is None and lower in seen:
            detail = "The header stands twice."
        if detail is not None:
            yield f"header {name[:HEADER_NAME_CHARS_MAX]!a}: {detail}"
        seen.add(lower)


def _is_well_formed(headers: Sequence[tuple[str, str]]) -> bool:
    """Whether no header has a `_form_problem`, in one step. A line feed in one would show in the count."""
    block = "".join([f"{name}\n{value}\n" for name, value in headers])
    return block.count("\n") == 2 * len(headers) and _WELL_FORMED.fullmatch(block) is not None


def _is_of_the_connection(lower: str) -> bool:
    return lower in _OF_THE_CONNECTION or lower.startswith(_PREFIXES_OF_THE_CONNECTION)


def _form_problem(name: str, value: str) -> str | None:
    if len(name) > HEADER_NAME_CHARS_MAX:
        return f"The name is longer than {HEADER_NAME_CHARS_MAX} characters."
    if _NAME.fullmatch(name) is None:
        return "The name must be letters, digits and hyphens, without blanks."
    if len(value) > HEADER_VALUE_CHARS_MAX:
        return f"The value is longer than {HEADER_VALUE_CHARS_MAX} characters."
    if _VALUE.fullmatch(value) is None:
        return "The value must be printable ASCII on one line, without a blank at either end."
    return None


def _refusal(lower: str) -> str | None:
    if _is_of_the_connection(lower):
        return "The header belongs to the connection and is set by the sender."
    if lower in _OF_THE_SERVICE or lower.startswith(_PREFIXES_OF_THE_SERVICE):
        return "The header is set by the service and cannot be replaced."
    if lower in _OF_METADATA_SERVICES or lower.startswith(_PREFIXES_OF_METADATA_SERVICES):
        return "The header is meant for a cloud's metadata service."
    return None
