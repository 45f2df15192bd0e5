"""The dead-letter queue: one filter says which dead deliveries, for its list, its counts and what is done to it.

Every query is bound to a tenant and names `dead_reason IS NOT NULL`, the predicate of the two
partial indexes that hold the queue and nothing else.
"""

from __future__ import annotations

import datetime as dt
import uuid
from dataclasses import astuple, dataclass
from enum import StrEnum
from typing import Any, Final, assert_never

from service.domain import limits
from service.domain.delivery import DeadReason
from service.domain.outcome import Outcome
from service.ledger.session import Ledger, Row, Statement


@dataclass(frozen=True, slots=True)
class DeadFilter:
    """What the queue is narrowed to; None leaves a field open. The two instants are exclusive."""

    destination_id: uuid.UUID | None = None
    reason: DeadReason | None = None
    outcome: Outcome | None = None
    event_type: str | None = None
    dead_after: dt.datetime | None = None
    dead_before: dt.datetime | None = None

    @property
    def names_nothing(self) -> bool:
        """Whether every field is open, so that the filter means the whole queue."""
        return all(field is None for field in astuple(self))


@dataclass(frozen=True, slots=True)
class ByIds:
    """These deliveries, whatever their state. No id stands twice."""

    ids: tuple[uuid.UUID, ...]


@dataclass(frozen=True, slots=True)
class ByFilter:
    """The dead deliveries that a filter names: those that have been dead longest, up to a limit."""

    wanted: DeadFilter
    limit: int


Selection = ByIds | ByFilter


def chosen_by(selection: Selection) -> tuple[str, dict[str, Any]]:
    """The query for `id` and `state` of a selection, and its values; it needs `:tenant` besides.

    By ids also those that are not dead, so that the caller can say why they are left alone.
    """
    match selection:
        case ByIds(ids):
            return _CHOSEN_BY_IDS, {"ids": list(ids)}
        case ByFilter(wanted, limit):
            where, values = _where(wanted)
            query = f"SELECT d.id, d.state FROM deliveries d WHERE {where} ORDER BY d.completed_at, d.id LIMIT :limit"
            return query, {**values, "limit": limit}
        case _:
            assert_never(selection)


_CHOSEN_BY_IDS: Final = (
    "SELECT d.id, d.state FROM deliveries d WHERE d.id = ANY(CAST(:ids AS uuid[])) AND d.tenant = :tenant"
)

_CONDITIONS: Final = {
    "destination_id": "d.destination_id = CAST(:wanted_destination_id AS uuid)",
    "reason": "d.dead_reason = :wanted_reason",
    "outcome": "d.last_outcome = :wanted_outcome",
    "event_type": "EXISTS (SELECT FROM payloads p WHERE p.delivery_id = d.id AND p.event_type = :wanted_event_type)",
    "dead_after": "d.completed_at > :wanted_dead_after",
    "dead_before": "d.completed_at < :wanted_dead_before",
}


def _where(wanted: DeadFilter) -> tuple[str, dict[str, Any]]:
    """The conditions on `deliveries d` that every user of a filter shares, and their values."""
    given = {name: value for name in _CONDITIONS if (value := getattr(wanted, name)) is not None}
    # Their names stand apart from those of whatever statement the conditions become part of.
    values = {f"wanted_{name}": value.value if isinstance(value, StrEnum) else value for name, value in given.items()}
    conditions = ["d.tenant = :tenant", "d.state = 'dead'", "d.dead_reason IS NOT NULL"]
    return " AND ".join([*conditions, *(_CONDITIONS[name] for name in given)]), values


@dataclass(frozen=True, slots=True)
class Place:
    """Where a page of the queue ended."""

    dead_at: dt.datetime
    delivery_id: uuid.UUID


async def list_page(ledger: Ledger, tenant: str, wanted: DeadFilter, *, after: Place | None, limit: int) -> list[Row]:
    """Read up to `limit` dead letters behind `after`, latest dead first.

    What dies meanwhile, again or for the first time, dies before the first page; so no page repeats
    a delivery. Index: `ix_deliveries_dead`, or `ix_deliveries_dead_by_destination` with a destination.
    """
    where, values = _where(wanted)
    if after is not None:
        where += " AND (d.completed_at, d.id) < (CAST(:place_at AS timestamptz), CAST(:place_id AS uuid))"
        values |= {"place_at": after.dead_at, "place_id": after.delivery_id}
    return await _described(
        ledger,
        f"{where} ORDER BY d.completed_at DESC, d.id DESC LIMIT :limit",
        {
            **values,
            "tenant": tenant,
            "limit": limit,
        },
    )


async def _described(ledger: Ledger, which: str, values: dict[str, Any]) -> list[Row]:
    """Read dead letters as they are told: the few rows are found first, then what belongs to them."""
    statement = Statement(f"""
    WITH found AS MATERIALIZED (SELECT d.* FROM deliveries d WHERE {which})
    SELECT f.id, f.destination_id, t.name AS destination_name, t.owner, p.event_id, p.event_type, f.dead_reason,
        f.last_outcome, f.last_status_code, f.last_error, f.attempt_count, a.first_attempt_at, a.last_attempt_at,
        f.completed_at, f.may_have_been_delivered, f.redrive_count
    FROM found f
    JOIN payloads p ON p.delivery_id = f.id
    JOIN destinations t ON t.id = f.destination_id
    LEFT JOIN LATERAL (
        SELECT min(a.started_at) AS first_attempt_at, max(a.started_at) AS last_attempt_at
        FROM attempts a WHERE a.delivery_id = f.id
    ) a ON true
    ORDER BY f.completed_at DESC, f.id DESC
    """)
    async with ledger.statement() as connection:
        return await connection.rows(statement, values)


async def sample(ledger: Ledger, tenant: str, selection: Selection, *, limit: int) -> list[Row]:
    """Read the first few dead letters of a selection. Indexes: as for `list_page`, or the primary key."""
    query, values = chosen_by(selection)
    which = f"d.id IN (SELECT c.id FROM ({query}) c WHERE c.state = 'dead' LIMIT :sample_limit)"
    return await _described(ledger, which, {**values, "tenant": tenant, "sample_limit": limit})


async def count(ledger: Ledger, tenant: str, selection: Selection) -> tuple[int, int]:
    """How many dead deliveries a selection takes, and how many of them are at a disabled destination.

    Bounded by the selection's limit or its ids. Indexes: as for `choose`, and the primary keys.
    """
    query, values = chosen_by(selection)
    statement = Statement(f"""
    SELECT count(*) AS dead_count, count(*) FILTER (WHERE t.state = 'disabled') AS disabled_count
    FROM ({query}) c JOIN deliveries d ON d.id = c.id JOIN destinations t ON t.id = d.destination_id
    WHERE c.state = 'dead'
    """)
    async with ledger.statement() as connection:
        [found] = await connection.rows(statement, {**values, "tenant": tenant})
    return found["dead_count"], found["disabled_count"]


async def choose(ledger: Ledger, tenant: str, selection: Selection) -> list[uuid.UUID]:
    """Read the ids of a selection. Indexes: as for `list_page`, or the primary key."""
    query, values = chosen_by(selection)
    async with ledger.statement() as connection:
        found = await connection.rows(Statement(query), {**values, "tenant": tenant})
    return [row["id"] for row in found]


_KNOWN = Statement("SELECT id FROM deliveries WHERE id = ANY(CAST(:ids AS uuid[])) AND tenant = :tenant")


async def known_ids(ledger: Ledger, tenant: str, ids: tuple[uuid.UUID, ...]) -> set[uuid.UUID]:
    """Which of the ids are deliveries of the tenant. Index: the primary key."""
    async with ledger.statement() as connection:
        found = await connection.rows(_KNOWN, {"ids": list(ids), "tenant": tenant})
    return {row["id"] for row in found}


_SUMMARY = Statement("""
WITH counted AS (
    SELECT d.destination_id, d.dead_reason, count(*) AS dead_count, min(d.completed_at) AS oldest_dead_at
    FROM deliveries d
    WHERE d.dead_reason IS NOT NULL
    GROUP BY d.destination_id, d.dead_reason
), groups AS (
    SELECT c.*, t.name AS destination_name, t.owner
    FROM counted c JOIN destinations t ON t.id = c.destination_id
    WHERE t.tenant = :tenant
)
SELECT g.*,
    CAST(sum(g.dead_count) OVER () AS bigint) AS total_count, min(g.oldest_dead_at) OVER () AS oldest_of_all_at,
    CAST(extract(epoch FROM now() - min(g.oldest_dead_at) OVER ()) AS float8) AS oldest_age_seconds
FROM groups g
ORDER BY g.dead_count DESC, g.destination_id, g.dead_reason
LIMIT :groups_max
""")


async def summary(ledger: Ledger, tenant: str, *, groups_max: int = limits.SUMMARY_GROUPS_MAX) -> list[Row]:
    """Count the queue by destination and reason, the largest groups first; each row carries the totals.

    The totals cover every group, also those beyond `groups_max`. Index: `ix_deliveries_dead_by_destination`, and
    it alone: dead rows lie scattered among finished ones, and to fetch each of 100,000 took 0.6 s.
    """
    async with ledger.statement() as connection:
        return await connection.rows(_SUMMARY, {"tenant": tenant, "groups_max": groups_max})
