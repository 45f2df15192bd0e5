"""Latencies as a few figures and a curve."""

from __future__ import annotations

from collections.abc import Sequence

SHARES = (50.0, 90.0, 99.0, 99.9, 100.0)
CURVE = (*range(0, 99, 2), 98.0, 99.0, 99.5, 99.9, 99.95, 100.0)


def quantiles(samples: Sequence[float], shares: Sequence[float] = SHARES) -> dict[str, float]:
    """The value that so many per cent of the samples do not exceed, by `p<share>`; nothing of no samples."""
    ordered = sorted(samples)
    if not ordered:
        return {}
    last = len(ordered) - 1
    return {f"p{share:g}": ordered[min(last, int(share / 100 * len(ordered)))] for share in shares}
