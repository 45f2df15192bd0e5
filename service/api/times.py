"""Instants as clients write them: with a zone, within what a calendar and the ledger can hold."""

from __future__ import annotations

import datetime as dt


def in_utc(at: dt.datetime | None) -> dt.datetime | None:
    """An instant in UTC, so that one instant has one spelling. Raises ValueError."""
    if at is None:
        return None
    if at.tzinfo is None:
        raise ValueError("must carry a zone, such as Z")
    try:
        return at.astimezone(dt.UTC)
    except OverflowError:
        raise ValueError("lies outside the years 1 to 9999") from None
