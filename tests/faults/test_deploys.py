"""New versions come in under load: processes change over, the schema moves, and nobody notices."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest
from alembic import command

from service.ledger import migrate
from tests.faults.client import Answer, Connection, Destination, Producer
from tests.faults.harness import Stack, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

LOAD_CONNECTIONS = 4
LOCK_SECONDS_MAX = 5.0  # what alembic/env.py lets a change of the schema wait, and so whoever waits behind it
LOOK_EVERY_SECONDS = 0.02

# As every change of the schema must be: whoever runs the version before does not notice it.
NEXT_REVISION = """
import sqlalchemy as sa
from alembic import op

revision = "next"
down_revision = "{head}"

def upgrade():
    op.add_column("deliveries", sa.Column("of_the_next_version", sa.Integer(), server_default="0", nullable=False))

def downgrade():
    op.drop_column("deliveries", "of_the_next_version")
"""


class Load:
    """Producers that post one delivery after the other to whichever API is in front, until told to end."""

    def __init__(self, stack: Stack, destination: Destination) -> None:
        self.answers: list[Answer] = []
        self._stack = stack
        self._destination = destination
        self._connections: list[Connection] = []
        self._ending = False

    def turn_to(self, port: int) -> None:
        """What a load balancer does: the next requests go to this API."""
        self._connections = [self._stack.connect(port) for _ in range(LOAD_CONNECTIONS)]

    async def grown(self, count: int = 40) -> None:
        """Wait until so many more were answered."""
        least = len(self.answers) + count
        await until(lambda: len(self.answers) >= least, "answers under load")

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Post all the while; a request that fails fails the test."""
        posting = [asyncio.create_task(self._post(place)) for place in range(LOAD_CONNECTIONS)]
        try:
            yield
        finally:
            self._ending = True
            await asyncio.gather(*posting)

    async def _post(self, place: int) -> None:
        producer = self._stack.producer()
        while not self._ending:
            self.answers.append(await self._one(producer, self._connections[place]))

    async def _one(self, producer: Producer, connection: Connection) -> Answer:
        return await producer.post(self._destination, over=connection)


async def test_six_rolling_restarts_under_load_fail_no_request_and_repeat_none(stack: Stack) -> None:
    """Every role twice: the new one comes first, the load turns to it, the old one is told to stop."""
    api, worker, dispatcher = await stack.start("api", "worker", "dispatcher")
    load = Load(stack, await stack.destination("/hook"))
    load.turn_to(api.port)
    async with load.running():
        for _ in range(2):
            await load.grown()
            new_api, new_worker, new_dispatcher = await stack.start("api", "worker", "dispatcher")
            load.turn_to(new_api.port)
            await load.grown()
            for old in (api, worker, dispatcher):
                old.signal(signal.SIGTERM)
                assert await old.ended() == 0
            api, worker, dispatcher = new_api, new_worker, new_dispatcher
            await load.grown()
    assert {answer.status for answer in load.answers} == {202}
    history = await stack.judged()
    attempts = [attempt for delivery in history.deliveries for attempt in delivery.attempts]
    assert {attempt.outcome for attempt in attempts} <= {"success", "not_sent"}, "what was released was not sent"
    assert len(history.arrivals) == len(history.deliveries) == len(load.answers)


async def test_an_api_that_is_told_to_stop_is_not_ready_first_and_answers_on(stack: Stack) -> None:
    [api] = await stack.start("api", API_DRAIN_SECONDS="2")
    destination = await stack.destination("/hook")
    assert (await stack.connect(api.port).request("GET", "/readyz")).status == 200
    api.signal(signal.SIGTERM)

    async def not_ready() -> bool:
        return (await stack.connect(api.port).request("GET", "/readyz")).status == 503

    await until(not_ready, "the API's word that it is not ready")
    answer = await stack.producer().post(destination, over=stack.connect(api.port))
    assert answer.status == 202, "who has not heard yet is still served"
    assert await api.ended() == 0


async def test_the_schema_goes_up_down_and_up_under_load_and_no_request_fails(stack: Stack, tmp_path: Path) -> None:
    [api, *_] = await stack.start("api", "worker", "dispatcher")
    load = Load(stack, await stack.destination("/hook"))
    load.turn_to(api.port)
    config = migrate._config(stack.database_url)
    scripts = tmp_path / "alembic"
    shutil.copytree(migrate._SCRIPTS, scripts, ignore=shutil.ignore_patterns("__pycache__"))
    [head] = [revision.revision for revision in migrate._script().walk_revisions()][:1]
    (scripts / "versions" / "next.py").write_text(NEXT_REVISION.format(head=head))
    config.set_main_option("script_location", str(scripts))
    watching = await asyncpg.connect(stack.database_url)
    waits: list[float] = []

    async def watch() -> None:
        while True:
            longest = await watching.fetchval(
                "SELECT max(extract(epoch FROM clock_timestamp() - query_start)) FROM pg_stat_activity"
                " WHERE wait_event_type = 'Lock' AND datname = current_database()"
            )
            waits.append(float(longest or 0))
            await asyncio.sleep(LOOK_EVERY_SECONDS)

    watcher = asyncio.create_task(watch())
    async with load.running():
        for move, goal in ((command.upgrade, "next"), (command.downgrade, head), (command.upgrade, "next")):
            await load.grown()
            await asyncio.to_thread(move, config, goal)
        await load.grown()
    watcher.cancel()
    await asyncio.wait([watcher])
    await watching.close()
    assert {answer.status for answer in load.answers} == {202}
    assert max(waits) < LOCK_SECONDS_MAX
    await stack.judged()
    # The version before starts on the schema of the next one.
    await stack.start("worker")
