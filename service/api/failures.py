"""How a request that failed is answered: the one error form."""

from __future__ import annotations

from fastapi import Request, Response

from service.api.problems import MEDIA_TYPE, Problem, ProblemError, Told, as_response_body
from service.telemetry import events
from service.telemetry.logging import log


def refusal(path: str, error: ProblemError) -> Told:
    """The answer to a request to `path` that is refused."""
    headers = [(name.encode(), value.encode()) for name, value in error.headers.items()]
    body = as_response_body(error.body(path))
    return Told(error.problem.status, [(b"content-type", MEDIA_TYPE.encode()), *headers], body)


def of_unavailable(path: str, error: Exception) -> ProblemError:
    """The ledger did not answer: repeating the request is safe."""
    log.warning(events.REQUEST_FAILED, path=path, error=str(error))
    return ProblemError(Problem.UNAVAILABLE, "the ledger does not answer; repeat")


def of_bug(path: str, error: Exception) -> ProblemError:
    """A fault of ours: the log says which."""
    log.error(events.REQUEST_FAILED, path=path, exc_info=error)
    return ProblemError(Problem.INTERNAL, "the service failed; its log says why")


async def on_problem(request: Request, error: Exception) -> Response:
    """A problem, as its handler told it."""
    assert isinstance(error, ProblemError)
    return as_response(refusal(request.url.path, error))


async def on_unavailable(request: Request, error: Exception) -> Response:
    """The ledger did not answer."""
    return await on_problem(request, of_unavailable(request.url.path, error))


async def on_bug(request: Request, error: Exception) -> Response:
    """A fault of ours."""
    return await on_problem(request, of_bug(request.url.path, error))


def as_response(told: Told) -> Response:
    """An answer in the framework's form."""
    response = Response(told.body, told.status)
    response.raw_headers += told.headers
    return response
