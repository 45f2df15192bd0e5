"""What a bulk request means to take, in the ledger's terms; whatever is wrong with it is a 422 with a pointer."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import TypeVar

from service.api.dlq_schemas import DeadLetterFilter, DiscardRequest, RedriveRequest
from service.api.intake import instant
from service.api.problems import FieldError, ProblemError, invalid
from service.domain import limits
from service.domain.delivery import DeadReason
from service.domain.ids import Prefix, parse_typeid, to_typeid
from service.domain.outcome import Outcome
from service.ledger.dead_letters import ByFilter, ByIds, DeadFilter, Selection

E = TypeVar("E", DeadReason, Outcome)


def selection_of(wanted: RedriveRequest | DiscardRequest) -> Selection:
    """What a request means to take. Raises a 422."""
    if (wanted.delivery_ids is None) == (wanted.filter is None):
        raise invalid(FieldError("", "give either delivery_ids or a filter"))
    if wanted.delivery_ids is not None:
        if wanted.limit is not None:
            raise invalid(FieldError("/limit", "a limit goes with a filter; the ids are their own"))
        return _by_ids(wanted.delivery_ids)
    if wanted.limit is None:
        raise invalid(FieldError("/limit", f"a filter needs a limit, 1 to {limits.REDRIVE_ITEMS_MAX}"))
    assert wanted.filter is not None, "one of the two is given"
    narrowed = _filter(wanted.filter)
    if narrowed.names_nothing:
        raise invalid(FieldError("/filter", "a filter names at least one thing"))
    return ByFilter(narrowed, wanted.limit)


def _by_ids(texts: Sequence[str]) -> ByIds:
    """The ids, each once. Raises a 422 for what cannot be an id, as for an id that is unknown."""
    parsed = [parse_typeid(Prefix.DELIVERY, text) for text in texts]
    if None in parsed:
        raise _wrong_ids([index for index, delivery_id in enumerate(parsed) if delivery_id is None])
    return ByIds(tuple(dict.fromkeys(delivery_id for delivery_id in parsed if delivery_id is not None)))


def no_such_deliveries(wanted: RedriveRequest | DiscardRequest, ids: frozenset[uuid.UUID]) -> ProblemError:
    """The refusal of a request that names deliveries which the tenant does not have."""
    unknown = {to_typeid(Prefix.DELIVERY, delivery_id) for delivery_id in ids}
    return _wrong_ids([index for index, text in enumerate(wanted.delivery_ids or ()) if text in unknown])


def _wrong_ids(indexes: Sequence[int]) -> ProblemError:
    errors = [
        FieldError(f"/delivery_ids/{index}", "there is no such delivery")
        for index in indexes[: limits.FIELD_ERRORS_MAX]
    ]
    return invalid(*errors)


def _filter(given: DeadLetterFilter) -> DeadFilter:
    """A filter in the ledger's terms. Raises a 422."""
    destination_id = None
    if given.destination_id is not None:
        destination_id = parse_typeid(Prefix.DESTINATION, given.destination_id)
        if destination_id is None:
            raise invalid(FieldError("/filter/destination_id", "there is no such destination"))
    return DeadFilter(
        destination_id=destination_id,
        reason=_one_of(DeadReason, given.reason, "/filter/reason"),
        outcome=_one_of(Outcome, given.outcome, "/filter/outcome"),
        event_type=given.event_type,
        dead_after=instant(given.dead_after, "/filter/dead_after"),
        dead_before=instant(given.dead_before, "/filter/dead_before"),
    )


def _one_of(kind: type[E], text: str | None, pointer: str) -> E | None:
    try:
        return kind(text) if text is not None else None
    except ValueError:
        raise invalid(FieldError(pointer, f"one of {', '.join(kind)}")) from None
