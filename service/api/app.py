"""The application: routes, the one error form, openapi.json, and the process that serves them."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from service import bootstrap
from service.api import actions, batches, deliveries, destinations, dlq, dlq_schemas, operations, schemas, stats
from service.api.auth import PUBLIC_PATHS, Authentication, KeyCheck
from service.api.failures import on_bug, on_problem, on_unavailable
from service.api.lane import PATH as INTAKE_PATH
from service.api.lane import IntakeLane
from service.api.problems import MEDIA_TYPE, FieldError, Problem, ProblemBody, ProblemError
from service.api.state import AppState
from service.clock import SystemClock
from service.destinations import Destinations
from service.domain import limits
from service.errors import LedgerUnavailable, StartError
from service.hints import Hints
from service.settings import Settings
from service.tallies import Tallies
from service.telemetry import events
from service.telemetry.logging import configure, log
from service.version import VERSION

_MODULES = (deliveries, batches, actions, destinations, dlq, operations, stats)

_DESCRIPTION = """Durable webhook delivery. A 202 is a commit to the ledger; attempts follow, at least once,
under one identity, until the receiver has it or an operator sees it in the dead-letter queue."""


class _Hookledger(FastAPI):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == INTAKE_PATH and scope["method"] == "POST":
            await self.state.lane(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            self.openapi_schema = _openapi(self)
        return self.openapi_schema


def create_app(settings: Settings | None) -> FastAPI:
    """The application. Without settings it can only describe itself."""
    app = _Hookledger(
        title="Hookledger",
        version=VERSION,
        description=_DESCRIPTION,
        lifespan=_lifespan(settings) if settings is not None else None,
        redoc_url=None,
        redirect_slashes=False,
        # Asked about on every request, for a tenth of its time; our own telemetry says what is needed.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    for module in _MODULES:
        app.include_router(module.router)
    app.add_middleware(Authentication)
    app.add_exception_handler(ProblemError, on_problem)
    app.add_exception_handler(RequestValidationError, _on_parameters)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(LedgerUnavailable, on_unavailable)
    app.add_exception_handler(Exception, on_bug)
    return app


def _lifespan(settings: Settings) -> Any:
    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        ledger = bootstrap.ledger_of(settings, "api")
        queue = bootstrap.queue_of(settings)
        hints, tallies = Hints(queue), Tallies(ledger)
        new_id = bootstrap.IdSource()
        app.state.ledger = ledger
        app.state.key_check = KeyCheck(ledger)
        app.state.parts = AppState(
            settings=settings,
            ledger=ledger,
            queue=queue,
            intake=bootstrap.intake_of(settings, ledger, hints, tallies),
            destinations=Destinations(ledger, bootstrap.keyring_of(settings), new_id),
            new_id=new_id,
            clock=SystemClock(),
            allow=bootstrap.allow_list_of(settings),
            envelope_bytes_max=limits.ENVELOPE_BYTES_MAX,
        )
        app.state.lane = IntakeLane(app.state.key_check, app.state.parts)
        tallies.start()
        bootstrap.settle_memory()
        log.info(events.STARTED)
        yield
        await hints.drain()
        await tallies.stop()
        await queue.close()
        await ledger.close()
        log.info(events.STOPPED)

    return lifespan


async def _on_parameters(request: Request, error: Exception) -> Response:
    """FastAPI validates parameters alone: bodies are decoded by msgspec."""
    assert isinstance(error, RequestValidationError)
    fields = tuple(FieldError("/".join(map(str, found["loc"])), found["msg"]) for found in error.errors())
    detail = "; ".join(f"{field.pointer}: {field.detail}" for field in fields)
    return await on_problem(request, ProblemError(Problem.MALFORMED_REQUEST, detail))


_BY_STATUS = {404: Problem.NOT_FOUND, 405: Problem.METHOD_NOT_ALLOWED}


async def _on_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    problem = _BY_STATUS.get(error.status_code, Problem.MALFORMED_REQUEST)
    headers = {"allow": _methods_of(request)} if problem is Problem.METHOD_NOT_ALLOWED else error.headers
    return await on_problem(request, ProblemError(problem, str(error.detail), headers=headers))


def _methods_of(request: Request) -> str:
    """What `Allow` says: the methods of every route with this path, where the router names those of the first."""
    methods: set[str] = set()
    for route in (route for module in _MODULES for route in module.router.routes):
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            methods |= route.methods or set()
    return ", ".join(sorted(methods))


def _openapi(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document of routes and parameters, with msgspec's schemas of the bodies."""
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    kinds = [
        kind
        for module in (schemas, dlq_schemas)
        for kind in vars(module).values()
        if isinstance(kind, type)
        and issubclass(kind, msgspec.Struct)
        and kind.__module__ == module.__name__
        and kind not in (schemas.In, schemas.Out)
    ]
    _, described = msgspec.json.schema_components([*kinds, ProblemBody], ref_template="#/components/schemas/{name}")
    components = document.setdefault("components", {})
    # FastAPI's own: the enumerations of parameters, and an error form that is never answered.
    parameters = {name: own for name, own in components.get("schemas", {}).items() if "ValidationError" not in name}
    components["schemas"] = {**parameters, **described}
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer", "description": "`hlk_…`"}}
    for path, operations_of_path in document["paths"].items():
        for operation in operations_of_path.values():
            _finish(operation, public=path in PUBLIC_PATHS)
    return document


def _finish(operation: dict[str, Any], *, public: bool) -> None:
    """The answers that any route may give, and the key it needs."""
    answers = operation["responses"]
    answers.pop("422", None)  # FastAPI's own error form, which is never answered
    problem = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemBody"}}}
    answers["default"] = {"description": "A problem (RFC 9457)", "content": problem}
    if not public:
        operation["security"] = [{"key": []}]


def openapi_document() -> dict[str, Any]:
    """What is committed as openapi.json."""
    return create_app(None).openapi()


class _Server(uvicorn.Server):
    """Told to stop, it is not ready at once, answers on for the drain, then closes and ends what is in flight."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, drain_seconds: float) -> None:
        super().__init__(config)
        self._app = app
        self._drain_seconds = drain_seconds
        self._close_at: float | None = None

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Answer the signal."""
        parts: AppState | None = getattr(self._app.state, "parts", None)
        if parts is not None:
            parts.stopping = True
        # Not uvicorn's own: it raises the signal again after a clean end, and the exit code would be the signal's.
        self.force_exit = self.should_exit and sig == signal.SIGINT
        if self._close_at is not None or self._drain_seconds == 0:
            self.should_exit = True  # asked twice, or nobody to wait for
        else:
            self._close_at = time.monotonic() + self._drain_seconds

    async def on_tick(self, counter: int) -> bool:
        """Uvicorn's loop, ten times a second: whether to close now."""
        if self._close_at is not None and time.monotonic() >= self._close_at:
            self.should_exit = True
        return await super().on_tick(counter)


def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT. Raises StartError."""
    configure("api", log_format=settings.log_format, log_level=settings.log_level)
    asyncio.run(_require_ready(settings))
    listening = _listen(settings)
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http="httptools",
        ws="none",
        lifespan="on",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,  # nothing here depends on the client's address
        date_header=True,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=15,
        h11_max_incomplete_event_size=64 * 1024,
    )
    server = _Server(config, app, settings.api_drain_seconds)
    server.run(sockets=[listening])
    if not server.started:
        raise StartError("The API could not start.")


async def _require_ready(settings: Settings) -> None:
    """Say before the server starts what would keep it from answering."""
    ledger = bootstrap.ledger_of(settings, "api")
    try:
        await bootstrap.require_ready_ledger(ledger)
    finally:
        await ledger.close()


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.api_host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if settings.api_reuse_port:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listening.bind((settings.api_host, settings.api_port))
    except PermissionError as error:
        raise StartError(f"Port {settings.api_port} may not be used by this user: choose one above 1023.") from error
    except OSError as error:
        raise StartError(f"{settings.api_host}:{settings.api_port} cannot be used: {error.strerror}.") from error
    listening.listen(2048)
    return listening
