"""The intake's own lane: POST /deliveries goes to its handler at once, past routing and what belongs to it.

Every other route passes the framework's layers, which cost more than the intake itself does. The route
stands in the router as well, for openapi.json and for `Allow`.
"""

from __future__ import annotations

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.deliveries import create_delivery
from service.api.failures import on_problem, on_unavailable
from service.api.problems import ProblemError
from service.errors import LedgerUnavailable

PATH = "/deliveries"


class IntakeLane:
    """The layer below authentication."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Accept a delivery, or pass the request on."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] != PATH:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        try:
            response = await create_delivery(request)
        except ProblemError as error:
            response = await on_problem(request, error)
        except LedgerUnavailable as error:
            response = await on_unavailable(request, error)
        except ClientDisconnect:
            return  # before its body was whole: there is nobody to answer, and nothing was done
        await response(scope, receive, send)
