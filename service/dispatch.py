"""STORY dispatch: due, rescue, broker loss, admission, redrives — one bounded pass each.

The dispatcher repairs what hints, workers and Redis lose, so it depends on none of them: every step
reads the ledger, is bounded, and is safe to run twice at once.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from service import redrive
from service.domain import limits
from service.domain.delivery import Decision
from service.domain.ids import Prefix, to_typeid
from service.domain.outcome import Outcome
from service.domain.retry import decide_lost
from service.domain.tally import ATTEMPTS, Tallied, ended_as
from service.errors import LedgerRefused, LedgerUnavailable, QueueUnavailable
from service.ledger import attempting, dispatching, partitions, tallies
from service.ledger.attempting import Settlement
from service.ledger.dispatching import Due, LostClaim
from service.ledger.session import Ledger
from service.ports import Clock, HintQueue
from service.tallies import Tallies
from service.telemetry import events
from service.telemetry.logging import log

_PARTITIONS_EVERY_SECONDS = 3600.0
_SORT_OUT_EVERY_SECONDS = 5.0
_UNRESCUED_SECONDS = 60.0  # between two tries at a claim whose rescue was refused
_NEVER_STALE_SECONDS = 86_400.0  # longer than any lease


@dataclass(frozen=True, slots=True)
class Rhythm:
    """The dispatcher's times, in seconds."""

    visibility_seconds: float
    stale_seconds: float


class Dispatcher:
    """One process's passes. Any number may run."""

    def __init__(
        self,
        ledger: Ledger,
        queue: HintQueue,
        clock: Clock,
        rhythm: Rhythm,
        tallies: Tallies,
        *,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._ledger = ledger
        self._queue = queue
        self._clock = clock
        self._rhythm = rhythm
        self._tallies = tallies
        self._jitter = jitter
        self._queue_was_up = True
        self._ledger_was_up = True
        # Whether the ledger was there before us is not known: as after an outage, see _stale_seconds.
        self._ledger_back_at = clock.monotonic()
        self._housekept_at = float("-inf")
        self._sorted_out_at = float("-inf")
        self._refused: set[str] = set()
        self._unrescued: dict[uuid.UUID, float] = {}  # claims whose rescue the ledger refuses, and until when to skip

    async def run_pass(self) -> bool:
        """One pass of every step; answers whether a step was left with more to do.

        With Redis down, rescue and admission go on; without the ledger there is nothing to do.
        """
        steps = (self._broker_loss, self._due, self._rescue, self._admit, self._redrive, self._keep_house)
        try:
            more = [await self._step(step) for step in steps]
        except LedgerUnavailable as error:
            if self._ledger_was_up:  # said once for an outage, not with every pass
                log.warning(events.LEDGER_DOWN, error=str(error))
            self._ledger_was_up = False
            return False
        if not self._ledger_was_up:
            log.info(events.LEDGER_BACK)
            self._ledger_back_at = self._clock.monotonic()
        self._ledger_was_up = True
        return any(more)

    async def _step(self, step: Callable[[], Awaitable[bool]]) -> bool:
        try:
            more = await step()
            self._refused.discard(step.__name__)
            return more
        except QueueUnavailable as error:
            if self._queue_was_up:
                log.warning(events.QUEUE_DOWN, error=str(error))
            self._queue_was_up = False
            return False
        except LedgerRefused as error:
            # One step's trouble (a bug of ours, a right that is missing) must not keep the others from their work.
            if step.__name__ not in self._refused:
                log.error(events.STEP_REFUSED, step=step.__name__.strip("_"), error=str(error))
            self._refused.add(step.__name__)
            return False

    async def _broker_loss(self) -> bool:
        """When Redis lost its contents, hint again at once what was hinted and not claimed.

        The marker is set last: a dispatcher that dies in between does it all again, which is harmless.
        """
        if not await self._queue.epoch_lost():
            if not self._queue_was_up:
                log.info(events.QUEUE_BACK)
            self._queue_was_up = True
            return False
        woken_count = 0
        for _ in range(limits.PASS_ROUNDS_MAX):
            batch_count = await dispatching.wake_hinted(self._ledger)
            woken_count += batch_count
            if batch_count < limits.DUE_BATCH:
                await self._queue.mark_epoch()
                self._queue_was_up = True
                log.warning(events.BROKER_LOST, deliveries_count=woken_count)
                return woken_count > 0
        return True

    async def _due(self) -> bool:
        """Hint what is due, as far as the queue has room; expire and park what may not be sent."""
        for _ in range(limits.PASS_ROUNDS_MAX):
            try:
                depth = await self._queue.depth()
            except QueueUnavailable:
                await self._sort_out()
                raise
            room = (limits.HINT_JOBS_MAX - depth) * limits.HINT_IDS_MAX
            if room <= 0:
                await self._sort_out()
                return False
            batch = min(limits.DUE_BATCH, room)
            due = await dispatching.take_due(
                self._ledger, visibility_seconds=visibility_seconds(self._rhythm.visibility_seconds, depth), batch=batch
            )
            await self._set_aside(due)
            if due.to_hint:
                await self._queue.hint(due.to_hint)
                log.debug(events.DISPATCH_HINTED, deliveries_count=len(due.to_hint))
            if due.rows_count < batch:
                return False
        return True

    async def _sort_out(self) -> None:
        """With no room for a hint: still expire and park what may not be sent, every few seconds."""
        now = self._clock.monotonic()
        if now - self._sorted_out_at >= _SORT_OUT_EVERY_SECONDS:
            self._sorted_out_at = now
            await self._set_aside(await dispatching.take_unsendable(self._ledger))

    async def _set_aside(self, due: Due) -> None:
        if due.to_park:
            await dispatching.park(self._ledger, due.to_park)
        for delivery_id, tenant, reason in due.expired:
            self._tallies.count(tenant, Tallied.DEAD)
            log.info(events.DELIVERY_EXPIRED, delivery_id=to_typeid(Prefix.DELIVERY, delivery_id), reason=reason)

    async def _rescue(self) -> bool:
        """Settle the claims that nobody will settle: as unknown, never as failed."""
        now = self._clock.monotonic()
        self._unrescued = {each: until for each, until in self._unrescued.items() if until > now}
        lost = await dispatching.find_lost(
            self._ledger, stale_seconds=self._stale_seconds(), skipped=list(self._unrescued)
        )
        settlements = [self._lost_settlement(claim) for claim in lost]
        moved = await self._settle_lost(settlements)
        for claim, settlement in zip(lost, settlements, strict=True):
            if settlement.delivery_id in moved:
                self._tallies.count(claim.row["tenant"], ATTEMPTS[settlement.outcome])
                if (ended := ended_as(settlement.decision)) is not None:
                    self._tallies.count(claim.row["tenant"], ended)
                log.warning(
                    events.CLAIM_RESCUED,
                    delivery_id=to_typeid(Prefix.DELIVERY, settlement.delivery_id),
                    attempt=settlement.number,
                    worker=settlement.worker,
                    decision=type(settlement.decision).__name__.lower(),
                )
        return len(lost) == limits.RESCUE_BATCH

    async def _settle_lost(self, settlements: Sequence[Settlement]) -> set[uuid.UUID]:
        """Settle together, or one by one when the ledger refuses one: nobody waits for a stranger's row."""
        if not settlements:
            return set()
        try:
            return await attempting.settle(self._ledger, settlements)
        except LedgerRefused as error:
            if len(settlements) > 1:
                return {each for one in settlements for each in await self._settle_lost([one])}
            refused_id = settlements[0].delivery_id
            if len(self._unrescued) < limits.UNRESCUED_MAX:
                self._unrescued[refused_id] = self._clock.monotonic() + _UNRESCUED_SECONDS
            log.error(events.RESCUE_REFUSED, delivery_id=to_typeid(Prefix.DELIVERY, refused_id), error=str(error))
            return set()

    def _stale_seconds(self) -> float:
        """How old a heartbeat says that its worker is lost.

        While the ledger was away nobody could beat: until all have had the time to do so again, and
        likewise after our own start, only the leases' ends count.
        """
        away = not self._ledger_was_up or (self._clock.monotonic() - self._ledger_back_at < self._rhythm.stale_seconds)
        return _NEVER_STALE_SECONDS if away else self._rhythm.stale_seconds

    def _lost_settlement(self, claim: LostClaim) -> Settlement:
        decision: Decision = decide_lost(claim.policy, claim.budget, now=claim.row["now"], jitter=self._jitter())
        return Settlement(
            delivery_id=claim.delivery_id,
            number=claim.budget.number,
            scheduled_at=claim.row["next_attempt_at"],
            claimed_at=claim.row["claimed_at"],
            trigger=claim.row["next_trigger"],
            worker=claim.row["worker"],
            outcome=Outcome.UNKNOWN,
            decision=decision,
            exchange=None,
            crashed_claims=claim.budget.crashed_claims + 1,
        )

    async def _admit(self) -> bool:
        """Let the parked rows of resumed destinations flow again, a batch of each in turn."""
        skipped = 0
        for _ in range(limits.PASS_ROUNDS_MAX):
            admitted = await dispatching.admit(self._ledger, skipped=skipped)
            if admitted is None:
                return False
            # A destination that has more keeps its mark; the next one gets its turn first.
            skipped += admitted == limits.PARK_BATCH
        return True

    async def _redrive(self) -> bool:
        return await redrive.step(self._ledger)

    async def _keep_house(self) -> bool:
        """Once an hour: partitions ahead of time, workers lost long ago, counts of days gone by."""
        now = self._clock.monotonic()
        if now - self._housekept_at < _PARTITIONS_EVERY_SECONDS:
            return False
        try:
            made = await partitions.ensure_ahead(self._ledger, self._clock.now())
        except LedgerRefused as error:
            # A role that may not create tables: rows go to the DEFAULT partitions until one that may does.
            made = []
            log.error(events.PARTITIONS_REFUSED, error=str(error))
        await dispatching.forget_workers(self._ledger)
        more = await tallies.forget(self._ledger) == limits.TALLIES_FORGET_BATCH
        if not more:  # else the next pass goes on
            self._housekept_at = now
        if made:
            log.info(events.PARTITIONS_MADE, partitions=made)
        return more


def visibility_seconds(base_seconds: float, jobs_waiting_count: int) -> float:
    """How long a hint may take before it is given again: longer, the longer the queue is.

    A backlog is not hinted again and again while it waits its turn; a short queue repairs a lost
    hint within `base_seconds`.
    """
    return min(limits.HINT_VISIBILITY_SECONDS_MAX, base_seconds + jobs_waiting_count * _SECONDS_PER_JOB)


# A worker takes a job of 50 in well under this; counting too long costs latency only after a loss.
_SECONDS_PER_JOB = 0.1
