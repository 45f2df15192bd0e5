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
    plan = nemesis.Plan(seed, SECONDS, DELIVERIES)
    report = await nemesis.run(stack, plan)
    print(report)
    assert_accepted(judge(report.history))
    assert await nemesis.left_wrong(stack, plan, report) == []
