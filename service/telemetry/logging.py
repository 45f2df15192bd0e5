"""Logs: one JSON object per line, ids bound as fields, never a payload, secret or URL query."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import structlog

log: structlog.stdlib.BoundLogger = structlog.get_logger("hookledger")

# One list for as long as the process lives: a logger that was used keeps it.
_processors: list[Any] = []
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def _dumps(line: dict[str, Any], default: Callable[[Any], Any]) -> bytes:
    # A line for each attempt: the standard library's JSON takes twice as long for it.
    return msgspec.json.encode(line, enc_hook=default)


def configure(role: str, *, log_format: str, log_level: str) -> None:
    """Set up this process's logging, once, at its start. Everything goes to stderr."""
    level = _LEVELS[log_level]
    renderer: Any
    loggers: Any
    if log_format == "json":
        renderer = structlog.processors.JSONRenderer(serializer=_dumps)
        loggers = structlog.BytesLoggerFactory(file=sys.stderr.buffer)
    else:
        renderer = structlog.dev.ConsoleRenderer(colors=False)
        loggers = structlog.WriteLoggerFactory(file=sys.stderr)
    _processors[:] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        renderer,
    ]
    structlog.configure(
        processors=_processors,
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=loggers,
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(role=role)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s", force=True)
    # httpx's INFO line prints the URL with its credentials; arq's tells each job twice.
    for name in ("httpx", "httpcore", "uvicorn.access"):
        logging.getLogger(name).setLevel(logging.WARNING)
    # A connection that ends while Postgres is away is a traceback to the pool; `ledger.down` says it once.
    logging.getLogger("sqlalchemy.pool").setLevel(logging.CRITICAL)
    # A job that ended with a lost Redis is a traceback to arq and nothing to us: its attempts go on.
    logging.getLogger("arq").setLevel(logging.CRITICAL)
