"""Keyset paging: a cursor says where the last page ended, and is bound to the list and its filters.

It is opaque and unsigned: it can only name a place in a list that is bound to the tenant anyway.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from service.api.problems import Problem, ProblemError
from service.domain import limits


def encode_cursor(filters: Mapping[str, Any], place: list[str]) -> str:
    """The cursor after `place`, the sort key of a page's last row, in the list with these filters."""
    text = json.dumps([_fingerprint(filters), *place], separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode()).rstrip(b"=").decode()


def decode_cursor(cursor: str | None, filters: Mapping[str, Any], parts_count: int) -> list[str] | None:
    """The place in a cursor; None for the first page. Raises a 400 for anything that is not one of this list."""
    if cursor is None:
        return None
    try:
        if len(cursor) > limits.CURSOR_CHARS_MAX or not cursor.isascii():
            raise ValueError
        padded = cursor + "=" * (-len(cursor) % 4)
        fingerprint, *place = json.loads(base64.b64decode(padded, altchars=b"-_", validate=True))
        if fingerprint != _fingerprint(filters) or len(place) != parts_count:
            raise ValueError
        return [str(part) for part in place]
    except (ValueError, TypeError, binascii.Error, RecursionError):
        raise malformed_cursor() from None


def malformed_cursor() -> ProblemError:
    """A cursor that is not one of this list."""
    return ProblemError(Problem.MALFORMED_CURSOR, "pass next_cursor of the page before, with the same filters")


def _fingerprint(filters: Mapping[str, Any]) -> str:
    text = json.dumps({name: str(value) for name, value in filters.items() if value is not None}, sort_keys=True)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
