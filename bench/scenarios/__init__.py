"""The scenarios, in the order in which they run. Each has `run(stand, scale)` and answers a Report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from bench.report import Report
from bench.scale import Scale
from bench.scenarios import (
    accept,
    batch,
    drain,
    end_to_end,
    growth,
    many_destinations,
    memory,
    open_loop,
    scaling,
)
from bench.stand import Stand

ALL: Final[dict[str, Callable[[Stand, Scale], Report]]] = {
    "accept": accept.run,
    "batch": batch.run,
    "end_to_end": end_to_end.run,
    "open_loop": open_loop.run,
    "drain": drain.run,
    "many_destinations": many_destinations.run,
    "growth": growth.run,
    "scaling": scaling.run,
    "memory": memory.run,
}
SMOKE: Final = ("accept", "batch", "end_to_end", "open_loop", "drain", "many_destinations")
