"""The stand: a real Postgres and Redis of its own, the roles as real processes, a receiver, a load.

The servers are the embedded ones, as `hookledger dev` runs them: every commit is flushed to the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import httpx
import redis

from bench import meter
from bench.counter import Counter
from bench.load import Plan
from service import bootstrap, dev, keys, up
from service.destinations import Destinations
from service.domain.ids import Prefix, to_typeid
from service.embedded import ports
from service.embedded.folder import DataFolder
from service.embedded.postgres import EmbeddedPostgres
from service.embedded.redis import EmbeddedRedis
from service.ledger import migrate
from service.settings import Settings
from service.supervise import Role

READY_SECONDS: Final = 30.0
_POLL_SECONDS: Final = 0.02
_MAKING_AT_ONCE: Final = 4  # destinations, below the connections of one process
ALLOW: Final = "127.0.0.0/8:*"


@dataclass(frozen=True, slots=True)
class Bill:
    """CPU seconds by role between two looks."""

    seconds: Mapping[str, float]

    def per(self, count: int) -> dict[str, float]:
        """Microseconds of each role for one of `count`."""
        return {role: seconds / count * 1e6 for role, seconds in self.seconds.items()}

    def total_per(self, count: int) -> float:
        """Microseconds of all roles together for one of `count`."""
        return sum(self.seconds.values()) / count * 1e6


class Receiver:
    """A receiver's process."""

    def __init__(self, folder: Path, delay_ms: float) -> None:
        self.counter_file = folder / f"counter-{secrets.token_hex(4)}"
        self._counter = Counter(self.counter_file)
        arguments = [sys.executable, "-m", "bench.receiver", str(self.counter_file), str(delay_ms)]
        self._process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    @property
    def received_count(self) -> int:
        """How many different deliveries have come."""
        return self._counter.value

    def url(self, path: str = "hooks") -> str:
        """An address of it."""
        return f"http://127.0.0.1:{self.port}/{path}"

    def reset(self) -> None:
        """Begin anew."""
        httpx.get(self.url("reset")).raise_for_status()

    def figures(self) -> dict[str, Any]:
        """What came since."""
        told: dict[str, Any] = httpx.get(self.url("figures"), timeout=60.0).raise_for_status().json()
        return told

    def wait_for(self, count: int, seconds: float) -> None:
        """Wait until so many different deliveries have come. Raises TimeoutError."""
        give_up_at = time.monotonic() + seconds
        while self.received_count < count:
            if time.monotonic() > give_up_at:
                raise TimeoutError(f"{self.received_count} of {count} deliveries came within {seconds:g} s")
            time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait()


class Service:
    """A set of roles that run against one ledger."""

    def __init__(self, stand: Stand, environment: dict[str, str], key: str) -> None:
        self._stand = stand
        self.environment = environment
        self.settings = Settings.model_validate({name.lower(): value for name, value in environment.items()})
        self.key = key
        self.port = self.settings.api_port
        self._roles: dict[str, Role] = {}
        self._runs = itertools.count(1)
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}", headers={"Authorization": f"Bearer {key}"}, timeout=60.0
        )

    @property
    def database_url(self) -> str:
        """The ledger of this set."""
        return self.environment["DATABASE_URL"]

    def start(self, *, api: int = 0, workers: int = 0, dispatchers: int = 0) -> None:
        """Start roles beside those that run, and wait until they do their work."""
        counts = up.Counts(api, workers, dispatchers)
        for role in up.make_roles(counts, self.environment, grace_seconds=10.0):
            self._roles[role.name] = role
            role.start()
        if api:
            self._wait(self._is_ready, "the API is not ready")
        if workers:  # the dispatcher has nothing to be ready for
            wanted = sum(name.startswith("worker-") for name in self._roles)
            self._wait(lambda: self.query("SELECT count(*) FROM workers")[0][0] >= wanted, "the workers do not beat")

    def stop(self, *prefixes: str) -> None:
        """Stop the roles of these names, or all."""
        stopping = {name: role for name, role in self._roles.items() if not prefixes or name.startswith(prefixes)}
        for role in stopping.values():
            role.ask_to_stop()
        for name, role in stopping.items():
            role.stop()
            del self._roles[name]

    def pids(self, prefix: str) -> list[int]:
        """The processes of one role."""
        return [role.pid for name, role in self._roles.items() if name.startswith(prefix) and role.pid is not None]

    def bill(self) -> Bill:
        """What has been spent so far, by role."""
        spent = {role: meter.cpu_seconds(self.pids(role)) for role in ("api", "worker", "dispatcher")}
        return Bill(spent | self._stand.spent())

    def bill_since(self, before: Bill) -> Bill:
        """What has been spent since."""
        return Bill({role: seconds - before.seconds[role] for role, seconds in self.bill().seconds.items()})

    def destination(self, url: str, **fields: Any) -> str:
        """Make a destination; its id."""
        made = self.client.post("/destinations", json={"name": "bench", "url": url, **fields})
        made.raise_for_status()
        text: str = made.json()["id"]
        return text

    def destinations(self, urls: Sequence[str]) -> list[str]:
        """Make many destinations without the API; their ids."""
        return asyncio.run(_make_destinations(self.settings, urls))

    def plan(self, destination_ids: Sequence[str], **fields: Any) -> Plan:
        """What a load on this service is to do; its idempotency keys are its own."""
        run = f"run{next(self._runs):05}"
        return Plan(port=self.port, key=self.key, run=run, destination_ids=list(destination_ids), **fields)

    def query(self, statement: str, *values: object, timeout_seconds: float = 600.0) -> list[asyncpg.Record]:
        """Rows of the ledger, read beside the service."""
        return asyncio.run(_query(self.database_url, statement, values, timeout_seconds))

    def _is_ready(self) -> bool:
        try:
            return self.client.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False

    def _wait(self, holds: Callable[[], bool], complaint: str) -> None:
        give_up_at = time.monotonic() + READY_SECONDS
        while not holds():
            ended = {name: role.exit_code for name, role in self._roles.items() if role.exit_code is not None}
            if ended or time.monotonic() > give_up_at:
                raise RuntimeError(f"{complaint} (ended: {ended or 'none'})")
            time.sleep(_POLL_SECONDS)


class Stand:
    """The servers, for as long as a run of the bench lasts."""

    def __init__(self, folder: DataFolder) -> None:
        self.folder = folder.path
        self._postgres = EmbeddedPostgres(folder)
        self._redis = EmbeddedRedis(folder)
        self._postgres.start()
        self._redis.start()
        self._keyring = dev.make_keyring()
        self._template = self._create_database(None)
        migrate.upgrade(Settings.model_validate(self._settings_of(self._template)))

    def stop(self) -> None:
        """Stop the servers."""
        self._redis.stop()
        self._postgres.stop()

    def spent(self) -> dict[str, float]:
        """CPU seconds of the servers so far."""
        pids = {"postgres": self._postgres.pid, "redis": self._redis.pid}
        return {name: meter.cpu_seconds([pid]) for name, pid in pids.items() if pid is not None}

    @contextlib.contextmanager
    def service(
        self, *, api: int = 1, workers: int = 1, dispatchers: int = 1, environment: Mapping[str, str] | None = None
    ) -> Iterator[Service]:
        """Roles on a ledger of their own with nothing in it."""
        database_url = self._create_database(self._template)
        with redis.Redis.from_url(self._redis.url) as client:
            client.flushall()
        key = keys.create(Settings.model_validate(self._settings_of(database_url)), "bench")
        made = {
            "DATABASE_URL": database_url,
            "REDIS_URL": self._redis.url,
            "SECRET_KEYS": self._keyring,
            "API_PORT": str(ports.choose(None)),
            "API_DRAIN_SECONDS": "0",
            "API_REUSE_PORT": "1",
            "EGRESS_ALLOW": ALLOW,
            "LOG_LEVEL": "info",
            **(environment or {}),
        }
        service = Service(self, made, key)
        try:
            service.start(api=api, workers=workers, dispatchers=dispatchers)
            yield service
        finally:
            service.stop()
            service.client.close()
            self._drop_database(database_url)

    @contextlib.contextmanager
    def receiver(self, delay_ms: float = 1.0) -> Iterator[Receiver]:
        """A receiver that answers after so long."""
        receiver = Receiver(self.folder, delay_ms)
        try:
            yield receiver
        finally:
            receiver.stop()

    def _settings_of(self, database_url: str) -> dict[str, str]:
        return {"database_url": database_url, "redis_url": self._redis.url, "secret_keys": self._keyring}

    def _create_database(self, template_url: str | None) -> str:
        name = f"bench_{secrets.token_hex(4)}"
        template = f" TEMPLATE {_name_of(template_url)} STRATEGY file_copy" if template_url else ""
        asyncio.run(_query(self._postgres.url, f"CREATE DATABASE {name}{template}", (), 60.0))
        return urlunsplit(urlsplit(self._postgres.url)._replace(path=f"/{name}"))

    def _drop_database(self, url: str) -> None:
        # As the superuser: autovacuum may be in it.
        asyncio.run(_query(self._postgres.superuser_url, f"DROP DATABASE {_name_of(url)} WITH (FORCE)", (), 60.0))


@contextlib.contextmanager
def standing() -> Iterator[Stand]:
    """A stand in a folder that goes away with it."""
    folder = Path(tempfile.mkdtemp(prefix="hookledger-bench-"))
    folder.chmod(0o711)  # root's servers run as another user, who must reach it
    try:
        with DataFolder.open(folder) as data:
            stand = Stand(data)
            try:
                yield stand
            finally:
                stand.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_load(plan: Plan) -> dict[str, Any]:
    """Run a load in a process of its own; what it tells. Raises RuntimeError when a request failed."""
    process = subprocess.run(
        [sys.executable, "-m", "bench.load"], input=plan.as_json(), capture_output=True, text=True, check=False
    )
    if process.returncode:
        raise RuntimeError(f"the load failed: {process.stderr[-2_000:]}")
    told: dict[str, Any] = json.loads(process.stdout)
    refused = {status: count for status, count in told["statuses"].items() if int(status) != plan.success_status}
    if refused:
        raise RuntimeError(f"the service refused requests: {refused}")
    return told


def run_loads(plans: Sequence[Plan]) -> list[dict[str, Any]]:
    """Run several loads at once, each in a process of its own."""
    with ThreadPoolExecutor(len(plans)) as pool:
        return list(pool.map(run_load, plans))


def split(plan: Plan, parts: int) -> list[Plan]:
    """A plan as several that together do it, with numbers and keys of their own."""
    each = 10**11 // parts
    return [
        replace(plan, run=f"{plan.run}p{number}", first_number=plan.first_number + number * each)
        for number in range(parts)
    ]


def _name_of(url: str) -> str:
    return urlsplit(url).path.lstrip("/")


async def _query(url: str, statement: str, values: Sequence[object], timeout_seconds: float) -> list[asyncpg.Record]:
    connection = await asyncpg.connect(url, timeout=10.0)
    try:
        return list(await connection.fetch(statement, *values, timeout=timeout_seconds))
    finally:
        await connection.close()


async def _make_destinations(settings: Settings, urls: Sequence[str]) -> list[str]:
    ledger = bootstrap.ledger_of(settings, "bench")
    destinations = Destinations(ledger, bootstrap.keyring_of(settings), bootstrap.IdSource())
    ids: list[str] = []
    try:
        for start in range(0, len(urls), _MAKING_AT_ONCE):
            making = [
                destinations.create("default", "bench", {"name": "bench", "url": url}, None)
                for url in urls[start : start + _MAKING_AT_ONCE]
            ]
            ids += [to_typeid(Prefix.DESTINATION, made.destination.id) for made in await asyncio.gather(*making)]
    finally:
        await ledger.close()
    return ids
