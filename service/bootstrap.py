"""The composition root: the only place that picks concrete classes and gives them their settings."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable

from service.accept import Intake
from service.clock import SystemClock
from service.deliver import Bounds, Deliverer
from service.dispatch import Dispatcher, Rhythm
from service.domain.address import AllowList, parse_proxy
from service.domain.ids import RANDOM_BITS, uuid7
from service.egress.guard import SystemResolver
from service.egress.sender import HttpSender
from service.egress.tunnel import Tunnels
from service.errors import LedgerUnavailable, QueueUnavailable, StartError
from service.hints import Hints
from service.keyring import Keyring
from service.ledger.migrate import check_migrated
from service.ledger.session import Ledger, open_ledger
from service.queue.arq_queue import ArqQueue
from service.settings import Settings, parse_keyring
from service.tallies import Tallies

_GC_THRESHOLDS = (50_000, 20, 20)  # objects, younger and middle generations


def settle_memory() -> None:
    """Take what a role is made of out of the garbage collector's sight, once the role is up.

    Half a million objects of the libraries live as long as the process: to walk them took a tenth of a second,
    in which no request was answered, and a tenth of all time. What is made afterwards is collected as ever.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


def allow_list_of(settings: Settings) -> AllowList:
    """Where destinations may lie beyond the public space, and never this service's own API."""
    return AllowList.parse(settings.egress_allow).without_ourselves(settings.api_host, settings.api_port)


class IdSource:
    """New UUIDv7 ids: rising within a millisecond, so that rows made together lie together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last_ms = 0
        self._last_random = 0

    def __call__(self) -> uuid.UUID:
        """The next id of this process."""
        with self._lock:
            unix_ms = time.time_ns() // 1_000_000
            if unix_ms > self._last_ms:
                self._last_ms = unix_ms
                # The top bit stays free, so that counting up within the millisecond cannot overflow.
                self._last_random = int.from_bytes(os.urandom(10), "big") >> (80 - RANDOM_BITS + 1)
            else:
                self._last_random += 1 + random.getrandbits(32)  # ids need to differ, not to be secret
            return uuid7(self._last_ms, self._last_random)


def ledger_of(settings: Settings, role: str, *, by_key: bool = False) -> Ledger:
    """The ledger, as a role reaches it; see `open_ledger`."""
    return open_ledger(
        settings.database_url.get_secret_value(),
        connections_max=settings.database_pool_connections_max,
        acquire_timeout_seconds=settings.database_acquire_timeout_seconds,
        statement_timeout_seconds=settings.database_statement_timeout_seconds,
        name=f"hookledger-{role}",
        by_key=by_key,
    )


def queue_of(settings: Settings) -> ArqQueue:
    """The queue of hints."""
    return ArqQueue(settings.redis_url.get_secret_value())


def keyring_of(settings: Settings) -> Keyring:
    """The keyring for signing secrets."""
    return Keyring(parse_keyring(settings.secret_keys.get_secret_value()), os.urandom)


def intake_of(settings: Settings, ledger: Ledger, hints: Hints, tallies: Tallies) -> Intake:
    """The accept story."""
    return Intake(
        ledger,
        hints,
        tallies,
        window_seconds=settings.idempotency_window_seconds,
        visibility_seconds=settings.hint_visibility_seconds,
    )


def deliverer_of(settings: Settings, ledger: Ledger, tallies: Tallies, worker: str) -> tuple[Deliverer, HttpSender]:
    """The deliver story, and the sender to be closed after it."""
    proxy = parse_proxy(settings.egress_proxy.get_secret_value())
    sender = HttpSender(allow_list_of(settings), proxy=proxy)
    bounds = Bounds(slots_count=settings.worker_slots, lease_margin_seconds=settings.lease_margin_seconds)
    deliverer = Deliverer(ledger, sender, keyring_of(settings), SystemClock(), bounds, tallies, worker=worker)
    return deliverer, sender


def dispatcher_of(settings: Settings, ledger: Ledger, queue: ArqQueue, tallies: Tallies) -> Dispatcher:
    """The dispatch story."""
    rhythm = Rhythm(settings.hint_visibility_seconds, settings.heartbeat_stale_seconds)
    return Dispatcher(ledger, queue, SystemClock(), rhythm, tallies)


def worker_name() -> str:
    """A name no other worker has or had: a restarted process is another worker."""
    return f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"


async def require_ready_ledger(ledger: Ledger, wait_seconds: float = 10.0) -> None:
    """Wait for the ledger to answer; raise StartError when it does not, or is behind on migrations."""
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            problem = await check_migrated(ledger)
            break
        except LedgerUnavailable as error:
            if time.monotonic() > deadline:
                raise StartError(
                    "The database in DATABASE_URL does not answer: check its address, name and password."
                ) from error
            await asyncio.sleep(0.2)
    if problem is not None:
        raise StartError(problem)


def stop_on_signals(stop: Callable[[], None]) -> None:
    """Call `stop` at SIGTERM or SIGINT, from the running loop."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)


async def _doctor(settings: Settings) -> list[tuple[str, bool, str]]:
    ledger, queue = ledger_of(settings, "doctor"), queue_of(settings)
    findings: list[tuple[str, bool, str]] = []
    try:
        try:
            problem = await check_migrated(ledger)
            findings.append(("ledger", problem is None, problem or "reachable and migrated"))
        except LedgerUnavailable:
            findings.append(("ledger", False, "does not answer: check DATABASE_URL"))
        try:
            policy = await queue.eviction_policy()
            well = policy in (None, "noeviction")
            findings.append(
                ("queue", well, "reachable" if well else f"maxmemory-policy is {policy}: set it to noeviction")
            )
        except QueueUnavailable:
            findings.append(("queue", False, "does not answer: check REDIS_URL"))
        proxy = parse_proxy(settings.egress_proxy.get_secret_value())
        if proxy is not None:
            problem = await Tunnels(proxy, SystemResolver()).problem()
            sentence = "accepts connections" if problem is None else f"{problem}: check EGRESS_PROXY"
            findings.append(("proxy", problem is None, sentence))
    finally:
        await queue.close()
        await ledger.close()
    return findings


def doctor(settings: Settings) -> list[tuple[str, bool, str]]:
    """Look at what the service stands on: (part, well, sentence)."""
    return asyncio.run(_doctor(settings))
