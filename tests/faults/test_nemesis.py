"""A random run, judged. `NEMESIS_SECONDS`, `NEMESIS_DELIVERIES` and `NEMESIS_SEED` make a longer or another one."""

from __future__ import annotations

import os
import random

import pytest

from tests.faults import nemesis
from tests.faults.harness import Stack, assert_accepted
from tests.faults.history import judge

SECONDS = float(os.environ.get("NEMESIS_SECONDS", "25"))
DELIVERIES = int(os.environ.get("NEMESIS_DELIVERIES", "600"))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(SECONDS + 180)]


async def test_random_kills_lose_nothing_and_every_repetition_is_explained(stack: Stack) -> None:
    seed = int(os.environ.get("NEMESIS_SEED") or random.SystemRandom().randrange(10**6))
    report = await nemesis.run(stack, nemesis.Plan(seed, SECONDS, DELIVERIES))
    print(report)
    assert_accepted(judge(report.history))
    deliveries = report.history.deliveries
    assert len(deliveries) == DELIVERIES
    # A delivery that was under way at three kills in a row is poison, and nothing else may be dead.
    dead = await stack.fetch("SELECT dead_reason FROM deliveries WHERE state <> 'delivered'")
    assert {row["dead_reason"] for row in dead} <= {"poison"}
    assert all(process.exit_code in (None, -9) for process in stack.processes), "a process ended by itself"
