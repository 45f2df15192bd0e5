"""The product's statements behind the model's operations: the real SQL on a real Postgres, at a time of our own.

The rule: not a word of the product's SQL is changed. The statements ask `now()`, and this database
answers with our clock: its search path names a schema with functions of that name before pg_catalog.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final, TypeVar

import asyncpg

from service import redrive
from service.accept import Accepted, Answer, explain
from service.ledger import accepting, attempting, destinations, dispatching, operating
from service.ledger.accepting import NewDelivery
from service.ledger.attempting import Settlement
from service.ledger.audit import Deed
from service.ledger.dead_letters import ByIds
from service.ledger.destinations import NewSecret, StoredDestination
from service.ledger.dispatching import Due
from service.ledger.operating import Result
from service.ledger.session import Ledger, Row, Statement, open_ledger
from service.redrive import Order, Started
from tests.model.rows import (
    LEASE_MARGIN_SECONDS,
    TENANT,
    VISIBILITY_SECONDS,
    Attempt,
    Claim,
    Delivery,
    Destination,
    Lost,
    Snapshot,
)

_OUR_CLOCK: Final = """
CREATE SCHEMA clock;
CREATE TABLE clock.reading (at timestamptz NOT NULL);
INSERT INTO clock.reading VALUES (pg_catalog.now());
CREATE FUNCTION clock.now() RETURNS timestamptz STABLE LANGUAGE sql AS 'SELECT at FROM clock.reading';
CREATE FUNCTION clock.clock_timestamp() RETURNS timestamptz STABLE LANGUAGE sql AS 'SELECT at FROM clock.reading';
ALTER TABLE deliveries ALTER created_at SET DEFAULT clock.now();
ALTER TABLE attempts ALTER completed_at SET DEFAULT clock.now();
ALTER TABLE workers ALTER heartbeat_at SET DEFAULT clock.now();
"""

_TABLES: Final = (
    "deliveries",
    "payloads",
    "attempts",
    "delivery_identities",
    "idempotency_keys",
    "redrive_items",
    "redrives",
    "workers",
    "destinations",
)

_DELIVERIES: Final = Statement("SELECT * FROM deliveries")
_ATTEMPTS: Final = Statement("SELECT *, late_result ->> 'outcome' AS late_outcome FROM attempts")
_DESTINATIONS: Final = Statement("SELECT id, state, gated FROM destinations")

Answered = TypeVar("Answered")
Move = Callable[[Ledger, Deed, uuid.UUID], Awaitable[StoredDestination | bool | None]]


class PostgresLedger:
    """The statements of one database of the test's own. `close` it."""

    def __init__(self, database_url: str) -> None:
        self._runner = asyncio.Runner()
        self._run(_set_our_clock(database_url))
        self._ledger = open_ledger(
            database_url,
            connections_max=2,
            acquire_timeout_seconds=5.0,
            statement_timeout_seconds=10.0,
            name="hookledger-model",
        )

    def close(self) -> None:
        """Close every connection."""
        self._run(self._ledger.close())
        self._runner.close()

    def begin(self, now: dt.datetime, made: Sequence[Destination]) -> None:
        """Empty the tables, set the clock, and make the destinations."""
        self._run(self._begin(now, made))

    def let_pass(self, seconds: float) -> None:
        self._execute("UPDATE clock.reading SET at = at + make_interval(secs => :seconds)", {"seconds": seconds})

    def set_clock(self, now: dt.datetime) -> None:
        """Let it be that instant."""
        self._execute("UPDATE clock.reading SET at = :at", {"at": now})

    # accepting

    def accept(self, new: NewDelivery) -> Answer:
        return self._run(self._accept(new))

    async def _accept(self, new: NewDelivery) -> Answer:
        written = await accepting.insert_new(
            self._ledger, [new], window_seconds=86_400.0, visibility_seconds=VISIBILITY_SECONDS
        )
        if new.id in written.deliveries:
            return Accepted(written.deliveries[new.id])
        [standing] = await accepting.look_up(self._ledger, [new])
        return explain(new, standing, key_is_new=new.id in written.keyed)

    # attempting

    def claim(self, delivery_ids: Sequence[uuid.UUID], worker: str) -> list[Claim]:
        claims = self._run(
            attempting.claim(self._ledger, delivery_ids, worker=worker, lease_margin_seconds=LEASE_MARGIN_SECONDS)
        )
        names = [column.name for column in fields(Claim)]
        found = [Claim(**{name: getattr(claim, name) for name in names}) for claim in claims]
        return sorted(found, key=lambda claim: (claim.scheduled_at, claim.delivery_id))

    def settle(self, batch: Sequence[Settlement]) -> set[uuid.UUID]:
        return self._run(attempting.settle(self._ledger, batch))

    def settle_late(self, settlement: Settlement) -> bool:
        return self._run(attempting.settle_late(self._ledger, settlement))

    # dispatching

    def take_due(self, visibility_seconds: float) -> Due:
        return _in_order(self._run(dispatching.take_due(self._ledger, visibility_seconds=visibility_seconds)))

    def take_unsendable(self) -> Due:
        return _in_order(self._run(dispatching.take_unsendable(self._ledger)))

    def wake_hinted(self) -> int:
        return self._run(dispatching.wake_hinted(self._ledger))

    def find_lost(self, stale_seconds: float) -> list[Lost]:
        found = self._run(dispatching.find_lost(self._ledger, stale_seconds=stale_seconds))
        lost_claims = [
            Lost(
                delivery_id=lost.delivery_id,
                budget=lost.budget,
                policy=lost.policy,
                scheduled_at=lost.row["next_attempt_at"],
                claimed_at=lost.row["claimed_at"],
                trigger=lost.row["next_trigger"],
                worker=lost.row["worker"],
            )
            for lost in found
        ]
        return sorted(lost_claims, key=lambda lost: lost.delivery_id)

    def park(self, delivery_ids: list[uuid.UUID]) -> None:
        self._run(dispatching.park(self._ledger, delivery_ids))

    def admit(self) -> int | None:
        return self._run(dispatching.admit(self._ledger))

    def beat(self, worker: str) -> None:
        self._run(dispatching.beat(self._ledger, worker))

    # destinations

    def pause(self, destination_id: uuid.UUID) -> bool:
        return self._moved(destinations.pause, destination_id)

    def resume(self, destination_id: uuid.UUID) -> bool:
        return self._moved(destinations.resume, destination_id)

    def disable(self, destination_id: uuid.UUID) -> bool:
        return self._moved(destinations.disable, destination_id)

    def enable(self, destination_id: uuid.UUID) -> bool:
        return self._moved(destinations.enable, destination_id)

    def _moved(self, move: Move, destination_id: uuid.UUID) -> bool:
        async def moved() -> bool:
            return bool(await move(self._ledger, _deed("destination"), destination_id))

        return self._run(moved())

    # operating

    def cancel(self, delivery_id: uuid.UUID) -> Result:
        return self._run(operating.cancel(self._ledger, _deed("cancel"), delivery_id))

    def retry(self, delivery_id: uuid.UUID) -> Result:
        return self._run(operating.retry(self._ledger, _deed("retry"), delivery_id))

    def confirm(self, delivery_id: uuid.UUID) -> Result:
        return self._run(operating.confirm(self._ledger, _deed("confirm"), delivery_id))

    def resend(self, delivery_id: uuid.UUID) -> Result:
        return self._run(operating.resend(self._ledger, _deed("resend"), delivery_id))

    def give_up(self, delivery_id: uuid.UUID) -> Result:
        return self._run(operating.give_up(self._ledger, _deed("give_up"), delivery_id))

    def discard(self, delivery_ids: Sequence[uuid.UUID]) -> int:
        return self._run(operating.discard(self._ledger, _deed("discard"), delivery_ids))

    def start_redrive(self, redrive_id: uuid.UUID, delivery_ids: Sequence[uuid.UUID]) -> None:
        order = Order(ByIds(tuple(delivery_ids)), "the receiver was mended")
        started = self._run(redrive.start(self._ledger, TENANT, "model", order, key=None, new_id=lambda: redrive_id))
        assert started == Started(redrive_id)

    def redrive(self, batch: int) -> bool:
        return self._run(redrive.step(self._ledger, batch=batch))

    def snapshot(self) -> Snapshot:
        return self._run(self._snapshot())

    async def _begin(self, now: dt.datetime, made: Sequence[Destination]) -> None:
        async with self._ledger.transaction() as connection:
            for table in _TABLES:
                await connection.execute(Statement(f"DELETE FROM {table}"))
            await connection.execute(Statement("UPDATE clock.reading SET at = :at"), {"at": now})
        for destination in made:
            secret = NewSecret(uuid.uuid5(destination.id, "secret"), b"not read")
            await destinations.create(self._ledger, _as_columns(destination), secret, deed=_deed("create"))

    async def _snapshot(self) -> Snapshot:
        async with self._ledger.statement() as connection:
            deliveries = await connection.rows(_DELIVERIES, {})
            attempts = await connection.rows(_ATTEMPTS, {})
            receivers = await connection.rows(_DESTINATIONS, {})
        found: Snapshot = {f"delivery {row['id']}": _columns(row, Delivery) for row in deliveries}
        for row in attempts:
            found[f"attempt {row['delivery_id']} {row['number']}"] = _columns(row, Attempt)
        for row in receivers:
            found[f"destination {row['id']}"] = {"state": row["state"], "gated": row["gated"]}
        return found

    def _execute(self, sql: str, values: Mapping[str, Any]) -> None:
        async def execute() -> None:
            async with self._ledger.statement() as connection:
                await connection.execute(Statement(sql), values)

        self._run(execute())

    def _run(self, work: Coroutine[Any, Any, Answered]) -> Answered:
        return self._runner.run(work)


async def _set_our_clock(database_url: str) -> None:
    connection = await asyncpg.connect(database_url)
    try:
        await connection.execute(_OUR_CLOCK)
        name = await connection.fetchval("SELECT current_database()")
        await connection.execute(f"ALTER DATABASE {name} SET search_path = clock, pg_catalog, public")
    finally:
        await connection.close()


def _columns(row: Row, table: type[Delivery | Attempt]) -> dict[str, object]:
    return {column.name: row[column.name] for column in fields(table)}


def _in_order(due: Due) -> Due:
    """Those of one due time come in any order; by id, two answers can be compared."""
    return Due(sorted(due.to_hint), sorted(due.expired), sorted(due.to_park))


def _deed(action: str) -> Deed:
    return Deed(TENANT, "model", f"model.{action}", "model", reason="model")


def _as_columns(destination: Destination) -> dict[str, Any]:
    schedule_seconds = destination.policy.schedule_seconds
    return {
        "id": destination.id,
        "tenant": TENANT,
        "name": "receiver",
        "url": "https://receiver.example/hook",
        "owner": None,
        "ad_hoc": False,
        "headers": {},
        "timeout_seconds": destination.timeout_seconds,
        "attempts_max": destination.attempts_max,
        "deadline_seconds": destination.deadline_seconds,
        "schedule_seconds": list(schedule_seconds) if schedule_seconds else None,
        "base_seconds": destination.policy.base_seconds,
        "cap_seconds": destination.policy.cap_seconds,
        "on_ambiguous": destination.policy.on_ambiguous.value,
        "response_rules": {},
    }
