"""What a query string may hold: each parameter once, by its name, in the form the contract gives.

A filter that is misspelt is refused: ignoring it would answer for everything.
"""

from __future__ import annotations

import datetime as dt
import re
import uuid
from typing import Annotated, Final

from fastapi import Query, Request
from pydantic import BeforeValidator

from service.api.problems import Problem, ProblemError
from service.api.times import in_utc
from service.domain import limits
from service.domain.ids import Prefix, parse_typeid

_DIGITS = re.compile(r"[0-9]{1,9}", re.ASCII)
_RFC_3339 = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d{1,9})?([Zz]|[+-]\d\d:\d\d)", re.ASCII)


def _digits(text: object) -> object:
    if isinstance(text, str) and not _DIGITS.fullmatch(text):
        raise ValueError("must be a whole number")
    return text


def _instant(text: object) -> object:
    if not isinstance(text, str):
        return text
    if not _RFC_3339.fullmatch(text):
        raise ValueError("must be a time as in RFC 3339, with a zone, such as 2027-01-31T08:00:00Z")
    return in_utc(dt.datetime.fromisoformat(text.upper()))


Limit = Annotated[int, BeforeValidator(_digits), Query(ge=1, le=limits.PAGE_ITEMS_MAX)]
Cursor = Annotated[str | None, Query(description="`next_cursor` of the page before.")]
Instant = Annotated[dt.datetime | None, BeforeValidator(_instant), Query(description="RFC 3339, with a zone.")]
DestinationId = Annotated[str | None, Query(description="A destination's id.")]

METADATA: Final = "metadata."


def destination_of(text: str | None) -> uuid.UUID | None:
    """The destination that a list is narrowed to. Raises a 400 for what cannot be an id."""
    if text is None:
        return None
    destination_id = parse_typeid(Prefix.DESTINATION, text)
    if destination_id is None:
        raise ProblemError(Problem.MALFORMED_REQUEST, "destination_id is not the id of a destination")
    return destination_id


async def each_known_once(request: Request) -> None:
    """Refuse a parameter that the route does not know, and one that comes twice. Raises a 400."""
    _check(request, takes_metadata=False)


async def each_known_once_or_metadata(request: Request) -> None:
    """The same, for a list that `metadata.KEY` narrows as well. Raises a 400."""
    _check(request, takes_metadata=True)


def _check(request: Request, *, takes_metadata: bool) -> None:
    known = {field.alias for field in request.scope["route"].dependant.query_params}
    names = [name for name, _ in request.query_params.multi_items()]
    for name in names:
        if name not in known and not (takes_metadata and name.startswith(METADATA)):
            raise ProblemError(Problem.MALFORMED_REQUEST, f"there is no parameter {_shown(name)}")
    if len(set(names)) < len(names):
        raise ProblemError(Problem.MALFORMED_REQUEST, "a parameter comes more than once")


def _shown(name: str) -> str:
    return ascii(name[:64])
