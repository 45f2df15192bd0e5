"""Crash points: where a test makes a role end, or stand still, between two steps of what it does.

    python -m tests.faults.crash_points --at worker.after-claim [--nth 3] [--deed kill|stop|note] worker

This wraps a seam of the product, and then runs the ordinary command line in the same process. When the
seam is reached for the nth time the process sends itself a SIGKILL or a SIGSTOP, with no chance to
tidy up; `note` only says so on stderr, each time.

The rule this module keeps: a crash point exists nowhere but here. The product knows none, no setting
and no variable switches one on, and this module is no part of what is installed: in production there is
nothing to switch on. A seam that was renamed fails loudly when it is wrapped, and
`test_every_crash_point_is_reached_by_an_ordinary_run` fails when one is no longer passed.
"""

from __future__ import annotations

import argparse
import functools
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, Final


class Point(StrEnum):
    """Between which two steps."""

    # the API
    ACCEPT_BEFORE_COMMIT = "accept.before-commit"
    ACCEPT_BEFORE_HINT = "accept.before-hint"  # committed
    ACCEPT_BEFORE_ANSWER = "accept.before-answer"  # committed and hinted
    REDRIVE_BEFORE_ANSWER = "redrive.before-answer"  # committed
    # a worker
    WORKER_BEFORE_CLAIM = "worker.before-claim"  # a job is taken
    WORKER_AFTER_CLAIM = "worker.after-claim"  # committed
    WORKER_BEFORE_CONNECT = "worker.before-connect"  # the claim was found to be young
    WORKER_IN_REQUEST = "worker.in-request"  # half of its bytes are written
    WORKER_AFTER_ANSWER = "worker.after-answer"  # read, and not settled
    WORKER_AFTER_SETTLE = "worker.after-settle"  # committed
    WORKER_BEFORE_ACK = "worker.before-ack"
    # a dispatcher
    DISPATCH_BEFORE_HINT = "dispatch.before-hint"  # due rows are taken
    DISPATCH_BEFORE_RESCUE = "dispatch.before-rescue"  # lost claims are read
    REDRIVE_BEFORE_COMMIT = "redrive.before-commit"  # a step is done and not committed
    REDRIVE_BEFORE_HINT = "redrive.before-hint"  # a step is committed


class Deed(StrEnum):
    """What the process does to itself."""

    KILL = "kill"
    STOP = "stop"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Crash:
    """A deed of a process at the nth time that it comes to a point."""

    at: Point
    nth: int = 1
    deed: Deed = Deed.KILL


def command(crashes: tuple[Crash, ...], role: str) -> list[str]:
    """The command line of a role with crash points; it needs the repository in PYTHONPATH."""
    assert len({(crash.nth, crash.deed) for crash in crashes}) == 1, "one deed for all"
    points = [word for crash in crashes for word in ("--at", crash.at.value)]
    deed = ["--nth", str(crashes[0].nth), "--deed", crashes[0].deed.value]
    return [sys.executable, "-P", "-m", "tests.faults.crash_points", *points, *deed, role]


def noted(point: Point) -> str:
    """What a process says at a point when it only notes it."""
    return f"crash point {point.value}"


class Strike:
    """Counts how often a point is reached, and does the deed."""

    def __init__(self, crash: Crash) -> None:
        self._crash = crash
        self._count = 0

    def __call__(self, first: Callable[[], object] | None = None) -> None:
        """The point is reached. `first` is done just before the deed, if there is one to do."""
        self._count += 1
        if self._crash.deed is Deed.NOTE:
            print(noted(self._crash.at), file=sys.stderr, flush=True)
            return
        if self._count != self._crash.nth:
            return
        if first is not None:
            first()
        os.kill(os.getpid(), signal.SIGKILL if self._crash.deed is Deed.KILL else signal.SIGSTOP)


def _always(_: Any) -> bool:
    return True


def _before(owner: Any, name: str, strike: Strike) -> None:
    """Strike when the function is called."""
    inner: Callable[..., Awaitable[Any]] = getattr(owner, name)

    @functools.wraps(inner)
    async def wrapped(*arguments: Any, **named: Any) -> Any:
        strike()
        return await inner(*arguments, **named)

    setattr(owner, name, wrapped)


def _after(owner: Any, name: str, strike: Strike, when: Callable[[Any], object] = _always) -> None:
    """Strike when the function has returned something that counts."""
    inner: Callable[..., Awaitable[Any]] = getattr(owner, name)

    @functools.wraps(inner)
    async def wrapped(*arguments: Any, **named: Any) -> Any:
        result = await inner(*arguments, **named)
        if when(result):
            strike()
        return result

    setattr(owner, name, wrapped)


def _after_the_hint(strike: Strike) -> None:
    """The hint is a task of its own, so it is waited for here before the answer goes out."""
    from service.accept import Accepted, Intake

    inner = Intake.accept

    @functools.wraps(inner)
    async def wrapped(intake: Intake, *arguments: Any) -> Any:
        answer = await inner(intake, *arguments)
        if isinstance(answer, Accepted):
            await intake._hints.drain()
            strike()
        return answer

    setattr(Intake, "accept", wrapped)  # noqa: B010 - mypy forbids to assign a method


def _in_the_request(strike: Strike) -> None:
    """Half of the bytes go to the kernel, and none of the rest."""
    from service.egress.connection import Connection

    inner = Connection.exchange

    @functools.wraps(inner)
    async def wrapped(connection: Connection, head: bytes, body: bytes, deadline: float) -> Any:
        def write_half() -> None:
            assert connection._transport is not None
            half = (head + body)[: (len(head) + len(body)) // 2]
            os.write(connection._transport.get_extra_info("socket").fileno(), half)

        strike(first=write_half)
        return await inner(connection, head, body, deadline)

    setattr(Connection, "exchange", wrapped)  # noqa: B010 - mypy forbids to assign a method


def wrap(point: Point, strike: Strike) -> None:
    """Wrap the seam of a point. What a role does not use may be wrapped too, and is never reached."""
    from service import redrive
    from service.deliver import Deliverer
    from service.egress.sender import HttpSender
    from service.ledger import accepting, attempting, dispatching, redrives

    seams: dict[Point, Callable[[Strike], None]] = {
        Point.ACCEPT_BEFORE_COMMIT: partial(_before, accepting, "insert_new"),
        Point.ACCEPT_BEFORE_HINT: partial(_after, accepting, "insert_new", when=lambda written: written.deliveries),
        Point.ACCEPT_BEFORE_ANSWER: _after_the_hint,
        Point.REDRIVE_BEFORE_ANSWER: partial(_after, redrives, "start", when=bool),
        Point.WORKER_BEFORE_CLAIM: partial(_before, attempting, "claim"),
        Point.WORKER_AFTER_CLAIM: partial(_after, attempting, "claim", when=bool),
        Point.WORKER_BEFORE_CONNECT: partial(_before, HttpSender, "send"),
        Point.WORKER_IN_REQUEST: _in_the_request,
        Point.WORKER_AFTER_ANSWER: partial(_after, HttpSender, "send"),
        Point.WORKER_AFTER_SETTLE: partial(_after, attempting, "settle", when=bool),
        Point.WORKER_BEFORE_ACK: partial(_after, Deliverer, "deliver"),
        Point.DISPATCH_BEFORE_HINT: partial(_after, dispatching, "take_due", when=lambda due: due.to_hint),
        Point.DISPATCH_BEFORE_RESCUE: partial(_after, dispatching, "find_lost", when=bool),
        Point.REDRIVE_BEFORE_COMMIT: partial(_after, redrives, "stepped"),
        Point.REDRIVE_BEFORE_HINT: partial(_after, redrive, "_advance", when=lambda advanced: advanced is not None),
    }
    seams[point](strike)


_ROLES: Final = ("api", "worker", "dispatcher")


def main() -> None:
    """Wrap, and run the role as `hookledger` does."""
    parser = argparse.ArgumentParser(description="Run a role with crash points. For tests alone.")
    parser.add_argument("--at", action="append", required=True, type=Point, choices=list(Point))
    parser.add_argument("--nth", type=int, default=1)
    parser.add_argument("--deed", type=Deed, choices=list(Deed), default=Deed.KILL)
    parser.add_argument("role", choices=_ROLES)
    given = parser.parse_args()
    for point in given.at:
        wrap(point, Strike(Crash(point, given.nth, given.deed)))
    from service import cli

    sys.argv = ["hookledger", given.role]
    cli.main()


if __name__ == "__main__":
    main()
