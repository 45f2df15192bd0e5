"""The system's clock."""

from __future__ import annotations

import datetime as dt
import time


class SystemClock:
    """The Clock outside of tests."""

    def now(self) -> dt.datetime:
        """The current instant, in UTC."""
        return dt.datetime.now(dt.UTC)

    def monotonic(self) -> float:
        """Seconds that never step; they go on while the process is paused."""
        return time.monotonic()
