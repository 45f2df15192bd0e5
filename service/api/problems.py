"""Problems (RFC 9457): every refusal the API gives, in one table. Never a stack trace, never a secret.

A handler raises `ProblemError`; the application turns it, and whatever FastAPI refuses itself, into
`application/problem+json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import msgspec

MEDIA_TYPE = "application/problem+json"


class Problem(Enum):
    """Slug, status and title. The `type` of a problem is `/problems/<slug>` and never changes."""

    MALFORMED_REQUEST = ("malformed-request", 400, "A header or parameter is missing or malformed")
    MALFORMED_CURSOR = ("malformed-cursor", 400, "The cursor is not one of this list")
    UNAUTHENTICATED = ("unauthenticated", 401, "A valid API key is needed")
    FORBIDDEN = ("forbidden", 403, "The key may not do this")
    NOT_FOUND = ("not-found", 404, "There is no such thing here")
    METHOD_NOT_ALLOWED = ("method-not-allowed", 405, "The path does not take this method")
    EVENT_CONFLICT = ("event-conflict", 409, "The event exists with a different payload")
    DESTINATION_DISABLED = ("destination-disabled", 409, "The destination is disabled")
    STATE_CONFLICT = ("state-conflict", 409, "The state does not allow this")
    TOO_LARGE = ("too-large", 413, "The request is too large")
    UNSUPPORTED_MEDIA_TYPE = ("unsupported-media-type", 415, "The body must be application/json")
    VALIDATION = ("validation", 422, "The content is not valid")
    IDEMPOTENCY_MISMATCH = ("idempotency-mismatch", 422, "The Idempotency-Key stands for a different request")
    INTERNAL = ("internal", 500, "The service failed")
    UNAVAILABLE = ("unavailable", 503, "The service cannot answer now")

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self.value[1]


class Told(msgspec.Struct, frozen=True):
    """An answer as it goes out; its length is added then."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class FieldError(msgspec.Struct, frozen=True):
    """Where in the body, as a JSON Pointer (RFC 6901), and what is wrong there."""

    pointer: str
    detail: str


class ProblemBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of every error."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    errors: list[FieldError] = []
    existing_id: str | None = None


class ProblemError(Exception):
    """Raised by handlers; answered by the application."""

    def __init__(
        self,
        problem: Problem,
        detail: str,
        *,
        errors: tuple[FieldError, ...] = (),
        existing_id: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.problem = problem
        self.detail = detail
        self.errors = errors
        self.existing_id = existing_id
        self.headers = dict(headers or {})
        if problem.status in (429, 503):
            self.headers.setdefault("retry-after", "1")

    def body(self, instance: str) -> ProblemBody:
        """The problem, as told about a request to the path `instance`."""
        slug, status, title = self.problem.value
        return ProblemBody(
            type=f"/problems/{slug}",
            title=title,
            status=status,
            detail=self.detail,
            instance=instance,
            errors=list(self.errors),
            existing_id=self.existing_id,
        )


def invalid(*errors: FieldError) -> ProblemError:
    """A body whose content is refused, with pointers."""
    detail = errors[0].detail if len(errors) == 1 else f"{len(errors)} fields are not valid"
    return ProblemError(Problem.VALIDATION, detail, errors=errors)


def not_found(what: str) -> ProblemError:
    """An id that this tenant does not have, whoever else may."""
    return ProblemError(Problem.NOT_FOUND, f"there is no such {what}")


def json_pointer(msgspec_path: str) -> str:
    """A msgspec path (`$.retry.schedule_seconds[2]`) as a JSON Pointer (`/retry/schedule_seconds/2`)."""
    return msgspec_path.removeprefix("$").replace("[", "/").replace("]", "").replace(".", "/")


def as_response_body(body: ProblemBody) -> bytes:
    """The bytes of a problem."""
    encoded: Any = msgspec.json.encode(body)
    return bytes(encoded)
