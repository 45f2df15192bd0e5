"""The worker process: hints in, attempts out, a heartbeat beside them.

The attempts outlive everything around them: a lost Redis, a cancelled job and the first half of a
stop end the taking of hints, never a request that is under way.
"""

from __future__ import annotations

import asyncio
import contextlib

import uvloop

from service import bootstrap
from service.deliver import Deliverer
from service.domain import limits
from service.errors import LedgerRefused, LedgerUnavailable, QueueUnavailable
from service.ledger import dispatching
from service.ledger.session import Ledger
from service.queue.doorbell_worker import end, run_worker
from service.settings import Settings
from service.tallies import Tallies
from service.telemetry import events
from service.telemetry.logging import configure, log

_QUEUE_PAUSE_SECONDS = 0.5
_TICK_SECONDS = 0.5
_ACKNOWLEDGE_SECONDS = 2.0  # for the last jobs of a stopping worker


def run(settings: Settings) -> None:
    """Work until SIGTERM or SIGINT. Raises StartError."""
    configure("worker", log_format=settings.log_format, log_level=settings.log_level)
    uvloop.run(_work(settings))


async def _work(settings: Settings) -> None:
    ledger = bootstrap.ledger_of(settings, "worker", by_key=True)
    await bootstrap.require_ready_ledger(ledger)
    worker = bootstrap.worker_name()
    tallies = Tallies(ledger)
    deliverer, sender = bootstrap.deliverer_of(settings, ledger, tallies, worker)
    stopping = asyncio.Event()
    bootstrap.stop_on_signals(stopping.set)
    await _beat_once(ledger, worker)
    tallies.start()
    beating = asyncio.create_task(_beat(ledger, worker, settings.heartbeat_seconds))
    ticking = asyncio.create_task(_tick(deliverer))
    taking = asyncio.create_task(_take_hints(settings, deliverer, stopping))
    bootstrap.settle_memory()
    log.info(events.STARTED, worker=worker, slots=settings.worker_slots)
    await asyncio.wait({taking, asyncio.create_task(stopping.wait())}, return_when=asyncio.FIRST_COMPLETED)
    ended_by_itself = taking.done()
    log.info(events.STOPPING, in_flight_count=deliverer.in_flight_count)
    await deliverer.stop(settings.worker_grace_seconds)
    await asyncio.wait({taking}, timeout=_ACKNOWLEDGE_SECONDS)
    await end([taking, beating, ticking])
    with contextlib.suppress(LedgerUnavailable):
        await dispatching.leave(ledger, worker)
    await tallies.stop()
    await sender.close()
    await ledger.close()
    if ended_by_itself:
        taking.result()  # by a bug of ours: said once all is settled, and the supervisor starts anew
    log.info(events.STOPPED)


async def _take_hints(settings: Settings, deliverer: Deliverer, stopping: asyncio.Event) -> None:
    """Take hints until the process stops; a Redis that went is waited for."""
    down = False
    while not stopping.is_set():
        try:
            await run_worker(
                settings.redis_url.get_secret_value(),
                deliverer,
                stopping=stopping,
                aside_seconds=limits.TIMEOUT_SECONDS_MAX
                + settings.lease_margin_seconds
                + limits.HINT_PATIENCE_SECONDS
                + 30.0,
            )
        except QueueUnavailable as error:
            if not down:
                log.warning(events.QUEUE_DOWN, error=str(error))
            down = True
            await asyncio.sleep(_QUEUE_PAUSE_SECONDS)


async def _tick(deliverer: Deliverer) -> None:
    while True:
        deliverer.tick()
        await asyncio.sleep(_TICK_SECONDS)


async def _beat(ledger: Ledger, worker: str, every_seconds: float) -> None:
    while True:
        await asyncio.sleep(every_seconds)
        await _beat_once(ledger, worker)


async def _beat_once(ledger: Ledger, worker: str) -> None:
    try:
        await dispatching.beat(ledger, worker)
    except (LedgerUnavailable, LedgerRefused) as error:
        log.warning(events.HEARTBEAT_MISSED, error=str(error))
