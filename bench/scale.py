"""How much of each scenario is run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes. The defaults make a whole run, in under ten minutes on two cores."""

    accept_seconds: float = 4.0
    connections: tuple[int, ...] = (1, 8, 64)
    payloads_bytes: tuple[int, ...] = (1_000, 20_000)
    batches: tuple[int, ...] = (100, 1_000)
    end_to_end_seconds: float = 60.0
    rates_per_second: tuple[int, ...] = (100, 300, 1_000)
    open_loop_seconds: float = 15.0
    idle_seconds: float = 10.0
    backlogs: tuple[int, ...] = (10_000, 100_000)
    destinations: int = 10_000
    finished_rows: tuple[int, ...] = (0, 1_000_000)
    growth_seconds: float = 20.0
    processes: tuple[tuple[int, int], ...] = ((1, 1), (1, 2), (2, 2), (2, 4))  # API, workers
    scaling_seconds: float = 8.0
    in_flight: int = 1_000
    waiting_rows: int = 1_000_000
    # Of the checks: what share a ratio may miss by, on a run so short that chance has a say.
    leniency: float = 1.0


SMOKE = Scale(
    accept_seconds=1.0,
    connections=(1, 8),
    payloads_bytes=(1_000,),
    batches=(100,),
    end_to_end_seconds=3.0,
    rates_per_second=(100,),
    open_loop_seconds=3.0,
    idle_seconds=1.0,
    backlogs=(1_000, 4_000),
    destinations=500,
    leniency=0.3,
)
