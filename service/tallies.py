"""What this process counts: in memory as it happens, added to the ledger every few seconds and at the stop.

Nobody waits for a count and nothing depends on one. A ledger that is away delays them, a process that is killed
takes its last seconds' with it, and a write whose answer was lost may be added twice.
"""

from __future__ import annotations

import asyncio
import contextlib

from service.domain import limits
from service.domain.tally import Tallied
from service.errors import LedgerRefused, LedgerUnavailable
from service.ledger import tallies
from service.ledger.session import Ledger
from service.telemetry import events
from service.telemetry.logging import log

_LAST_WRITE_SECONDS = 2.0  # at the stop, for a ledger that neither answers nor refuses


class Tallies:
    """One process's counts, by tenant and name."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        write_every_seconds: float = limits.TALLIES_WRITE_SECONDS,
        keys_max: int = limits.TALLIES_KEYS_MAX,
    ) -> None:
        self._ledger = ledger
        self._write_every_seconds = write_every_seconds
        self._keys_max = keys_max
        self._counts: dict[tuple[str, str], int] = {}
        self._stopping = asyncio.Event()
        self._writing: asyncio.Task[None] | None = None
        self._refused = False

    def count(self, tenant: str, name: Tallied, times: int = 1) -> None:
        """Count it. Beyond the limit of keys, what has none yet goes uncounted."""
        self._keep((tenant, name), times)

    def start(self) -> None:
        """Write every few seconds from now on."""
        self._writing = asyncio.create_task(self._write_on())

    async def stop(self) -> None:
        """Write what is left, if the ledger takes it soon. Nothing may be counted afterwards."""
        self._stopping.set()
        if self._writing is not None:
            _, late = await asyncio.wait({self._writing}, timeout=_LAST_WRITE_SECONDS)
            for writing in late:
                writing.cancel()
                await asyncio.wait({writing})

    async def write(self) -> None:
        """Add what was counted to the ledger; with nothing counted nothing is sent. A ledger that fails is no error."""
        if not self._counts:
            return
        taken, self._counts = self._counts, {}
        try:
            await tallies.add(self._ledger, taken)
            self._refused = False
        except LedgerUnavailable:
            # Others say that it is away. Hardly anything is counted meanwhile: each count follows a commit.
            for key, times in taken.items():
                self._keep(key, times)
        except LedgerRefused as error:
            # A right that is missing, or a bug of ours. Kept for when it is mended, they would all be of one minute.
            if not self._refused:
                log.error(events.TALLIES_REFUSED, error=str(error))
            self._refused = True

    async def _write_on(self) -> None:
        last = False
        while not last:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._write_every_seconds):
                    await self._stopping.wait()
            last = self._stopping.is_set()  # asked before the write: what is counted during it is written as well
            await self.write()

    def _keep(self, key: tuple[str, str], times: int) -> None:
        if key in self._counts:
            self._counts[key] += times
        elif len(self._counts) < self._keys_max:
            self._counts[key] = times
