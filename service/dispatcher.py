"""The dispatcher process: pass after pass, a short pause between, for as long as it lives."""

from __future__ import annotations

import asyncio
import contextlib

import uvloop

from service import bootstrap
from service.errors import QueueUnavailable
from service.settings import Settings
from service.tallies import Tallies
from service.telemetry import events
from service.telemetry.logging import configure, log


def run(settings: Settings) -> None:
    """Dispatch until SIGTERM or SIGINT. Raises StartError."""
    configure("dispatcher", log_format=settings.log_format, log_level=settings.log_level)
    uvloop.run(_dispatch(settings))


async def _dispatch(settings: Settings) -> None:
    ledger = bootstrap.ledger_of(settings, "dispatcher")
    await bootstrap.require_ready_ledger(ledger)
    queue = bootstrap.queue_of(settings)
    tallies = Tallies(ledger)
    dispatcher = bootstrap.dispatcher_of(settings, ledger, queue, tallies)
    stopping = asyncio.Event()
    bootstrap.stop_on_signals(stopping.set)
    with contextlib.suppress(QueueUnavailable):
        policy = await queue.eviction_policy()
        if policy not in (None, "noeviction"):
            log.warning(events.QUEUE_EVICTS, maxmemory_policy=policy)
    tallies.start()
    bootstrap.settle_memory()
    log.info(events.STARTED)
    while not stopping.is_set():
        more = await dispatcher.run_pass()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0 if more else settings.dispatch_interval_seconds):
                await stopping.wait()
    await tallies.stop()
    await queue.close()
    await ledger.close()
    log.info(events.STOPPED)
