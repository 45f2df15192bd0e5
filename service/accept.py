"""STORY accept: request → identity → group commit → 202 → hint.

The commit is what makes the answer; nothing before it does, and nothing after it can undo it. The
hint follows the commit and may fail: the dispatcher finds every due delivery by itself.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from service.domain.tally import Tallied
from service.hints import Hints
from service.ledger import accepting
from service.ledger.accepting import Inserted, NewDelivery, Standing
from service.ledger.coalesce import Coalescer
from service.ledger.session import Ledger
from service.tallies import Tallies
from service.telemetry import events
from service.telemetry.logging import log


@dataclass(frozen=True, slots=True)
class Accepted:
    """A new delivery, committed."""

    row: Inserted


@dataclass(frozen=True, slots=True)
class Replayed:
    """The key was used for this very request before."""

    delivery_id: uuid.UUID


@dataclass(frozen=True, slots=True)
class Duplicate:
    """Another key brought the same event with the same payload."""

    delivery_id: uuid.UUID


@dataclass(frozen=True, slots=True)
class KeyMismatch:
    """The key was used for a different request before."""


@dataclass(frozen=True, slots=True)
class EventConflict:
    """The event exists at this destination with a different payload."""

    delivery_id: uuid.UUID


@dataclass(frozen=True, slots=True)
class UnknownDestination:
    """The tenant has no such destination."""


@dataclass(frozen=True, slots=True)
class DisabledDestination:
    """The destination takes nothing until it is enabled."""


Answer = Accepted | Replayed | Duplicate | KeyMismatch | EventConflict | UnknownDestination | DisabledDestination


class Intake:
    """One process's way into the ledger: every request goes through its group commit."""

    def __init__(
        self,
        ledger: Ledger,
        hints: Hints,
        tallies: Tallies,
        *,
        window_seconds: float,
        visibility_seconds: float,
    ) -> None:
        self._ledger = ledger
        self._hints = hints
        self._tallies = tallies
        self._window_seconds = window_seconds
        self._visibility_seconds = visibility_seconds
        self._flushes: Coalescer[NewDelivery, Answer] = Coalescer(self._flush)

    async def accept(self, delivery: NewDelivery) -> Answer:
        """Commit the delivery, or say what stands in its way.

        Raises LedgerUnavailable when the commit is not known to have happened; the same request
        with the same key then converges to one delivery.
        """
        return await self.offer(delivery)

    def offer(self, delivery: NewDelivery) -> asyncio.Future[Answer]:
        """`accept`, for who brings many at once: what it answers or raises is to come. Raises LedgerBusy at once."""
        return self._flushes.offer(delivery, len(delivery.body))

    async def standing(self, delivery: NewDelivery) -> Answer | None:
        """What the ledger answers to a request that may not become a delivery; None when it is a new one.

        Raises LedgerUnavailable.
        """
        [standing] = await accepting.look_up(self._ledger, [delivery])
        if standing.key_fingerprint is None and standing.event_delivery_id is None:
            return None
        return self._told(delivery, explain(delivery, standing, key_is_new=False))

    async def _flush(self, batch: Sequence[NewDelivery]) -> list[Answer]:
        """Commit a batch's new rows, then explain the others from what stands."""
        # One candidate per key, the first to come; what lost to it is explained like any repetition.
        candidates = {(row.tenant, row.key): row for row in reversed(batch)}
        written = await accepting.insert_new(
            self._ledger,
            sorted(candidates.values(), key=lambda row: (row.tenant, row.key)),
            window_seconds=self._window_seconds,
            visibility_seconds=self._visibility_seconds,
        )
        self._hints.offer([row.id for row in written.deliveries.values() if row.hintable])
        for tenant, times in Counter(row.tenant for row in batch if row.id in written.deliveries).items():
            self._tallies.count(tenant, Tallied.ACCEPTED, times)
        others = [row for row in batch if row.id not in written.deliveries]
        standings = iter(await accepting.look_up(self._ledger, others) if others else ())
        return [
            Accepted(written.deliveries[row.id])
            if row.id in written.deliveries
            else self._told(row, explain(row, next(standings), key_is_new=row.id in written.keyed))
            for row in batch
        ]

    def _told(self, row: NewDelivery, answer: Answer) -> Answer:
        """The answer, counted where it rejects a repetition."""
        if isinstance(answer, Replayed):
            self._tallies.count(row.tenant, Tallied.REPLAYED)
        elif isinstance(answer, Duplicate):
            self._tallies.count(row.tenant, Tallied.DUPLICATE)
            log.info(events.DELIVERY_DUPLICATE, delivery_id=str(answer.delivery_id), tenant=row.tenant)
        return answer


def explain(row: NewDelivery, standing: Standing, *, key_is_new: bool) -> Answer:
    """Why a row did not become a delivery: the key speaks first, the event second (docs/api.md).

    `key_is_new`: this row's own flush took the key, for an event that another key had brought.
    """
    if standing.key_fingerprint is not None and standing.key_fingerprint != row.fingerprint:
        return KeyMismatch()
    if standing.event_delivery_id is not None:
        if standing.event_payload_sha256 != row.body_sha256:
            return EventConflict(standing.event_delivery_id)
        if standing.key_fingerprint is not None and not key_is_new:
            return Replayed(standing.event_delivery_id)
        if standing.destination_state != "disabled":
            return Duplicate(standing.event_delivery_id)
    # Nothing stood in the way but the destination, as it was when the flush was written.
    return UnknownDestination() if standing.destination_state is None else DisabledDestination()
