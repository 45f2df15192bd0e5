"""What is counted, and under which name."""

from __future__ import annotations

import pytest

from service.domain.delivery import Bury, Complete, DeadReason, Decision, Hold, Release, RetryAfter
from service.domain.outcome import Outcome
from service.domain.tally import ATTEMPTS, Tallied, ended_as


@pytest.mark.parametrize(
    ("decision", "name"),
    [
        (Complete(), Tallied.DELIVERED),
        (Bury(DeadReason.GONE), Tallied.DEAD),
        (RetryAfter(1.0), None),
        (Release(1.0), None),
        (Hold(), None),
    ],
)
def test_a_decision_is_counted_where_it_ends_the_delivery(decision: Decision, name: Tallied | None) -> None:
    assert ended_as(decision) is name


def test_every_outcome_has_a_name_of_its_own_and_every_such_name_is_an_outcomes() -> None:
    assert set(ATTEMPTS) == set(Outcome)
    assert set(ATTEMPTS.values()) == {name for name in Tallied if name.startswith("attempt_")}
