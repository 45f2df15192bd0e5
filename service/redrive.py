"""STORY redrive: dead → pending as a durable, bounded, audited operation; and discard, dead → cancelled.

A redrive is written first and carried out by the dispatcher, a step at a time, so that it survives
any restart. It never makes an identity, and never takes a delivery that is not dead.
"""

from __future__ import annotations

import hashlib
import json
import math
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final, assert_never

from service.domain import limits
from service.domain.ids import Prefix, to_typeid
from service.ledger import dead_letters, operating, redrives
from service.ledger.audit import Deed
from service.ledger.dead_letters import ByFilter, ByIds, Selection
from service.ledger.redrives import NewRedrive, Progress
from service.ledger.session import Ledger, Row
from service.telemetry import events
from service.telemetry.logging import log


@dataclass(frozen=True, slots=True)
class Order:
    """What an operator asks for: which deliveries, why, and within which bounds."""

    selection: Selection
    reason: str
    rate_per_second: float | None = None
    stop_after_same_reason: int | None = None


@dataclass(frozen=True, slots=True)
class Started:
    """A new redrive, committed with its items."""

    redrive_id: uuid.UUID


@dataclass(frozen=True, slots=True)
class Replayed:
    """The key was used for this very order before."""

    redrive_id: uuid.UUID


@dataclass(frozen=True, slots=True)
class KeyMismatch:
    """The key was used for a different order before."""


@dataclass(frozen=True, slots=True)
class UnknownDeliveries:
    """The tenant has no such deliveries; nothing was done."""

    ids: frozenset[uuid.UUID]


@dataclass(frozen=True, slots=True)
class Preview:
    """What an order would take; nothing was done. `disabled_count` of them a redrive would skip."""

    dead_count: int
    disabled_count: int
    sample: list[Row]


@dataclass(frozen=True, slots=True)
class Discarded:
    """What a discard took, out of what was selected."""

    selected_count: int
    discarded_count: int


async def start(
    ledger: Ledger, tenant: str, actor: str, order: Order, *, key: str | None, new_id: Callable[[], uuid.UUID]
) -> Started | Replayed | KeyMismatch | UnknownDeliveries:
    """Begin a redrive, or say which one the key stands for, or what stands in the way."""
    fingerprint = _fingerprint(order)
    if key is not None and (known := await redrives.find_keyed(ledger, tenant, key)):
        return Replayed(known.id) if known.fingerprint == fingerprint else KeyMismatch()
    if unknown := await _unknown(ledger, tenant, order.selection):
        return UnknownDeliveries(unknown)
    new = NewRedrive(new_id(), key, fingerprint, order.selection, order.rate_per_second, order.stop_after_same_reason)
    subject = to_typeid(Prefix.REDRIVE, new.id)
    deed = Deed(tenant, actor, "redrive.start", subject, reason=order.reason, detail=_bounds(order))
    if await redrives.start(ledger, new, deed):
        return Started(new.id)
    # The same key was quicker elsewhere; what it stands for is committed now.
    return await start(ledger, tenant, actor, order, key=key, new_id=new_id)


async def preview(ledger: Ledger, tenant: str, selection: Selection) -> Preview | UnknownDeliveries:
    """What a redrive or a discard would take now, with a sample."""
    if unknown := await _unknown(ledger, tenant, selection):
        return UnknownDeliveries(unknown)
    dead_count, disabled_count = await dead_letters.count(ledger, tenant, selection)
    sample = await dead_letters.sample(ledger, tenant, selection, limit=limits.DRY_RUN_SAMPLE)
    return Preview(dead_count, disabled_count, sample)


async def cancel(ledger: Ledger, tenant: str, actor: str, redrive_id: uuid.UUID) -> bool:
    """End a running redrive; what it requeued goes on. Answers whether it was running."""
    deed = Deed(tenant, actor, "redrive.cancel", to_typeid(Prefix.REDRIVE, redrive_id))
    return await redrives.cancel(ledger, deed, redrive_id)


async def discard(
    ledger: Ledger, tenant: str, actor: str, selection: Selection, reason: str
) -> Discarded | UnknownDeliveries:
    """Cancel dead deliveries for good, in one commit with its record."""
    if unknown := await _unknown(ledger, tenant, selection):
        return UnknownDeliveries(unknown)
    ids = await dead_letters.choose(ledger, tenant, selection)
    detail = _selected(selection)
    deed = Deed(tenant, actor, "delivery.discard", operating.QUEUE_SUBJECT, reason=reason, detail=detail)
    return Discarded(len(ids), await operating.discard(ledger, deed, ids))


async def _unknown(ledger: Ledger, tenant: str, selection: Selection) -> frozenset[uuid.UUID]:
    match selection:
        case ByIds(ids):
            return frozenset(ids) - await dead_letters.known_ids(ledger, tenant, ids)
        case ByFilter():
            return frozenset()
        case _:
            assert_never(selection)


def _fingerprint(order: Order) -> bytes:
    """What makes two orders the same one: their meaning, not their spelling."""
    ids = sorted(map(str, order.selection.ids)) if isinstance(order.selection, ByIds) else None
    meaning = {"ids": ids, "reason": order.reason, **_bounds(order)}
    return hashlib.sha256(json.dumps(meaning, sort_keys=True).encode()).digest()


def _bounds(order: Order) -> dict[str, Any]:
    return {
        **_selected(order.selection),
        "rate_per_second": order.rate_per_second,
        "stop_after_same_reason": order.stop_after_same_reason,
    }


def _selected(selection: Selection) -> dict[str, Any]:
    """A selection as the record of the deed tells it. The ids themselves are kept with what was touched."""
    match selection:
        case ByIds():
            return {}
        case ByFilter(wanted, limit):
            fields = {name: value for name, value in asdict(wanted).items() if value is not None}
            if wanted.destination_id is not None:
                fields["destination_id"] = to_typeid(Prefix.DESTINATION, wanted.destination_id)
            return {"filter": {name: str(value) for name, value in fields.items()}, "limit": limit}
        case _:
            assert_never(selection)


# The dispatcher's part

# Instants are kept in microseconds: a whole delivery may be a little less than one.
_ROUNDING: Final = 1e-3


@dataclass(frozen=True, slots=True)
class Requeue:
    """Put back up to `limit`."""

    limit: int


@dataclass(frozen=True, slots=True)
class Wait:
    """Too many are on their way already."""


@dataclass(frozen=True, slots=True)
class Stop:
    """They die again, all for one reason."""

    reason: str


async def step(ledger: Ledger, *, batch: int = limits.REDRIVE_BATCH) -> bool:
    """Advance every running redrive that nobody else is advancing, by up to `batch` deliveries each.

    Answers whether one was left with more to do now.
    """
    more, after = False, None
    for _ in range(limits.REDRIVES_PER_PASS_MAX):
        advanced = await _advance(ledger, after, batch)
        if advanced is None:
            break
        after, has_more = advanced
        more = more or has_more
    return more


async def _advance(ledger: Ledger, after: uuid.UUID | None, batch: int) -> tuple[uuid.UUID, bool] | None:
    """One step of the next redrive, in one commit: its id, and whether more of it can be done now."""
    async with ledger.transaction() as connection:
        progress = await redrives.lock_next(connection, after)
        if progress is None:
            return None
        subject = to_typeid(Prefix.REDRIVE, progress.id)
        decision = decide(progress, batch)
        match decision:
            case Stop(reason):
                deed = Deed(
                    progress.tenant, redrives.STOPPED_ACTOR, "redrive.stop", subject, detail={"same_reason": reason}
                )
                await redrives.stop(connection, progress, reason, deed)
                requeued_count, skipped_count, runs, more = 0, 0, False, False
            case Wait():
                return progress.id, False
            case Requeue(limit):
                requeued_count, skipped_count = await redrives.requeue(connection, progress, limit)
                unspent_seconds = unspent(progress, requeued_count)
                runs = await redrives.stepped(connection, progress, unspent_seconds=unspent_seconds)
                # A skipped item took nothing of the bounds, so the next may have its turn at once.
                more = runs and (limit == batch or skipped_count > 0)
            case _:
                assert_never(decision)
    log.info(events.REDRIVE_STEPPED, redrive_id=subject, requeued=requeued_count, skipped=skipped_count, runs=runs)
    return progress.id, more


def decide(progress: Progress, batch: int) -> Requeue | Wait | Stop:
    """What a redrive may do now, by its own bounds and the batch."""
    if progress.same_reason is not None:
        return Stop(progress.same_reason)
    limit = batch
    if progress.stop_after_same_reason is not None:
        limit = min(limit, progress.stop_after_same_reason - progress.outstanding_count)
    if progress.rate_per_second is not None:
        earned_count = _earned_seconds(progress, progress.rate_per_second) * progress.rate_per_second
        limit = min(limit, math.floor(earned_count + _ROUNDING))
    return Requeue(limit) if limit > 0 else Wait()


def unspent(progress: Progress, requeued_count: int) -> float:
    """The part of the elapsed time that a step did not use up, in seconds: a fraction of a delivery is not lost."""
    rate_per_second = progress.rate_per_second
    if rate_per_second is None:
        return 0.0
    return max(0.0, _earned_seconds(progress, rate_per_second) - requeued_count / rate_per_second)


def _earned_seconds(progress: Progress, rate_per_second: float) -> float:
    """The time that may be spent on deliveries now: of the pause before, a burst at most; at first, one delivery's."""
    one_seconds = 1 / rate_per_second
    if progress.elapsed_seconds is None:
        return one_seconds
    return min(progress.elapsed_seconds, max(limits.REDRIVE_BURST_SECONDS, one_seconds))
