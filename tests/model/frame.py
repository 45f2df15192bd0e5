"""The frame of a simulated run: a clock that jumps, processes that are killed and paused, calls that fail.

The rule: each actor is a generator that yields how long it waits, in milliseconds; each yield is a point
at which its process may be killed, or paused to go on as a zombie. Every choice is drawn from one seed.
"""

from __future__ import annotations

import heapq
import itertools
import uuid
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from datetime import timedelta
from random import Random
from typing import Final, TypeVar

from service.domain.ids import uuid7
from service.errors import LedgerUnavailable
from tests.model.ledger import ModelLedger
from tests.model.rows import T0, Statements

Answered = TypeVar("Answered")
Steps = Generator[int, None, Answered]

_T0_MS: Final = int(T0.timestamp() * 1000)


@dataclass(slots=True, eq=False)
class Process:
    """What can be killed, or paused: then its steps are `frozen`. `holds` are the deliveries it attempts."""

    name: str
    alive: bool = True
    stopping: bool = False
    paused: bool = False
    frozen: list[Steps[None]] = field(default_factory=list)
    holds: list[uuid.UUID] = field(default_factory=list)


class Frame:
    """One thread of events in the order of their time. `told` is told each."""

    def __init__(self, seed: int, model: ModelLedger, told: Callable[[str], None] | None) -> None:
        self.model = model
        self._dice = Random(seed)
        self._told = told
        self._now_ms = 0
        self._events: list[tuple[int, int, Process, Steps[None]]] = []
        self._sequence = itertools.count()
        self._peace = False
        self._over = False
        self._network = Process("network")  # what is on its way belongs to nobody

    def _go_on(self) -> None:
        """Until it is over."""
        while not self._over:
            at_ms, _, process, steps = heapq.heappop(self._events)
            if not process.alive:
                continue
            if process.paused:
                process.frozen.append(steps)
                continue
            self._now_ms = at_ms
            self.model.now = T0 + timedelta(milliseconds=at_ms)
            wait_ms = next(steps, None)
            if wait_ms is not None:
                self._schedule(at_ms + wait_ms, process, steps)

    def _schedule(self, at_ms: int, process: Process, steps: Steps[None]) -> None:
        heapq.heappush(self._events, (at_ms, next(self._sequence), process, steps))

    def _spawn(self, process: Process, steps: Steps[None], after_ms: int = 0) -> None:
        self._schedule(self._now_ms + after_ms, process, steps)

    def _tell(self, line: str) -> None:
        if self._told is not None:
            self._told(f"{self._now_ms / 1000:7.3f}  {line}")

    def _do(self, operation: Callable[[Statements], Answered]) -> Answered:
        """A statement is carried out."""
        return operation(self.model)

    def _call(self, operation: Callable[[Statements], Answered]) -> Steps[Answered]:
        """A statement on its way: it may fail before it took effect, or after, or take effect much later."""
        yield self._wait(1, 30)
        if self._peace:
            return self._do(operation)
        roll = self._dice.random()
        if roll < 0.02:
            raise LedgerUnavailable("before it was carried out")
        if roll < 0.03:
            self._spawn(self._network, self._overdue(operation), self._wait(100, 20_000))
            raise LedgerUnavailable("while it is still on its way")
        answer = self._do(operation)
        if roll < 0.06:
            raise LedgerUnavailable("after it was carried out")
        return answer

    def _overdue(self, operation: Callable[[Statements], object]) -> Steps[None]:
        self._tell("a statement is carried out that nobody waits for any more")
        self._do(operation)
        yield from ()

    def _pause(self, process: Process, least_ms: int, below_ms: int) -> None:
        self._tell(f"{process.name} is paused")
        process.paused = True
        self._spawn(self._network, self._wake(process), self._wait(least_ms, below_ms))

    def _wake(self, process: Process) -> Steps[None]:
        if process.paused:
            self._tell(f"{process.name} goes on")
            process.paused = False
            frozen, process.frozen = process.frozen, []
            for steps in frozen:
                self._spawn(process, steps, self._wait(0, 10))
        yield from ()

    def _kill(self, process: Process) -> None:
        self._tell(f"{process.name} is killed")
        process.alive = False

    def _wait(self, least_ms: int, below_ms: int) -> int:
        """Some milliseconds; what `randrange` does, in a third of the time."""
        return least_ms + int(self._dice.random() * (below_ms - least_ms))

    def _jitter(self) -> float:
        return int(self._dice.random() * 32) / 32

    def _new_id(self) -> uuid.UUID:
        return uuid7(_T0_MS + self._now_ms, next(self._sequence))
