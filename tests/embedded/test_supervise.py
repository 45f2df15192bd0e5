"""Supervision by itself: pauses that grow and start over, layers that stop in order, sentences for mistakes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import structlog

from service.errors import StartError
from service.supervise import Signals, Supervisor, how_it_ended


@dataclass
class FakePart:
    """A part whose life is in the test's hands."""

    name: str
    history: list[str]
    grace_seconds: float = 0.0
    pid: int | None = None
    exit_code: int | None = None
    stubborn: bool = False
    refusals: list[str] = field(default_factory=list)

    def start(self) -> None:
        if self.refusals:
            raise StartError(self.refusals.pop())
        self.history.append(f"start {self.name}")
        self.pid, self.exit_code = 1_000 + len(self.history), None

    def die(self, exit_code: int = -9) -> None:
        self.pid, self.exit_code = None, exit_code

    def ask_to_stop(self) -> None:
        self.history.append(f"ask {self.name}")
        if not self.stubborn:
            self.die(0)

    def kill(self) -> None:
        self.history.append(f"kill {self.name}")
        self.die()

    def stop(self) -> None:
        self.history.append(f"gone {self.name}")


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def history() -> list[str]:
    return []


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    before = structlog.get_config()
    yield
    structlog.configure(**before)
    structlog.contextvars.clear_contextvars()


def make_supervisor(parts: list[FakePart], clock: Clock, started: list[str] | None = None) -> Supervisor:
    noted = [] if started is None else started
    return Supervisor(
        [parts],
        on_start=lambda part: noted.append(part.name),
        log_format="json",
        log_level="error",
        monotonic=clock,
    )


def pauses(supervisor: Supervisor, part: FakePart, clock: Clock, deaths: int) -> list[float]:
    """The pause before each restart of a part that dies as soon as it is up."""
    seen = []
    for _ in range(deaths):
        part.die()
        died_at = clock.seconds
        pause = supervisor.check()
        while part.pid is None:
            clock.seconds += pause
            pause = supervisor.check()
        seen.append(round(clock.seconds - died_at, 3))
    return seen


def test_pauses_double_up_to_ten_seconds_while_a_part_keeps_dying(history: list[str], clock: Clock) -> None:
    part = FakePart("worker", history)
    supervisor = make_supervisor([part], clock)
    supervisor.start(part)

    assert pauses(supervisor, part, clock, 8) == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]


def test_a_part_that_ran_well_for_half_a_minute_is_restarted_quickly_again(history: list[str], clock: Clock) -> None:
    part = FakePart("worker", history)
    supervisor = make_supervisor([part], clock)
    supervisor.start(part)
    pauses(supervisor, part, clock, 4)

    clock.seconds += 30

    assert pauses(supervisor, part, clock, 1) == [0.2]


def test_whoever_asked_is_told_of_every_restart_but_not_of_the_first_start(history: list[str], clock: Clock) -> None:
    part, started = FakePart("worker", history), list[str]()
    supervisor = make_supervisor([part], clock, started)
    supervisor.start(part)
    assert started == []

    pauses(supervisor, part, clock, 2)

    assert started == ["worker", "worker"]


def test_a_part_that_cannot_start_yet_is_tried_again(history: list[str], clock: Clock) -> None:
    part = FakePart("postgres", history)
    supervisor = make_supervisor([part], clock)
    supervisor.start(part)
    part.refusals = ["no space", "no space"]
    part.die()

    for _ in range(10):
        clock.seconds += supervisor.check()

    assert part.pid is not None


def test_the_death_of_one_part_does_not_touch_another(history: list[str], clock: Clock) -> None:
    parts = [FakePart("api", history), FakePart("worker", history)]
    supervisor = make_supervisor(parts, clock)
    for part in parts:
        supervisor.start(part)
    pid = parts[0].pid

    pauses(supervisor, parts[1], clock, 3)

    assert parts[0].pid == pid


def test_layers_stop_in_the_reverse_order_and_each_wholly_before_the_next(history: list[str], clock: Clock) -> None:
    postgres, api, worker = (FakePart(name, history) for name in ("postgres", "api", "worker"))
    supervisor = Supervisor(
        [[postgres], [api, worker]], on_start=lambda _: None, log_format="json", log_level="error", monotonic=clock
    )
    for part in (postgres, api, worker):
        supervisor.start(part)
    history.clear()

    with Signals() as signals:
        supervisor.stop(signals)

    assert history == ["ask api", "ask worker", "gone api", "gone worker", "ask postgres", "gone postgres"]


def test_a_second_request_to_stop_ends_the_patience(history: list[str], clock: Clock) -> None:
    part = FakePart("worker", history, grace_seconds=1_000_000, stubborn=True)
    supervisor = make_supervisor([part], clock)
    supervisor.start(part)

    with Signals() as signals:
        part.ask_to_stop = lambda: os.kill(os.getpid(), signal.SIGINT)  # type: ignore[method-assign]
        supervisor.stop(signals)
        assert signals.stop_requests == 1

    assert history[-2:] == ["kill worker", "gone worker"]


def test_a_part_that_outstays_its_grace_is_killed(history: list[str], clock: Clock) -> None:
    part = FakePart("worker", history, grace_seconds=-1.0, stubborn=True)
    supervisor = make_supervisor([part], clock)
    supervisor.start(part)

    with Signals() as signals:
        supervisor.stop(signals)

    assert history[-2:] == ["kill worker", "gone worker"]


def test_a_signal_ends_a_wait_at_once_and_is_counted() -> None:
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        signals.wait(3_600)
        assert signals.stop_requests == 1


def test_the_handlers_of_before_are_back_afterwards() -> None:
    before = signal.getsignal(signal.SIGINT)
    with Signals():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before


@pytest.mark.parametrize(
    ("exit_code", "words"),
    [(0, "exit code 0"), (1, "exit code 1"), (-9, "killed by SIGKILL"), (-15, "killed by SIGTERM"), (-63, "killed by")],
)
def test_how_a_process_ended_is_said_in_words(exit_code: int, words: str) -> None:
    assert how_it_ended(exit_code).startswith(words)
