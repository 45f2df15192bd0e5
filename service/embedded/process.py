"""One child process: started so that it dies with us, watched, stopped, and found again when we crashed.

The rule: no child survives its parent. Linux gives each child a death signal (`launch.py`); a pid
file beside it lets the next start end what a system without death signals left over.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from service.embedded import launch
from service.errors import StartError

POLL_SECONDS = 0.005
STALE_GRACE_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Account:
    """The user and group that a child runs as."""

    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class StopStep:
    """A signal, and how long it may take to work before the next step."""

    signal: signal.Signals
    seconds: float


class Child:
    """A named child process, one at a time. To be started from the main thread only.

    The kernel sends the death signal when the *thread* that forked ends, so a child started from
    a pool's thread would die with that thread, long before the process.
    """

    def __init__(
        self,
        name: str,
        *,
        death_signal: signal.Signals,
        stop_steps: Sequence[StopStep],
        pid_file: Path | None = None,
        log_file: Path | None = None,
    ) -> None:
        self.name = name
        self._death_signal = death_signal
        self._stop_steps = stop_steps
        self._pid_file = pid_file
        self._log_file = log_file
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The pid while the process runs."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    @property
    def exit_code(self) -> int | None:
        """How the last process ended; None while it runs, and before the first start."""
        return self._process.poll() if self._process is not None else None

    def start(
        self,
        program: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        account: Account | None = None,
        folder: Path | None = None,
        stdin: bytes = b"",
    ) -> None:
        """Start `program` (its first word an absolute path) in a session of its own; an earlier one is ended first."""
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("a child is started from the main thread only: its life hangs on the thread's")
        self.stop()
        output = _open_log(self._log_file) if self._log_file is not None else None
        try:
            self._process = subprocess.Popen(  # noqa: S603 - the programs are our own
                launch_line(program, self._death_signal, account),
                stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                cwd=folder,
                start_new_session=True,  # a terminal's Ctrl-C is for us to pass on, in our order
            )
        except OSError as error:
            raise StartError(f"{self.name} could not be started: {error.strerror}.") from error
        finally:
            if output is not None:
                os.close(output)
        if stdin and self._process.stdin is not None:
            _feed(self._process.stdin, stdin)
        if self._pid_file is not None:
            _write_pid_file(self._pid_file, self._process.pid)

    def ask_to_stop(self) -> None:
        """Send the first stop signal and return at once."""
        if self.pid is not None and self._process is not None:
            self._process.send_signal(self._stop_steps[0].signal)

    def kill(self) -> None:
        """End the process now, without its consent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        """Ask, wait, insist, until the process is gone and reaped."""
        if self._process is None:
            return
        for step in (*self._stop_steps, StopStep(signal.SIGKILL, 30.0)):
            if self._process.poll() is not None:
                break
            self._process.send_signal(step.signal)
            try:
                self._process.wait(step.seconds)
            except subprocess.TimeoutExpired:
                continue
        if self._pid_file is not None:
            self._pid_file.unlink(missing_ok=True)

    def stop_stale(self) -> None:
        """End the process that an earlier run of ours left behind, and wait until it has gone.

        On Linux it is going already: the parent was killed and its death signal is being obeyed.
        """
        pid = _read_pid_file(self._pid_file) if self._pid_file is not None else None
        if pid is None or self._pid_file is None:
            return
        _signal(pid, self._stop_steps[0].signal)
        give_up_at = time.monotonic() + STALE_GRACE_SECONDS
        while _read_pid_file(self._pid_file) is not None:
            if time.monotonic() > give_up_at:
                _signal(pid, signal.SIGKILL)
            time.sleep(POLL_SECONDS)
        self._pid_file.unlink(missing_ok=True)


def run_to_end(program: Sequence[str], *, account: Account | None, stdin: bytes = b"", folder: Path) -> str:
    """Run a short program under the same rules and return its output. Raises CalledProcessError."""
    line = launch_line(program, signal.SIGKILL, account)
    done = subprocess.run(  # noqa: S603 - the programs are our own
        line, input=stdin, capture_output=True, cwd=folder, check=False, start_new_session=True
    )
    output = (done.stdout + done.stderr).decode(errors="replace")
    if done.returncode != 0:
        raise subprocess.CalledProcessError(done.returncode, program[0], output)
    return output


def launch_line(program: Sequence[str], death_signal: signal.Signals, account: Account | None) -> list[str]:
    """The command that becomes `program` by way of `launch.py`."""
    uid, gid = (account.uid, account.gid) if account is not None else (-1, -1)
    words = (os.getpid(), int(death_signal), uid, gid)
    return [sys.executable, "-I", "-S", launch.__file__, *(str(word) for word in words), *program]


def account_for_servers(owner_of: Path) -> Account | None:
    """Who the servers run as: ourselves, or, as root (PostgreSQL refuses root), an unprivileged user.

    That is the owner of `owner_of` when it exists already, so that data made as an ordinary user
    stays usable with sudo, and `nobody` otherwise.
    """
    if os.geteuid() != 0:
        return None
    try:
        status = owner_of.stat()
    except FileNotFoundError:
        status = None
    if status is not None and status.st_uid != 0:
        return Account(status.st_uid, status.st_gid)
    try:
        nobody = pwd.getpwnam("nobody")
    except KeyError:
        raise StartError(
            "This process runs as root, which PostgreSQL refuses, and there is no user `nobody` to run it as: "
            "start as an ordinary user, or set DATABASE_URL and REDIS_URL to servers of your own."
        ) from None
    return Account(nobody.pw_uid, nobody.pw_gid)


def command_line(pid: int) -> str:
    """The command line of a running process, empty when there is none."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "" if Path("/proc/self").exists() else _ask_ps(pid, "command=")


def _identity(pid: int) -> str:
    """What tells a process from a later one with the same number: the instant it began. Empty: none runs."""
    try:
        # The name in brackets may hold blanks and brackets; the fields are counted from behind it.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return "" if Path("/proc/self").exists() else _ask_ps(pid, "lstart=")
    return "" if fields[0] in ("Z", "X") else fields[19]


def _ask_ps(pid: int, column: str) -> str:
    line = ["ps", "-o", column, "-p", str(pid)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)  # noqa: S603 - a number for a word
    return done.stdout.strip()


def _write_pid_file(path: Path, pid: int) -> None:
    path.unlink(missing_ok=True)  # one that root left could be removed by us, but not written
    path.write_text(f"{pid} {_identity(pid)}\n")


def _read_pid_file(path: Path) -> int | None:
    """The pid in the file, if that very process still runs."""
    try:
        pid, _, identity = path.read_text().strip().partition(" ")
        alive = identity != "" and _identity(int(pid)) == identity
    except (FileNotFoundError, ValueError):
        return None
    return int(pid) if alive else None


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it went by itself, which is what we want
        os.kill(pid, number)


def _open_log(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def _feed(pipe: IO[bytes], data: bytes) -> None:
    """Write what the child reads first. Small enough for the pipe, so it cannot block."""
    with contextlib.suppress(BrokenPipeError):  # it died before reading; its exit code says so
        pipe.write(data)
        pipe.close()
