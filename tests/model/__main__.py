"""Simulated runs from the command line; 1 when one was rejected.

.venv/bin/python -m tests.model SEED             one seed, told step by step
.venv/bin/python -m tests.model FIRST COUNT      many, silent but for the rejected
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tests.model.simulation import Simulation


def rejected(seeds: Sequence[int]) -> list[str]:
    """One line for each violation in the runs of these seeds."""
    return [f"seed {seed}: {violation}" for seed in seeds for violation in Simulation(seed).run()]


def main(arguments: Sequence[str]) -> int:
    """Run what the command line asks for."""
    first, *counts = map(int, arguments)
    if counts:
        found = rejected(range(first, first + counts[0]))
    else:
        found = [str(violation) for violation in Simulation(first, told=print).run()]
    print("\n".join(found) or "accepted")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
