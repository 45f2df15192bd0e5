"""STORY deliver: claim → send → classify → decide → settle.

The claim is committed before a byte is sent, and the outcome before the hint is acknowledged. No
ledger connection is held while a request is under way, and nothing waits on a running lease.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import random
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from service import ed25519
from service.domain import limits, signing
from service.domain.delivery import Bury, DeadReason
from service.domain.ids import Prefix, to_typeid
from service.domain.outcome import OUR_FAULTS, Exchange, Fault, Phase, classify
from service.domain.retry import decide
from service.domain.tally import ATTEMPTS, Tallied, ended_as
from service.errors import KeyringError, LedgerRefused, LedgerUnavailable
from service.keyring import Keyring
from service.ledger import attempting, destinations
from service.ledger.attempting import Claim, Secret, Settlement
from service.ledger.audit import Deed
from service.ledger.coalesce import Coalescer
from service.ledger.session import Ledger, transactions_open
from service.ports import Clock, OutboundRequest, Sender
from service.slots import Slots
from service.tallies import Tallies
from service.telemetry import events
from service.telemetry.logging import log
from service.version import USER_AGENT

# Between two tries to write an outcome while the ledger is away; the lease bounds how long.
_SETTLE_PAUSE_SECONDS = 0.25
_SETTLE_AT_STOP_SECONDS = 5.0  # beyond the grace, for outcomes that are known and not yet written


@dataclass(frozen=True, slots=True)
class Bounds:
    """What limits one worker."""

    slots_count: int
    lease_margin_seconds: float
    claim_young_seconds: float = limits.CLAIM_YOUNG_SECONDS
    patience_seconds: float = limits.HINT_PATIENCE_SECONDS


class Deliverer:
    """One worker's attempts. `worker` is its name in the ledger; `jitter` is uniform in [0, 1)."""

    def __init__(
        self,
        ledger: Ledger,
        sender: Sender,
        keyring: Keyring,
        clock: Clock,
        bounds: Bounds,
        tallies: Tallies,
        *,
        worker: str,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._ledger = ledger
        self._sender = sender
        self._keyring = keyring
        self._clock = clock
        self._bounds = bounds
        self._tallies = tallies
        self._worker = worker
        self._jitter = jitter
        self._slots = Slots(bounds.slots_count)
        self._settles: Coalescer[Settlement, bool] = Coalescer(self._settle_batch)
        self._claiming: set[asyncio.Task[list[asyncio.Task[None]]]] = set()
        self._attempts: set[asyncio.Task[None]] = set()
        self._sending: set[asyncio.Task[None]] = set()  # of the attempts, those whose outcome is not known yet
        self._stopping = False
        self._awake_at = clock.monotonic()
        self._woke_at = float("-inf")

    @property
    def in_flight_count(self) -> int:
        """How many attempts are under way."""
        return len(self._attempts)

    @property
    def room_count(self) -> int:
        """How many more attempts could begin now."""
        return 0 if self._stopping else self._slots.room_count

    def on_room(self, call: Callable[[], None]) -> None:
        """Call whenever there is more room."""
        self._slots.on_room = call

    def tick(self) -> None:
        """Say that the process runs. Called at least every second for as long as it does."""
        now = self._clock.monotonic()
        if now - self._awake_at > self._bounds.claim_young_seconds:
            self._woke_at = now
        self._awake_at = now

    async def deliver(self, delivery_ids: Sequence[uuid.UUID]) -> None:
        """Attempt those of the ids that are due, as slots become free; return when all are settled.

        Ids that find no slot within the patience are left: the dispatcher hints them again.
        """
        started: list[asyncio.Task[None]] = []
        remaining = list(dict.fromkeys(delivery_ids))
        while remaining and not self._stopping:
            taken = await self._slots.take(min(len(remaining), limits.CLAIM_IDS_MAX), self._bounds.patience_seconds)
            if not taken:
                break
            chosen, remaining = remaining[:taken], remaining[taken:]
            # Shielded: a hint that is cancelled once the claim is on its way must not lose the claim,
            # which nobody would then send, nor settle until its lease ends.
            claiming = asyncio.create_task(self._claim_and_start(chosen))
            self._claiming.add(claiming)
            claiming.add_done_callback(self._claiming.discard)
            started += await asyncio.shield(claiming)
        if started:
            await asyncio.wait(started)

    async def stop(self, grace_seconds: float) -> None:
        """Claim no more, let attempts finish within the grace, then break off what is left.

        An outcome that is known by then is still written, if the ledger takes it soon.
        """
        self._stopping = True
        if self._claiming:
            # What is being claimed now is released unsent, and that has to be settled too.
            await asyncio.wait(set(self._claiming))
        if self._attempts:
            await asyncio.wait(set(self._attempts), timeout=grace_seconds)
            for attempt in set(self._sending):
                attempt.cancel()
            if self._attempts:
                await asyncio.wait(set(self._attempts), timeout=_SETTLE_AT_STOP_SECONDS)

    async def _claim_and_start(self, delivery_ids: Sequence[uuid.UUID]) -> list[asyncio.Task[None]]:
        """Claim within slots that were taken; give back those that no claim fills."""
        asked_at = self._clock.monotonic()
        claims: list[Claim] = []
        try:
            claims = await self._claim(delivery_ids)
        finally:
            self._slots.give(len(delivery_ids) - len(claims))
        return [self._start(claim, asked_at) for claim in claims]

    async def _claim(self, delivery_ids: Sequence[uuid.UUID]) -> list[Claim]:
        """Claim together, or one by one when the ledger refuses one: nobody waits for a stranger's row."""
        try:
            return await attempting.claim(
                self._ledger,
                delivery_ids,
                worker=self._worker,
                lease_margin_seconds=self._bounds.lease_margin_seconds,
            )
        except LedgerUnavailable as error:
            # Whether the claim took effect is not known; if so, its lease ends and it is rescued unsent.
            log.warning(events.CLAIM_FAILED, deliveries_count=len(delivery_ids), error=str(error))
        except LedgerRefused as error:
            if len(delivery_ids) > 1:
                return [claim for one in delivery_ids for claim in await self._claim([one])]
            refused = to_typeid(Prefix.DELIVERY, delivery_ids[0])
            log.error(events.CLAIM_REFUSED, delivery_id=refused, error=str(error))
        return []

    def _start(self, claim: Claim, asked_at: float) -> asyncio.Task[None]:
        # A task of its own: a cancelled hint must not take a request that is under way with it.
        attempt = asyncio.create_task(self._attempt(claim, asked_at))
        self._attempts.add(attempt)
        attempt.add_done_callback(self._attempts.discard)
        attempt.add_done_callback(lambda _: self._slots.give(1))
        return attempt

    async def _attempt(self, claim: Claim, asked_at: float) -> None:
        """One attempt, whole. `asked_at` is when the claim was asked for: the lease is no older."""
        attempt = asyncio.current_task()
        assert attempt is not None, "an attempt is a task of its own"
        self._sending.add(attempt)
        try:
            exchange = await self._send(claim, asked_at)
        finally:
            self._sending.discard(attempt)  # from here on a stop waits: a known outcome is still written
        outcome = classify(exchange, claim.response_rules)
        decision = decide(
            outcome,
            exchange,
            claim.policy,
            claim.budget,
            now=claim.claimed_at + dt.timedelta(seconds=self._clock.monotonic() - asked_at),
            wall_now=self._clock.now(),
            jitter=self._jitter(),
        )
        settlement = Settlement(
            delivery_id=claim.delivery_id,
            number=claim.budget.number,
            scheduled_at=claim.scheduled_at,
            claimed_at=claim.claimed_at,
            trigger=claim.trigger,
            worker=self._worker,
            outcome=outcome,
            decision=decision,
            exchange=exchange,
        )
        await self._settle(claim, settlement, settle_until=asked_at + claim.lease_seconds)

    async def _send(self, claim: Claim, asked_at: float) -> Exchange:
        assert transactions_open() == 0, "no ledger connection is held across a request"
        phase = Phase.NOT_SENT

        def may_write() -> bool:
            nonlocal phase
            holds = self._holds(asked_at)
            if holds:
                phase = Phase.WRITTEN
            return holds

        try:
            request = self._request(claim, may_write)
        except KeyringError as error:
            log.error(events.SECRET_UNREADABLE, destination_id=str(claim.destination_id), error=str(error))
            return Exchange(Phase.NOT_SENT, 0, fault=Fault.INTERNAL, error=str(error))
        if self._stopping:
            return Exchange(Phase.NOT_SENT, 0, fault=Fault.SHUTDOWN, error="the worker is stopping")
        if self._clock.monotonic() - asked_at > self._bounds.claim_young_seconds:
            # We were paused: the lease may have been given to another worker by now.
            log.warning(events.ATTEMPT_UNSENT, delivery_id=str(claim.delivery_id), attempt=claim.budget.number)
            return Exchange(Phase.NOT_SENT, 0, fault=Fault.INTERNAL, error="the worker was paused before sending")
        try:
            return await self._sender.send(request)
        except asyncio.CancelledError:
            # Broken off at the end of the grace. Once the first byte may have gone out, how far it came is not known.
            return Exchange(phase, 0, fault=Fault.SHUTDOWN, error="broken off by the worker's stop")

    def _request(self, claim: Claim, may_write: Callable[[], bool]) -> OutboundRequest:
        """The request of this attempt: the accepted bytes, this moment's timestamp, the current secrets."""
        webhook_id = to_typeid(Prefix.DELIVERY, claim.delivery_id)
        timestamp = int(self._clock.now().timestamp())
        keys = [self._signing_key(claim, secret) for secret in claim.secrets[: limits.SECRETS_MAX]]
        ours = {
            "content-type": claim.content_type,
            "user-agent": USER_AGENT,
            "webhook-id": webhook_id,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": signing.sign(webhook_id, timestamp, claim.body, keys),
            "idempotency-key": webhook_id,
            "hookledger-event-id": claim.event_id,
            "hookledger-attempt": str(claim.budget.number),
        }
        if claim.event_type is not None:
            ours["hookledger-event-type"] = claim.event_type
        # Ours win over the delivery's, and those over the destination's, whatever their case.
        merged = {name.lower(): (name, value) for name, value in claim.destination_headers.items()}
        merged |= {name.lower(): (name, value) for name, value in claim.headers.items()}
        merged |= {name: (name, value) for name, value in ours.items()}
        return OutboundRequest(
            url=claim.url,
            headers=list(merged.values()),
            body=claim.body,
            timeout_seconds=claim.timeout_seconds,
            pool_key=str(claim.destination_id),
            may_write=may_write,
        )

    def _signing_key(self, claim: Claim, secret: Secret) -> bytes | signing.Ed25519Sign:
        key = self._keyring.decrypt(
            secret.ciphertext,
            tenant=claim.tenant,
            destination_id=claim.destination_id,
            public_key=secret.public_key,
        )
        return key if secret.public_key is None else ed25519.signer(key)

    def _holds(self, asked_at: float) -> bool:
        """Whether no pause (SIGSTOP, a sleeping machine) can have cost a claim of this age its lease.

        After a pause the ticks are old until the loop has run again; from then on, what was claimed
        before it is not written, however long connecting takes: another worker may have it.
        """
        awake = self._clock.monotonic() - self._awake_at <= self._bounds.claim_young_seconds
        return awake and asked_at >= self._woke_at

    async def _settle(self, claim: Claim, settlement: Settlement, *, settle_until: float) -> None:
        """Write the outcome, for as long as the lease lasts; then the rescue calls it unknown."""
        moved = await self._until(settle_until, settlement, self._settles.submit)
        if moved is False:
            confirmed = await self._until(settle_until, settlement, self._settle_late)
            if confirmed:
                self._tallies.count(claim.tenant, Tallied.DELIVERED)
            log.warning(events.ATTEMPT_FENCED, **_wide(claim, settlement), confirmed=bool(confirmed))
        elif moved is None:
            log.error(events.ATTEMPT_NOT_SETTLED, **_wide(claim, settlement))
        else:
            self._tallies.count(claim.tenant, ATTEMPTS[settlement.outcome])
            if (ended := ended_as(settlement.decision)) is not None:
                self._tallies.count(claim.tenant, ended)
            exchange = settlement.exchange
            ours = exchange is not None and exchange.fault in OUR_FAULTS and exchange.fault is not Fault.SHUTDOWN
            (log.warning if ours else log.info)(events.ATTEMPT_SETTLED, **_wide(claim, settlement))
            if settlement.decision == Bury(DeadReason.GONE) and exchange is not None:
                await self._disable(claim, exchange)

    async def _until(
        self, settle_until: float, settlement: Settlement, write: Callable[[Settlement], Awaitable[bool]]
    ) -> bool | None:
        """Retry a write while the ledger is away; None when the time is over."""
        while True:
            try:
                return await write(settlement)
            except LedgerUnavailable as error:
                log.warning(events.SETTLE_RETRIED, delivery_id=str(settlement.delivery_id), error=str(error))
            except LedgerRefused as error:
                log.error(events.SETTLE_RETRIED, delivery_id=str(settlement.delivery_id), error=str(error))
                return None
            if self._clock.monotonic() > settle_until:
                return None
            await asyncio.sleep(_SETTLE_PAUSE_SECONDS)

    async def _settle_batch(self, batch: Sequence[Settlement]) -> list[bool]:
        moved = await attempting.settle(self._ledger, batch)
        return [settlement.delivery_id in moved for settlement in batch]

    async def _settle_late(self, settlement: Settlement) -> bool:
        return await attempting.settle_late(self._ledger, settlement)

    async def _disable(self, claim: Claim, exchange: Exchange) -> None:
        """Gone: the receiver wants no more, so the destination takes no more until someone enables it."""
        ruled = str(exchange.status_code) in claim.response_rules
        said = f"{exchange.status_code}, which its response_rules call gone" if ruled else "410 Gone"
        deed = Deed(
            tenant=claim.tenant,
            actor="worker",
            action="destination.disable",
            subject=to_typeid(Prefix.DESTINATION, claim.destination_id),
            reason=f"the receiver answered {said}",
        )
        try:
            if await destinations.disable(self._ledger, deed, claim.destination_id):
                log.warning(events.DESTINATION_DISABLED, destination_id=deed.subject, reason=deed.reason)
        except LedgerUnavailable as error:
            # The next delivery will be answered 410 as well and tries again.
            log.warning(events.DESTINATION_DISABLED, destination_id=deed.subject, error=str(error))


def _wide(claim: Claim, settlement: Settlement) -> dict[str, object]:
    """The one wide line of an attempt."""
    exchange = settlement.exchange
    return {
        "delivery_id": to_typeid(Prefix.DELIVERY, claim.delivery_id),
        "destination_id": to_typeid(Prefix.DESTINATION, claim.destination_id),
        "tenant": claim.tenant,
        "attempt": settlement.number,
        "outcome": settlement.outcome.value,
        "decision": type(settlement.decision).__name__.lower(),
        "phase": exchange.phase.value if exchange else None,
        "status_code": exchange.status_code if exchange else None,
        "error": exchange.error if exchange else None,
        "latency_ms": exchange.latency_ms if exchange else None,
    }
