"""Real processes and real servers, to be killed, paused and started again.

The rule this module keeps: nothing is left behind. Every process dies with pytest, its SIGKILL
included, and every wait has an end that says what it waited for and where the logs are.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import asyncpg
import redis.asyncio
from arq.utils import timestamp_ms

from service import keys
from service.domain.ids import Prefix, parse_typeid
from service.embedded import ports
from service.embedded.folder import DataFolder
from service.embedded.postgres import EmbeddedPostgres
from service.embedded.process import launch_line
from service.embedded.redis import EmbeddedRedis
from service.ledger import migrate
from service.queue.arq_queue import QUEUE_NAME
from service.settings import Settings
from service.telemetry import events
from tests.faults import crash_points
from tests.faults.client import Answer, Connection, Destination, NoAnswer, Producer
from tests.faults.crash_points import Crash
from tests.faults.history import judge
from tests.faults.proxy import PostgresWire, Proxy
from tests.faults.reading import read_arrivals, read_ledger
from tests.faults.receiver import Receiver
from tests.faults.records import Asked, History, Seen, Violation
from tests.servers import SECRET_KEYS, Servers, name_of, temporary_folder

PATIENCE_SECONDS: Final = 40.0
POLL_SECONDS: Final = 0.02
ROOT: Final = Path(__file__).resolve().parents[2]
STALE_SECONDS: Final = 5.1  # the least that the settings allow: a claim counts as young for 5 s

# Short times, so that a test waits seconds for what takes ten or thirty in production.
SETTINGS: Final = {
    "SECRET_KEYS": SECRET_KEYS,
    "EGRESS_ALLOW": "127.0.0.0/8:*",
    "HEARTBEAT_SECONDS": "0.5",
    "HEARTBEAT_STALE_SECONDS": str(STALE_SECONDS),
    "LEASE_MARGIN_SECONDS": "5",
    "HINT_VISIBILITY_SECONDS": "1",
    "DISPATCH_INTERVAL_SECONDS": "0.1",
    "WORKER_GRACE_SECONDS": "15",
    "API_DRAIN_SECONDS": "0",
}


async def until(
    condition: Callable[[], bool | Awaitable[bool]], what: str, *, seconds: float = PATIENCE_SECONDS
) -> float:
    """Return how many seconds it took until the condition held; fail, naming what was waited for."""
    started = time.monotonic()
    while True:
        holds = condition()
        if inspect.isawaitable(holds):
            holds = await holds
        waited_seconds = time.monotonic() - started
        if holds:
            return waited_seconds
        assert waited_seconds < seconds, f"waited {seconds:g} s in vain: {what}"
        await asyncio.sleep(POLL_SECONDS)


class BreakableServers(Servers):
    """A Postgres and a Redis whose ends and new beginnings a test may ask for, at the same addresses.

    The embedded servers start from the main thread alone, so a start holds up the test's own loop.
    """

    def __init__(self, folder: DataFolder, postgres: EmbeddedPostgres, redis_server: EmbeddedRedis) -> None:
        self._folder = folder
        self._postgres = postgres
        self._redis = redis_server
        super().__init__(postgres.start(), redis_server.start(), postgres, redis_server)

    def kill_postgres(self) -> None:
        """SIGKILL; what was committed is in its files."""
        self._postgres.kill()

    def stop_postgres(self, *, immediate: bool = False) -> None:
        """A fast shutdown: sessions are ended, and all is written. An immediate one writes nothing."""
        if immediate and self._postgres.pid is not None:
            os.kill(self._postgres.pid, signal.SIGQUIT)
        self._postgres.stop()

    def kill_backend(self, pid: int) -> None:
        """SIGKILL one of Postgres' own processes; it ends all the others, recovers, and goes on."""
        os.kill(pid, signal.SIGKILL)

    @property
    def superuser_url(self) -> str:
        """For what only Postgres' superuser may do."""
        return self._postgres.superuser_url

    def start_postgres(self) -> None:
        """Start again on the same port and data; returns when connections are accepted."""
        before = self._postgres.url
        assert self._postgres.start() == before, "another process took the port of Postgres"

    def kill_redis(self) -> None:
        """SIGKILL."""
        self._redis.kill()

    def keep_redis(self, snapshot: Path) -> None:
        """Copy what Redis holds now to a folder that is not there yet."""
        shutil.copytree(self._redis_data, snapshot)

    def start_redis(self, *, empty: bool = False, snapshot: Path | None = None) -> None:
        """Start again on the same port, with the same data, with none, or with what a snapshot holds."""
        if empty or snapshot is not None:
            shutil.rmtree(self._redis_data, ignore_errors=True)
        if snapshot is not None:
            shutil.copytree(snapshot, self._redis_data)
            owner = self._redis_data.parent.stat()
            for path in (self._redis_data, *self._redis_data.iterdir()):
                os.chown(path, owner.st_uid, owner.st_gid)
        assert self._redis.start() == self.redis_url, "another process took the port of Redis"

    @property
    def _redis_data(self) -> Path:
        return self._folder.place / "redis" / "appendonlydir"


@contextmanager
def breakable_servers() -> Iterator[BreakableServers]:
    """A Postgres and a Redis in a folder that goes away with them."""
    with temporary_folder() as path, DataFolder.open(path) as folder:
        postgres, redis_server = EmbeddedPostgres(folder, fast=True), EmbeddedRedis(folder)
        try:
            yield BreakableServers(folder, postgres, redis_server)
        finally:
            postgres.stop()
            redis_server.stop()


def migrated(servers: BreakableServers) -> tuple[str, str]:
    """The name of a migrated database to copy, and the API key that it holds."""
    url = servers.create_database()
    settings = Settings.model_validate(
        {"database_url": url, "redis_url": servers.redis_url, "secret_keys": SECRET_KEYS}
    )
    migrate.upgrade(settings)
    return name_of(url), keys.create(settings, "faults")


class Process:
    """One `hookledger` role, with crash points or without. Its log is a file of its own."""

    def __init__(
        self, role: str, environment: dict[str, str], log: Path, port: int = 0, crashes: tuple[Crash, ...] = ()
    ) -> None:
        self.role = role
        self.port = port
        self.log = log
        command = [sys.executable, "-P", "-m", "service.cli", role]
        if crashes:
            command = crash_points.command(crashes, role)
            environment = {**environment, "PYTHONPATH": str(ROOT)}
        with log.open("w") as file:
            self._popen = subprocess.Popen(
                launch_line(command, signal.SIGKILL, None),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
            )

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._popen.poll()

    def said(self, event: str) -> bool:
        """Whether its log holds the event."""
        return f'"{event}"' in self.log.read_text()

    def signal(self, number: signal.Signals) -> None:
        """SIGKILL, SIGTERM, SIGSTOP, SIGCONT."""
        self._popen.send_signal(number)

    def kill(self) -> None:
        """End it without its consent, and bury it."""
        self._popen.kill()
        self._popen.wait()

    async def ended(self, *, seconds: float = PATIENCE_SECONDS) -> int:
        """Wait for its end; the exit code."""
        await until(lambda: self.exit_code is not None, f"the end of the {self.role} ({self.log})", seconds=seconds)
        assert self.exit_code is not None
        return self.exit_code

    async def crashed(self) -> None:
        """Wait until its crash point has killed it."""
        code = await self.ended()
        assert code == -signal.SIGKILL, f"the {self.role} ended by itself, with {code}: {self.log.read_text()}"

    async def stopped(self) -> None:
        """Wait until its crash point has stopped it."""
        status = Path(f"/proc/{self._popen.pid}/stat")
        await until(
            lambda: status.read_text().rpartition(")")[2].split()[0] == "T", f"the stop of the {self.role} ({self.log})"
        )

    async def ready(self) -> None:
        """Wait until it works."""

        def started() -> bool:
            assert self.exit_code is None, f"the {self.role} ended: {self.log.read_text()}"
            return self.said(events.STARTED)

        await until(started, f"the start of the {self.role} ({self.log})")


class Stack:
    """The roles of one test on a database of its own, its receiver, and the logs of all that happened."""

    def __init__(
        self, servers: BreakableServers, database_url: str, api_key: str, receiver: Receiver, folder: Path
    ) -> None:
        self.servers = servers
        self.receiver = receiver
        self.asked: list[Asked] = []
        self.seen: list[Seen] = []
        self.processes: list[Process] = []
        self.database_url = database_url
        self._api_key = api_key
        self._folder = folder
        self._secrets: dict[str, str] = {}
        self._connections: list[Connection] = []
        self._proxies: list[Proxy] = []
        self._operator: Connection | None = None
        self._witnesses: asyncpg.Pool[asyncpg.Record] | None = None

    async def start(
        self, *roles: str, port: int | None = None, crash: Crash | tuple[Crash, ...] = (), **settings: str
    ) -> list[Process]:
        """Start processes and wait until they work. `settings` are variables of their environment."""
        started = [self.launch(role, port=port, crash=crash, **settings) for role in roles]
        await asyncio.gather(*(process.ready() for process in started))
        return started

    def launch(
        self, role: str, *, port: int | None = None, crash: Crash | tuple[Crash, ...] = (), **settings: str
    ) -> Process:
        """Start one process."""
        if role == "api" and port is None:
            port = ports.choose(None)
        environment = {
            **{name: value for name, value in os.environ.items() if name not in SETTINGS},
            **SETTINGS,
            "DATABASE_URL": self.database_url,
            "REDIS_URL": self.servers.redis_url,
            "API_PORT": str(port or 0),
            **settings,
        }
        log = self._folder / f"{len(self.processes):03}-{role}.log"
        crashes = (crash,) if isinstance(crash, Crash) else crash
        process = Process(role, environment, log, port or 0, crashes)
        self.processes.append(process)
        return process

    def living(self, role: str) -> list[Process]:
        """The processes of a role that run."""
        return [process for process in self.processes if process.role == role and process.exit_code is None]

    async def postgres_proxy(self) -> Proxy:
        """A proxy to this test's database; roles started with its URL as DATABASE_URL go through it."""
        return await self._proxy(Proxy(self.database_url, PostgresWire))

    async def redis_proxy(self) -> Proxy:
        """A proxy to Redis; roles started with its URL as REDIS_URL go through it."""
        return await self._proxy(Proxy(self.servers.redis_url))

    async def _proxy(self, proxy: Proxy) -> Proxy:
        self._proxies.append(proxy)
        await proxy.accept()
        return proxy

    def connect(self, port: int | None = None, *, api_key: str | None = None) -> Connection:
        """A connection to the (first) API, closed with the stack."""
        connection = Connection(port or self.living("api")[0].port, api_key or self._api_key)
        self._connections.append(connection)
        return connection

    def producer(self, connections_count: int = 1) -> Producer:
        """A producer with so many connections, shared out over the APIs."""
        apis = self.living("api")
        connections = [self.connect(apis[number % len(apis)].port) for number in range(connections_count)]
        return Producer(connections, self.asked)

    async def call(self, method: str, path: str, body: bytes = b"") -> Answer:
        """One request of an operator's. What only reads is asked again when the API was started anew meanwhile."""
        if self._operator is None:
            self._operator = self.connect()
        if method == "GET":
            with contextlib.suppress(NoAnswer):
                return await self._operator.request(method, path, body)
        return await self._operator.request(method, path, body)

    async def destination(self, path: str, fields: bytes = b"", *, over: Connection | None = None) -> Destination:
        """A destination at the receiver; `fields` are more members of its JSON. `over`: as another tenant."""
        body = b'{"url":"%s"%s}' % (self.receiver.url(path).encode(), b"," + fields if fields else b"")
        request = over.request if over is not None else self.call
        answer = await request("POST", "/destinations", body)
        assert answer.status == 201, answer.content
        self._secrets[path] = answer.json["secret"]
        return Destination(answer.json["id"], path, answer.json["secret"])

    async def view(self, delivery_id: str) -> dict[str, Any]:
        """A delivery with its attempts as the API shows it; the checker hears of it."""
        answer = await self.call("GET", f"/deliveries/{delivery_id}")
        while answer.status == 503:  # the ledger is or was away
            answer = await self.call("GET", f"/deliveries/{delivery_id}")
        assert answer.status == 200, answer.content
        view: dict[str, Any] = answer.json
        self.seen.append(Seen(delivery_id, view["state"], view["redrive_count"]))
        return view

    async def reached(self, delivery_id: str, state: str, *, seconds: float = PATIENCE_SECONDS) -> dict[str, Any]:
        """Wait until a delivery is in the state, and return it."""

        async def there() -> bool:
            return bool((await self.view(delivery_id))["state"] == state)

        await until(there, f"{delivery_id} {state} (logs: {self._folder})", seconds=seconds)
        return await self.view(delivery_id)

    async def fetch(self, sql: str, *values: Any) -> list[asyncpg.Record]:
        """A question to the ledger itself."""
        connection = await asyncpg.connect(self.database_url, timeout=10.0)
        try:
            return list(await connection.fetch(sql, *values))
        finally:
            await connection.close()

    async def command(self, *statements: str) -> None:
        """Statements of Postgres' superuser's, each in autocommit."""
        connection = await asyncpg.connect(self.servers.superuser_url, timeout=10.0)
        try:
            for statement in statements:
                await connection.execute(statement)
        finally:
            await connection.close()

    async def drained(self, *, seconds: float = PATIENCE_SECONDS) -> float:
        """Wait until every delivery has ended; how long that took."""
        return await until(self._is_drained, f"the end of every delivery (logs: {self._folder})", seconds=seconds)

    async def _is_drained(self) -> bool:
        return not await self.fetch("SELECT FROM deliveries WHERE completed_at IS NULL LIMIT 1")

    async def jobs_in_redis(self) -> int:
        """How many jobs stand in Redis, those that are being worked on included."""
        async with redis.asyncio.Redis.from_url(self.servers.redis_url) as client:
            return int(await client.zcard(QUEUE_NAME))

    async def hints_left(self) -> int:
        """How many jobs wait in Redis. Those that a killed worker had begun are set aside until their time is up."""
        async with redis.asyncio.Redis.from_url(self.servers.redis_url, decode_responses=True) as client:
            return int(await client.zcount(QUEUE_NAME, "-inf", timestamp_ms()))

    async def flush_redis(self) -> None:
        """FLUSHALL."""
        async with redis.asyncio.Redis.from_url(self.servers.redis_url) as client:
            await client.flushall()

    async def witness(self, webhook_id: str) -> int | None:
        """The number of the latest committed claim; None when the ledger does not tell."""
        if self._witnesses is None:
            self._witnesses = asyncpg.create_pool(self.database_url, min_size=0, max_size=4, timeout=5.0)
        number = parse_typeid(Prefix.DELIVERY, webhook_id)
        try:
            pool = await self._witnesses
            count = await pool.fetchval("SELECT attempt_count FROM deliveries WHERE id = $1", number, timeout=5.0)
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, TimeoutError):
            return None
        return int(count or 0)

    async def history(self, *, drained: bool = True) -> History:
        """What happened, in the checker's words."""
        connection = await asyncpg.connect(self.database_url, timeout=10.0)
        try:
            deliveries, read_at = await read_ledger(connection)
            leases = await connection.fetchval("SELECT count(*) FROM deliveries WHERE lease_until IS NOT NULL")
        finally:
            await connection.close()
        return History(
            asked=tuple(self.asked),
            seen=tuple(self.seen),
            arrivals=read_arrivals(self.receiver.requests, self._secrets),
            deliveries=deliveries,
            read_at=read_at,
            drained=drained,
            gauges={"leases": leases, "hints": await self.hints_left()},
        )

    async def judged(self) -> History:
        """Drain, judge, and fail with every violation; the history of a run that was accepted."""
        await self.drained()

        async def no_hints() -> bool:
            return not await self.hints_left()

        await until(no_hints, "the last jobs in Redis to be taken")
        history = await self.history()
        assert_accepted(judge(history))
        return history

    async def close(self) -> None:
        """End everything."""
        for process in self.processes:
            process.kill()
        for connection in self._connections:
            await connection.close()
        for proxy in self._proxies:
            await proxy.close()
        if self._witnesses is not None:
            self._witnesses.terminate()


def assert_accepted(violations: list[Violation]) -> None:
    """Fail with the first few of the violations, in their sentences."""
    sentences = "\n".join(str(violation) for violation in violations[:20])
    assert not violations, f"{len(violations)} violations:\n{sentences}"
