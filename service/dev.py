"""`hookledger dev`: the whole service on one machine with nothing installed.

The rule: the ready file and the printed words tell the truth. They appear once everything answers,
and the file follows every restart.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Final

from service import dev_words
from service.embedded import ports
from service.embedded.folder import DataFolder, write_atomically
from service.embedded.postgres import EmbeddedPostgres
from service.embedded.process import launch_line
from service.embedded.redis import EmbeddedRedis
from service.errors import StartError
from service.supervise import Part, Role, Signals, Supervisor, gave_up, how_it_ended

PORT_DEFAULT: Final = 8080
PORTS_TRIED: Final = 100
READY_SECONDS: Final = 60.0
POLL_SECONDS: Final = 0.05
COMMAND_SECONDS: Final = 600.0  # a large migration of a given database takes its time
STOP_MARGIN_SECONDS: Final = 5.0
LOG_FORMAT: Final = "console"
LOOPBACK: Final = "127.0.0.0/8:*,::1/128:*"


@dataclass(frozen=True, slots=True)
class Options:
    """What was asked for. `port` None: 8080, or the next one that is free."""

    port: int | None
    data_dir: Path
    ready_file: Path | None


class ChildGaveUp(Exception):
    """A child ended for a reason that it has told the operator itself."""


def run(options: Options, environment: Mapping[str, str]) -> int:
    """Run everything until SIGINT or SIGTERM; the exit code. Raises StartError."""
    _check_ready_file(options.ready_file)
    with Signals() as signals, DataFolder.open(options.data_dir) as folder:
        dev = Dev(options, folder, signals, environment)
        try:
            dev.start()
            dev.keep_running()
        except ChildGaveUp:
            return 1
        finally:
            dev.stop()
    return 0


class Dev:
    """The servers, the roles, and what is known of them."""

    def __init__(self, options: Options, folder: DataFolder, signals: Signals, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._signals = signals
        self._given = environment
        self._ready_file = options.ready_file
        self._host = environment.get("API_HOST") or "127.0.0.1"
        self._port = choose_port(self._host, options.port)
        self._postgres = None if environment.get("DATABASE_URL") else EmbeddedPostgres(folder)
        self._redis = None if environment.get("REDIS_URL") else EmbeddedRedis(folder)
        self._servers: list[EmbeddedPostgres | EmbeddedRedis] = [
            server for server in (self._postgres, self._redis) if server is not None
        ]
        self._roles: dict[str, Role] = {}
        self._layers: list[list[Part]] = [[*self._servers], []]
        self._supervisor = Supervisor(
            self._layers,
            on_start=self._note_start,
            log_format=environment.get("LOG_FORMAT", LOG_FORMAT),
            log_level=environment.get("LOG_LEVEL", "info"),
        )
        self._api_key: str | None = None  # known once ready

    def start(self) -> None:
        """From nothing to everything answering. Returns early when asked to stop."""
        for server in self._servers:
            if not self._signals.stop_requests:
                self._supervisor.start(server)
        if self._signals.stop_requests:
            return
        self._migrate()
        # The dispatcher repairs and is missed last: the others have the processors to themselves until they are up.
        self._start_roles("api", "worker")
        key = self._folder.read("api-key") or self._create_key()
        if self._wait_until_ready():
            self._start_roles("dispatcher")
            if not self._is_accepted(key):  # of another database: the data folder and DATABASE_URL parted ways
                key = self._create_key()
            self._api_key = key
            self._write_ready_file()
            dev_words.greet(self._api_url(), key, self._folder, sys.stdout)

    def keep_running(self) -> None:
        """Restart what dies, until asked to stop."""
        self._supervisor.run(self._signals)

    def stop(self) -> None:
        """Stop the roles, then the servers; nothing is left."""
        self._supervisor.stop(self._signals)
        if self._ready_file is not None:
            self._ready_file.unlink(missing_ok=True)

    def _environment(self) -> dict[str, str]:
        """What the roles get: what was given, ours where nothing was, and the embedded servers' URLs."""
        environment = {
            "EGRESS_ALLOW": LOOPBACK,
            "LOG_FORMAT": LOG_FORMAT,
            "WORKER_GRACE_SECONDS": "5",
            "API_DRAIN_SECONDS": "0",  # nobody balances a load here
            **self._given,
            "API_HOST": self._host,
            "API_PORT": str(self._port),
        }
        if not environment.get("SECRET_KEYS"):
            environment["SECRET_KEYS"] = self._folder.kept("secret-keys", make_keyring)
        if self._postgres is not None:
            environment["DATABASE_URL"] = self._postgres.url
        if self._redis is not None:
            environment["REDIS_URL"] = self._redis.url
        return environment

    def _migrate(self) -> None:
        """Bring the ledger to this code's schema; nothing to do when it was us who brought it there before."""
        fingerprint = schema_fingerprint()
        ours = self._postgres is not None and not self._postgres.is_new
        if not ours or self._folder.read("migrated") != fingerprint:
            self._run_to_end("migrate")
            if self._postgres is not None:
                self._folder.write("migrated", fingerprint)

    def _start_roles(self, *names: str) -> None:
        environment = self._environment()
        for name in names:
            role = Role(
                name,
                [name],
                environment,
                grace_seconds=float(environment["WORKER_GRACE_SECONDS"]) + STOP_MARGIN_SECONDS,
                # When we are killed the servers go too, and a role could settle nothing any more.
                death_signal=signal.SIGKILL,
                pid_file=self._folder.pid_file(name),
            )
            self._roles[name] = role
            self._layers[1].append(role)
            self._supervisor.start(role)

    def _note_start(self, part: Part) -> None:
        """A part has been started again: tell the ready file, and the roles if a URL has changed."""
        if part in self._servers:
            environment = self._environment()
            for role in self._roles.values():
                if role.environment != environment:  # the server's port was taken while it was down
                    role.environment = environment
                    role.ask_to_stop()
        if self._api_key is not None:
            self._write_ready_file()

    def _wait_until_ready(self) -> bool:
        """Wait for the API's word that all is well; False when asked to stop first."""
        give_up_at = time.monotonic() + READY_SECONDS
        while not self._signals.stop_requests:
            if self._answers("/healthz") and self._answers("/readyz"):
                return True
            if gave_up(self._roles.values()):
                raise ChildGaveUp
            if time.monotonic() > give_up_at:
                raise StartError(f"Hookledger was not ready after {READY_SECONDS:g} s; the log above may say why.")
            self._signals.wait(min(POLL_SECONDS, self._supervisor.check()))
        return False

    def _answers(self, path: str) -> bool:
        return self._status(path) == HTTPStatus.OK

    def _is_accepted(self, key: str) -> bool:
        status = self._status("/deliveries?limit=1", {"Authorization": f"Bearer {key}"})
        return status != HTTPStatus.UNAUTHORIZED

    def _status(self, path: str, headers: Mapping[str, str] | None = None) -> int | None:
        """The status of a GET of our own API, None without an answer."""
        connection = HTTPConnection(_reachable_host(self._host), self._port, timeout=5.0)
        try:
            connection.request("GET", path, headers=dict(headers or {}))
            return connection.getresponse().status
        except (OSError, HTTPException):
            return None
        finally:
            connection.close()

    def _create_key(self) -> str:
        key = self._run_to_end("keys", "create", "dev").strip()
        self._folder.write("api-key", key)
        return key

    def _run_to_end(self, *command: str) -> str:
        """Run one of our own commands and return what it printed. Its complaints go to our stderr as they are."""
        line = launch_line([sys.executable, "-P", "-m", "service.cli", *command], signal.SIGKILL, None)
        words = f"`hookledger {' '.join(command)}`"
        try:
            done = subprocess.run(  # noqa: S603 - this same program
                line, env=self._environment(), stdout=subprocess.PIPE, text=True, check=False, timeout=COMMAND_SECONDS
            )
        except subprocess.TimeoutExpired:
            raise StartError(f"{words} had not ended after {COMMAND_SECONDS:g} s.") from None
        if done.returncode < 0:
            raise StartError(f"{words} was {how_it_ended(done.returncode)}.")
        if done.returncode != 0:
            raise ChildGaveUp
        return done.stdout

    def _api_url(self) -> str:
        host = _reachable_host(self._host)
        return f"http://[{host}]:{self._port}" if ":" in host else f"http://{host}:{self._port}"

    def _write_ready_file(self) -> None:
        if self._ready_file is None:
            return
        environment = self._environment()
        pids = {name: role.pid for name, role in self._roles.items()}
        pids["postgres"] = self._postgres.pid if self._postgres is not None else None
        pids["redis"] = self._redis.pid if self._redis is not None else None
        content = {
            "api_url": self._api_url(),
            "api_key": self._api_key,
            "database_url": environment["DATABASE_URL"],
            "redis_url": environment["REDIS_URL"],
            "console_url": None,
            "pids": pids,
        }
        try:
            write_atomically(self._ready_file, json.dumps(content, indent=2) + "\n")
        except OSError as error:
            raise StartError(f"The ready file {self._ready_file} cannot be written: {error.strerror}.") from None


def choose_port(host: str, asked: int | None) -> int:
    """The port for the API. Raises StartError when the one that was asked for is taken."""
    if asked is not None:
        if asked != 0 and not ports.is_free(host, asked):
            raise StartError(f"Port {asked} on {host} is in use or not allowed: choose another with --port.")
        return asked or ports.choose(None)
    port = ports.first_free(host, range(PORT_DEFAULT, PORT_DEFAULT + PORTS_TRIED))
    if port is None:
        raise StartError(f"No port from {PORT_DEFAULT} on is free on {host}: choose one with --port.")
    if port != PORT_DEFAULT:
        print(f"Port {PORT_DEFAULT} is in use, so the API listens on {port}.", file=sys.stderr)
    return port


def make_keyring() -> str:
    """A keyring of one random key."""
    return f"k1:{base64.b64encode(secrets.token_bytes(32)).decode()}"


def schema_fingerprint() -> str:
    """Changes with any file that says what the schema is: a warm start need not import alembic to see that none did."""
    package = Path(__file__).parent
    files = sorted([*(package / "ledger").rglob("*.py"), *(package.parent / "alembic").rglob("*.py")])
    seen = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(repr(seen).encode()).hexdigest()


def _reachable_host(host: str) -> str:
    """Where a client on this machine reaches a server that is bound to `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - read, not bound


def _check_ready_file(path: Path | None) -> None:
    """A file of an earlier run would be believed: away with it before anything else."""
    if path is None:
        return
    try:
        path.unlink(missing_ok=True)
        if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            raise StartError(f"The ready file {path} cannot be written: its folder is not there or not writable.")
    except OSError as error:
        raise StartError(f"The ready file {path} cannot be written: {error.strerror}.") from None
