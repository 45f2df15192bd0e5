"""The model is the product: after each step the same answers and the same rows as the real SQL on a real Postgres."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from service.domain.delivery import Transition
from tests.model.machine import Answered, LedgerMachine
from tests.model.postgres import PostgresLedger
from tests.model.receivers import destinations
from tests.model.rows import T0, Statements
from tests.model.simulation import Simulation

SEEDS: Final = (12, 20)


class ConformanceMachine(LedgerMachine):
    """The rules on both: what one answers the other answers, and what one holds the other holds."""

    product: PostgresLedger

    def __init__(self) -> None:
        super().__init__()
        self.product.begin(T0, destinations())

    def _do(self, operation: Callable[[Statements], Answered]) -> Answered:
        answer = super()._do(operation)
        assert operation(self.product) == answer
        assert self.product.snapshot() == self.model.snapshot()
        return answer


class ConformingSimulation(Simulation):
    """A simulated run, each of whose statements is carried out on both."""

    def __init__(self, seed: int, product: PostgresLedger) -> None:
        super().__init__(seed, crowd=15)
        self.product = product
        product.begin(T0, destinations())

    def _do(self, operation: Callable[[Statements], Answered]) -> Answered:
        self.product.set_clock(self.model.now)
        answer = super()._do(operation)
        assert operation(self.product) == answer
        assert self.product.snapshot() == self.model.snapshot()
        return answer


@pytest.fixture
def product(database_url: str) -> Iterator[PostgresLedger]:
    opened = PostgresLedger(database_url)
    yield opened
    opened.close()


@pytest.mark.slow
def test_simulated_runs_are_the_same_on_postgres(product: PostgresLedger) -> None:
    taken: Counter[Transition] = Counter()
    for seed in SEEDS:
        simulation = ConformingSimulation(seed, product)
        assert simulation.run() == [], f"seed {seed}"
        taken += simulation.model.taken
    assert set(taken) == set(Transition), "these seeds come through every transition; choose others when they do not"


@pytest.mark.slow
def test_the_model_answers_and_holds_what_postgres_does(product: PostgresLedger) -> None:
    class OnThisDatabase(ConformanceMachine):
        pass

    OnThisDatabase.product = product
    run_state_machine_as_test(
        OnThisDatabase,
        settings=settings(
            max_examples=12,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],  # it is a database's speed
        ),
    )
