"""How long to let work gather before the next round, where a round costs much and one more item little."""

from __future__ import annotations

from typing import Final

_SECONDS_PER_ITEM: Final = 0.0005
_SECONDS_MAX: Final = 0.005


def gathering_seconds(items_count: int) -> float:
    """The pause after a round of so many items: none after one, milliseconds under load.

    What comes alone is never kept waiting; what comes by the dozen costs less by the dozen. The pause is
    shorter than what a dozen take anyway.
    """
    return min(_SECONDS_MAX, _SECONDS_PER_ITEM * max(0, items_count - 1))
