"""How a request that failed is answered: the one error form."""

from __future__ import annotations

from fastapi import Request, Response

from service.api.problems import MEDIA_TYPE, Problem, ProblemError, as_response_body
from service.telemetry import events
from service.telemetry.logging import log


async def on_problem(request: Request, error: Exception) -> Response:
    """A problem, as its handler told it."""
    assert isinstance(error, ProblemError)
    body = as_response_body(error.body(request.url.path))
    return Response(body, error.problem.status, error.headers, MEDIA_TYPE)


async def on_unavailable(request: Request, error: Exception) -> Response:
    """The ledger did not answer: repeating the request is safe."""
    log.warning(events.REQUEST_FAILED, path=request.url.path, error=str(error))
    return await on_problem(request, ProblemError(Problem.UNAVAILABLE, "the ledger does not answer; repeat"))
