"""Ten thousand runs with everything going wrong, and each is accepted by the history checker.

A line of a failure begins with the seed; `.venv/bin/python -m tests.model SEED` tells that run.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import pytest

from service.domain.delivery import DeadReason, Transition
from service.domain.outcome import Outcome
from tests.model.__main__ import main, rejected
from tests.model.simulation import Simulation

SEEDS_COUNT: Final = 10_000
PART_SEEDS_COUNT: Final = 1_000


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, SEEDS_COUNT, PART_SEEDS_COUNT))
def test_nothing_is_lost_and_nothing_invented(first: int) -> None:
    assert rejected(range(first, first + PART_SEEDS_COUNT)) == []


@pytest.mark.slow
def test_the_runs_come_through_all_that_can_happen() -> None:
    taken: Counter[Transition] = Counter()
    outcomes: set[Outcome] = set()
    late_outcomes: set[Outcome | None] = set()
    dead_reasons: set[DeadReason | None] = set()
    for seed in range(300):
        simulation = Simulation(seed)
        simulation.run()
        taken += simulation.model.taken
        dead_reasons |= {row.dead_reason for row in simulation.model.deliveries.values()}
        attempts = [each for row in simulation.model.attempts.values() for each in row.values()]
        outcomes |= {each.outcome for each in attempts}
        late_outcomes |= {each.late_outcome for each in attempts}
    assert set(taken) == set(Transition)
    assert set(DeadReason) - dead_reasons == {DeadReason.BLOCKED}
    assert set(Outcome) - outcomes == {Outcome.BLOCKED, Outcome.REDIRECT}
    assert {Outcome.SUCCESS, Outcome.NOT_SENT, Outcome.UNKNOWN} <= late_outcomes


def test_a_seed_is_the_same_run_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["7"]) == 0
    told = capsys.readouterr().out
    assert main(["7"]) == 0
    assert capsys.readouterr().out == told
    assert "the receiver sees" in told
    assert told.endswith("accepted\n")
