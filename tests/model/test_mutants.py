"""The proof that the simulation can fail: take one guard from the model, and a run is rejected before long."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import pytest

from service.domain.delivery import TERMINAL, State, Transition
from service.ledger.accepting import NewDelivery
from service.ledger.attempting import Settlement
from tests.model.ledger import ModelLedger
from tests.model.receivers import destinations
from tests.model.rows import T0, Claim, Delivery
from tests.model.simulation import Simulation

SEEDS_MAX: Final = 500  # of which one must be rejected


class WithoutTheFence(ModelLedger):
    """Whoever settles, settles the attempt under way, whatever its number."""

    def _is_held(self, delivery: Delivery, number: int) -> bool:
        return delivery.state is State.DELIVERING


class WithoutCommittedIntent(ModelLedger):
    """A claim is known to its worker alone until it is settled."""

    def _claim(self, delivery: Delivery, worker: str) -> Claim:
        return super()._claim(replace(delivery), worker)

    def _is_held(self, delivery: Delivery, number: int) -> bool:
        return delivery.state is State.PENDING and delivery.attempt_count == number - 1

    def _decide(self, delivery: Delivery, settlement: Settlement) -> None:
        super()._claim(delivery, settlement.worker or "")
        super()._decide(delivery, settlement)


class WithoutIdentity(ModelLedger):
    """An event may come twice under two keys."""

    def _take_identity(self, new: NewDelivery) -> bool:
        self.identities[new.destination_id, new.event_id] = new
        return True


class WithoutAnEnd(ModelLedger):
    """A terminal state is left like any other."""

    def _may(self, delivery: Delivery, transition: Transition) -> bool:
        return delivery.state in TERMINAL or super()._may(delivery, transition)


class WithoutDueTimes(ModelLedger):
    """A claim does not look at the clock."""

    def _is_due(self, delivery: Delivery) -> bool:
        return True


class WithoutRescue(ModelLedger):
    """Nobody looks for the claims of the lost."""

    def _is_lost(self, delivery: Delivery, stale_at: object) -> bool:
        return False


@pytest.mark.parametrize(
    ("mutant", "invariants"),
    [
        (WithoutTheFence, {"I7"}),
        (WithoutCommittedIntent, {"I3"}),
        (WithoutIdentity, {"I2"}),
        (WithoutAnEnd, {"I6"}),
        (WithoutDueTimes, {"I9"}),
        (WithoutRescue, {"I10"}),
    ],
)
def test_without_a_guard_a_run_is_rejected(mutant: type[ModelLedger], invariants: set[str]) -> None:
    found: set[str] = set()
    for seed in range(SEEDS_MAX):
        found |= {violation.invariant for violation in Simulation(seed, mutant(T0, destinations())).run()}
        if invariants <= found:
            return
    pytest.fail(f"in {SEEDS_MAX} seeds: {sorted(found)}")
