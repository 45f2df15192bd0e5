"""A world for stories: a real ledger, a queue in memory, a scripted sender, a clock that is told the time.

The database's clock cannot be told the time, so a story that needs hours to pass moves the rows
towards it instead (`let_pass`).
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import hashlib
import itertools
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import pytest
from structlog.testing import capture_logs

from service.accept import Answer, Intake
from service.bootstrap import IdSource
from service.deliver import Bounds, Deliverer
from service.destinations import Destinations
from service.dispatch import Dispatcher, Rhythm
from service.domain.outcome import Exchange, Fault, Phase
from service.hints import Hints
from service.keyring import Keyring
from service.ledger import views
from service.ledger.accepting import NewDelivery
from service.ledger.destinations import StoredDestination
from service.ledger.session import Ledger, Row, Statement, open_ledger
from service.ports import OutboundRequest
from service.queue.inprocess import InProcessQueue
from service.tallies import Tallies
from service.telemetry.logging import log

TENANT = "default"
SIGNALS_WITHIN_SECONDS = 10.0


def answered(status_code: int, retry_after: str | None = None) -> Exchange:
    """A complete answer."""
    return Exchange(Phase.RESPONDED, 3, status_code=status_code, retry_after=retry_after, excerpt=b"said")


def lost(fault: Fault = Fault.RESET) -> Exchange:
    """A request that went out, and nothing came back."""
    return Exchange(Phase.WRITTEN, 3, fault=fault, error="connection reset")


def unsent(fault: Fault = Fault.REFUSED) -> Exchange:
    """A request that never went out."""
    return Exchange(Phase.NOT_SENT, 3, fault=fault, error="connection refused")


class FrozenClock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.instant = dt.datetime(2026, 11, 30, 12, 0, tzinfo=dt.UTC)
        self.seconds = 1000.0

    def now(self) -> dt.datetime:
        return self.instant

    def monotonic(self) -> float:
        return self.seconds


class ScriptedSender:
    """Answers each request as the script says, the last line again and again; keeps what it was given."""

    def __init__(self) -> None:
        self.script: list[Exchange] = [answered(200)]
        self.requests: list[OutboundRequest] = []
        self.hanging = asyncio.Event()
        self.released = asyncio.Event()
        self.released.set()
        self.on_send: Callable[[OutboundRequest], Awaitable[None]] | None = None
        self._arrived = asyncio.Condition()

    async def send(self, request: OutboundRequest) -> Exchange:
        async with self._arrived:
            self.requests.append(request)
            self._arrived.notify_all()
        if self.on_send is not None:
            await self.on_send(request)
        if not request.may_write():  # asked last before the first byte, as by the real one
            return unsent(Fault.INTERNAL)
        if not self.released.is_set():
            self.hanging.set()
            await self.released.wait()
        return self.script.pop(0) if len(self.script) > 1 else self.script[0]

    async def wait_for_requests(self, count: int) -> None:
        """Wait until so many requests came."""
        async with self._arrived, asyncio.timeout(SIGNALS_WITHIN_SECONDS):
            await self._arrived.wait_for(lambda: len(self.requests) >= count)

    async def close(self) -> None:
        """Nothing to close."""


class World:
    """One tenant's world."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.queue = InProcessQueue()
        self.clock = FrozenClock()
        self.sender = ScriptedSender()
        self.keyring = Keyring({"k1": b"k" * 32}, lambda count: bytes(range(count)))
        self.new_id = IdSource()
        self.hints = Hints(self.queue)
        self.tallies = Tallies(ledger)
        self.intake = Intake(ledger, self.hints, self.tallies, window_seconds=86_400, visibility_seconds=2.0)
        self.destinations = Destinations(ledger, self.keyring, self.new_id)
        self.dispatcher = self.make_dispatcher()
        self.clock.seconds += 3_600.0  # it has run for a while
        self.deliverer = self.make_deliverer("worker-1")
        self._numbers = itertools.count(1)

    def make_deliverer(self, worker: str, *, slots_count: int = 50, patience_seconds: float = 0.05) -> Deliverer:
        """A worker's part in it."""
        bounds = Bounds(slots_count=slots_count, lease_margin_seconds=15.0, patience_seconds=patience_seconds)
        return Deliverer(
            self.ledger,
            self.sender,
            self.keyring,
            self.clock,
            bounds,
            self.tallies,
            worker=worker,
            jitter=lambda: 0.5,
        )

    def make_dispatcher(self) -> Dispatcher:
        """A dispatcher's part in it."""
        return Dispatcher(self.ledger, self.queue, self.clock, Rhythm(2.0, 10.0), self.tallies, jitter=lambda: 0.5)

    async def destination(self, **values: Any) -> StoredDestination:
        """A new destination."""
        columns = {"name": "receiver", "url": "https://receiver.example/hook", **values}
        return (await self.destinations.create(TENANT, "key_test", columns, None)).destination

    def request(self, destination_id: uuid.UUID, **values: Any) -> NewDelivery:
        """A request with a key of its own."""
        number = next(self._numbers)
        body: bytes = values.pop("body", b'{"n":1.0}')
        key: str = values.pop("key", f"key-{number}")
        given: dict[str, Any] = {
            "id": self.new_id(),
            "tenant": TENANT,
            "key": key,
            "fingerprint": hashlib.sha256(body + str(sorted(values.items())).encode()).digest(),
            "destination_id": destination_id,
            "event_id": key,
            "event_type": None,
            "content_type": "application/json",
            "headers": None,
            "metadata": None,
            "body": body,
            "body_sha256": hashlib.sha256(body).digest(),
        }
        return NewDelivery(**{**given, **values})

    async def accept(self, destination_id: uuid.UUID, **values: Any) -> Answer:
        """Accept one request."""
        return await self.intake.accept(self.request(destination_id, **values))

    async def accepted(self, destination_id: uuid.UUID, **values: Any) -> uuid.UUID:
        """Accept one request that is new, and return its id."""
        request = self.request(destination_id, **values)
        await self.intake.accept(request)
        return request.id

    async def work(self) -> None:
        """What a worker does with every hint that waits."""
        await self.hints.drain()
        await self.deliverer.deliver(self.queue.take_all())

    async def dispatch(self) -> None:
        """One pass."""
        await self.dispatcher.run_pass()

    async def let_pass(self, seconds: float) -> None:
        """Bring every time in the ledger nearer, as if the seconds had passed."""
        shift = f"- make_interval(secs => {seconds})"
        await self.execute(
            f"UPDATE deliveries SET next_attempt_at = next_attempt_at {shift}, wake_at = wake_at {shift},"
            f" lease_until = lease_until {shift}, claimed_at = claimed_at {shift}, deadline_at = deadline_at {shift}"
        )
        await self.execute(f"UPDATE workers SET heartbeat_at = heartbeat_at {shift}")

    async def view(self, delivery_id: uuid.UUID) -> Row:
        """A delivery as it stands."""
        found = await views.find_delivery(self.ledger, TENANT, delivery_id)
        assert found is not None
        return found[0]

    async def attempts(self, delivery_id: uuid.UUID) -> Sequence[Row]:
        """Its attempts."""
        found = await views.find_delivery(self.ledger, TENANT, delivery_id)
        assert found is not None
        return found[1]

    async def execute(self, sql: str, values: Mapping[str, Any] | None = None) -> None:
        """A statement of the test's own."""
        async with self.ledger.transaction() as connection:
            await connection.execute(Statement(sql), dict(values or {}))

    async def fetch(self, sql: str, values: Mapping[str, Any] | None = None) -> list[Row]:
        """A question of the test's own."""
        async with self.ledger.transaction() as connection:
            return await connection.rows(Statement(sql), dict(values or {}))


@contextlib.contextmanager
def captured_logs() -> Iterator[list[MutableMapping[str, Any]]]:
    """What is logged meanwhile, whatever configuration the logger was used under before in this process."""
    vars(log).pop("bind", None)  # the logger keeps what it was first used with
    with capture_logs() as lines:
        yield lines


@pytest.fixture
async def ledger(database_url: str) -> AsyncIterator[Ledger]:
    """A migrated ledger of this test's own."""
    opened = open_ledger(
        database_url,
        connections_max=8,
        acquire_timeout_seconds=5.0,
        statement_timeout_seconds=10.0,
        name="hookledger-tests",
    )
    yield opened
    await opened.close()


@pytest.fixture
async def world(ledger: Ledger) -> AsyncIterator[World]:
    """A world with a ledger of its own."""
    made = World(ledger)
    yield made
    made.sender.released.set()
    await made.hints.drain()
