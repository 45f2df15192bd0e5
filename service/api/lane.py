"""The intake's own lane: POST /deliveries, past the framework's layers, which cost more than the intake itself.

Every other request passes them. The route stands in the router as well, for openapi.json and for `Allow`;
it gives the same answers.
"""

from __future__ import annotations

from typing import Final

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from service.api.auth import KeyCheck, authorization_of, unauthenticated
from service.api.deliveries import take_delivery
from service.api.failures import of_bug, of_unavailable, refusal
from service.api.problems import ProblemError, Told
from service.api.state import AppState
from service.errors import LedgerUnavailable

PATH: Final = "/deliveries"


class IntakeLane:
    """Answers POST /deliveries from its first byte to its last."""

    def __init__(self, check: KeyCheck, state: AppState) -> None:
        self._check = check
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Accept a delivery."""
        try:
            told = await self._told(scope, receive)
        except ClientDisconnect:
            return  # before its request was whole: there is nobody to answer, and nothing was done
        except ProblemError as error:
            told = refusal(PATH, error)
        except LedgerUnavailable as error:
            told = refusal(PATH, of_unavailable(PATH, error))
        except Exception as error:
            told = refusal(PATH, of_bug(PATH, error))
        headers = [*told.headers, (b"content-length", b"%d" % len(told.body))]
        await send({"type": "http.response.start", "status": told.status, "headers": headers})
        await send({"type": "http.response.body", "body": told.body})

    async def _told(self, scope: Scope, receive: Receive) -> Told:
        principal = await self._check(authorization_of(scope["headers"]))
        if principal is None:
            raise unauthenticated()
        return await take_delivery(self._state, principal, scope["headers"], receive)
