"""Whatever happens to the model in whatever order, I1 to I9 hold after every step."""

from __future__ import annotations

import pytest
from hypothesis import settings

from tests.model.machine import LedgerMachine

TestLedger = pytest.mark.slow(LedgerMachine.TestCase)
TestLedger.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
