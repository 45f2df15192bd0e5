"""Keeps processes running: what dies is started again after a pause that grows while it keeps dying.

The rule: everything happens in one thread, in one loop that sleeps until a child ends, a signal
comes or a restart is due. Stopping goes layer by layer in the reverse order of starting, so that
no role outlives the servers it writes to.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Final, Protocol, Self

from service.embedded.process import Child, StopStep
from service.errors import StartError

BACKOFF_FIRST_SECONDS: Final = 0.2
BACKOFF_MAX_SECONDS: Final = 10.0
HEALTHY_SECONDS: Final = 30.0  # whoever ran this long starts over with the shortest pause
LOOP_SECONDS: Final = 5.0  # the loop's longest sleep, should a wake-up ever be lost
# Log events, beside those of `telemetry.events`, which is not imported until there is something to say.
ENDED: Final = "process.ended"
RESTARTED: Final = "process.restarted"
NOT_STARTED: Final = "process.not_started"
STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Part(Protocol):
    """What is kept running: a role, or an embedded server."""

    @property
    def name(self) -> str:
        """What logs call it."""
        ...

    @property
    def pid(self) -> int | None:
        """The process, while it runs."""
        ...

    @property
    def exit_code(self) -> int | None:
        """How it ended; None while it runs."""
        ...

    @property
    def grace_seconds(self) -> float:
        """How long it may take to stop when asked to."""
        ...

    def start(self) -> object:
        """Start it, and return when that much is done. Raises StartError."""
        ...

    def ask_to_stop(self) -> None:
        """Begin to stop and return at once."""
        ...

    def kill(self) -> None:
        """End it now."""
        ...

    def stop(self) -> None:
        """End it, with force if need be, and return when it is gone."""
        ...


class Role:
    """One role of the service as a child process: this same program with another command."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        grace_seconds: float,
        death_signal: signal.Signals,
        pid_file: Path | None = None,
    ) -> None:
        self.name = name
        self.environment = environment
        self.grace_seconds = grace_seconds
        self._command = command
        self._child = Child(
            name,
            death_signal=death_signal,
            stop_steps=(StopStep(signal.SIGTERM, grace_seconds),),
            pid_file=pid_file,
        )

    @property
    def pid(self) -> int | None:
        """The process, while it runs."""
        return self._child.pid

    @property
    def exit_code(self) -> int | None:
        """How it ended; None while it runs."""
        return self._child.exit_code

    def start(self) -> None:
        """Start the process. Whether it is of use shows later."""
        self._child.stop_stale()
        # -P: a folder `service` where the user happens to be must not be taken for ours.
        self._child.start([sys.executable, "-P", "-m", "service.cli", *self._command], environment=self.environment)

    def ask_to_stop(self) -> None:
        """SIGTERM: finish what is under way."""
        self._child.ask_to_stop()

    def kill(self) -> None:
        """SIGKILL."""
        self._child.kill()

    def stop(self) -> None:
        """SIGTERM, and SIGKILL after the grace."""
        self._child.stop()


class Signals:
    """Notes requests to stop instead of being interrupted by them, and wakes the loop for them and for children."""

    def __init__(self) -> None:
        self.stop_requests = 0
        self._before: dict[signal.Signals, Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> Self:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # nohup: stay when the terminal goes
            self._before[number] = signal.signal(number, self._note_stop)
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._reader.close()
        self._writer.close()

    def wait(self, seconds: float) -> None:
        """Sleep until a signal comes, a child ends or the time is over."""
        select.select([self._reader], [], [], max(seconds, 0.0))
        with contextlib.suppress(BlockingIOError):  # the time was over
            self._reader.recv(4096)

    def _note_stop(self, number: int, frame: FrameType | None) -> None:
        self.stop_requests += 1


@dataclass(slots=True)
class _Watch:
    """What is known of one part."""

    part: Part
    pid: int | None = None
    started_at: float = 0.0
    pause_seconds: float = BACKOFF_FIRST_SECONDS
    due_at: float | None = None  # when it is to be started again; None while it runs


class Supervisor:
    """Keeps the parts of all layers running. `on_start` is called whenever a part has a new pid."""

    def __init__(
        self,
        layers: Sequence[Sequence[Part]],
        on_start: Callable[[Part], None],
        *,
        log_format: str,
        log_level: str,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._layers = layers
        self._monotonic = monotonic
        self._on_start = on_start
        self._log_format = log_format
        self._log_level = log_level
        self._log_is_set_up = False
        self._watches: list[_Watch] = []

    def start(self, part: Part) -> None:
        """Start a part for the first time and keep it running from now on. Raises StartError."""
        part.start()
        self._watches.append(_Watch(part, part.pid, self._monotonic()))

    def check(self) -> float:
        """Notice what has died, start what is due, and say for how many seconds nothing more is."""
        now = self._monotonic()
        for watch in self._watches:
            if watch.due_at is None and watch.part.pid is None:
                self._note_death(watch, now)
            if watch.due_at is not None and watch.due_at <= now:
                self._start_again(watch)
        _reap_strangers([watch.part for watch in self._watches])
        due = [watch.due_at - now for watch in self._watches if watch.due_at is not None]
        return max(0.0, min([LOOP_SECONDS, *due]))

    def run(self, signals: Signals) -> None:
        """Keep everything running until somebody asks to stop."""
        while not signals.stop_requests:
            signals.wait(self.check())

    def stop(self, signals: Signals) -> None:
        """Stop everything, the last layer first. A further request to stop ends the patience with it."""
        requests = signals.stop_requests
        for layer in reversed(self._layers):
            parts = [watch.part for watch in self._watches if watch.part in layer]
            for part in parts:
                part.ask_to_stop()
            give_up_at = self._monotonic() + max((part.grace_seconds for part in parts), default=0.0)
            while any(part.pid is not None for part in parts):
                if signals.stop_requests > requests or self._monotonic() > give_up_at:
                    for part in parts:
                        part.kill()
                signals.wait(0.1)
            for part in parts:
                part.stop()

    def _note_death(self, watch: _Watch, now: float) -> None:
        if now - watch.started_at >= HEALTHY_SECONDS:
            watch.pause_seconds = BACKOFF_FIRST_SECONDS
        watch.due_at = now + watch.pause_seconds
        self._log().warning(
            ENDED,
            process=watch.part.name,
            pid=watch.pid,
            ended=how_it_ended(watch.part.exit_code),
            restart_in_seconds=watch.pause_seconds,
        )
        watch.pause_seconds = min(2 * watch.pause_seconds, BACKOFF_MAX_SECONDS)

    def _start_again(self, watch: _Watch) -> None:
        try:
            watch.part.start()
        except StartError as error:
            watch.due_at = self._monotonic() + watch.pause_seconds
            self._log().error(
                NOT_STARTED,
                process=watch.part.name,
                reason=str(error),
                restart_in_seconds=watch.pause_seconds,
            )
            watch.pause_seconds = min(2 * watch.pause_seconds, BACKOFF_MAX_SECONDS)
            return
        watch.pid, watch.started_at, watch.due_at = watch.part.pid, self._monotonic(), None
        self._log().info(RESTARTED, process=watch.part.name, pid=watch.pid)
        self._on_start(watch.part)

    def _log(self) -> Any:
        """Made with the first thing to say: a start in which nothing dies is the quicker for it."""
        from service.telemetry import logging  # noqa: PLC0415 - see above

        if not self._log_is_set_up:
            logging.configure("supervisor", log_format=self._log_format, log_level=self._log_level)
            self._log_is_set_up = True
        return logging.log


def gave_up(roles: Iterable[Role]) -> bool:
    """Whether one of the roles ended by itself with an error, which it has told the operator of."""
    return any(role.exit_code is not None and role.exit_code > 0 for role in roles)


def how_it_ended(exit_code: int | None) -> str:
    """An exit code in words."""
    if exit_code is None or exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"


def _reap_strangers(parts: Sequence[Part]) -> None:
    """As the first process of a container we inherit orphans (the backends of a killed Postgres): bury them."""
    if os.getpid() != 1:
        return
    ours = {part.pid for part in parts}
    with contextlib.suppress(ChildProcessError):  # no children at all
        # Look first, without reaping: how one of ours ended is for its part to learn.
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid not in ours:
            os.waitpid(ended.si_pid, 0)
