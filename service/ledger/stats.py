"""The numbers of this moment, counted from the rows of a tenant that stand open or dead; never from all rows.

What one answer reads is bounded whatever the ledger holds, and where a bound was reached the answer says so.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

from service.domain import limits
from service.ledger.session import Ledger, Statement


@dataclass(frozen=True, slots=True)
class Standings:
    """How many of a tenant's deliveries stand where, at an instant of the ledger's.

    `pending_count` holds the due and the parked ones too. `capped`: only the oldest open deliveries were looked at,
    so that the counts of pending, due, parked and ambiguous are "at least". `dead_capped`: only some of the dead were.
    """

    at: dt.datetime
    capped: bool
    pending_count: int
    due_count: int
    oldest_due_at: dt.datetime | None
    parked_count: int
    ambiguous_count: int
    in_flight_count: int
    dead_capped: bool
    dead_counts: dict[str, int]  # by reason, those that occur


_STANDINGS = Statement("""
WITH examined AS (
    SELECT d.tenant = :tenant AS own, d.state, d.parked, d.next_attempt_at
    FROM deliveries d
    WHERE d.completed_at IS NULL
    ORDER BY d.id LIMIT :rows_max
), open AS (
    SELECT count(*) AS examined_count,
        count(*) FILTER (WHERE own AND state = 'pending') AS pending_count,
        count(*) FILTER (WHERE own AND state = 'pending' AND NOT parked AND next_attempt_at <= now()) AS due_count,
        min(next_attempt_at) FILTER (WHERE own AND state = 'pending' AND NOT parked AND next_attempt_at <= now())
            AS oldest_due_at,
        count(*) FILTER (WHERE own AND parked) AS parked_count,
        count(*) FILTER (WHERE own AND state = 'ambiguous') AS ambiguous_count
    FROM examined
), in_flight AS (
    SELECT count(*) AS in_flight_count FROM deliveries d WHERE d.lease_until IS NOT NULL AND d.tenant = :tenant
), buried AS (
    SELECT destination_id, dead_reason, count(*) AS dead_count
    FROM (SELECT d.destination_id, d.dead_reason FROM deliveries d WHERE d.dead_reason IS NOT NULL
          LIMIT :dead_rows_max) d
    GROUP BY destination_id, dead_reason
), reasons AS (
    SELECT b.dead_reason, sum(b.dead_count) AS all_count,
        sum(b.dead_count) FILTER (WHERE t.tenant = :tenant) AS own_count
    FROM buried b JOIN destinations t ON t.id = b.destination_id
    GROUP BY b.dead_reason
), dead AS (
    SELECT coalesce(jsonb_object_agg(dead_reason, own_count) FILTER (WHERE own_count > 0), '{}') AS dead_counts,
        coalesce(sum(all_count), 0) AS dead_examined_count
    FROM reasons
)
SELECT now() AS at, open.*, in_flight.*, dead.* FROM open, in_flight, dead
""")


async def standings(
    ledger: Ledger,
    tenant: str,
    *,
    rows_max: int = limits.STATS_ROWS_MAX,
    dead_rows_max: int = limits.STATS_DEAD_ROWS_MAX,
) -> Standings:
    """Count a tenant's deliveries by where they stand.

    `rows_max` bounds the open deliveries looked at, of whatever tenant, oldest first, and `dead_rows_max` the dead
    ones: a small tenant beside a giant one costs the same. Deliveries in flight are no more than the workers' slots,
    so they are always counted whole.
    Indexes: `ix_deliveries_open`, `ix_deliveries_lease_until`, and, alone, `ix_deliveries_dead_by_destination`.
    """
    values = {"tenant": tenant, "rows_max": rows_max, "dead_rows_max": dead_rows_max}
    async with ledger.statement() as connection:
        [row] = await connection.rows(_STANDINGS, values)
    return Standings(
        at=row["at"],
        capped=row["examined_count"] >= rows_max,
        pending_count=row["pending_count"],
        due_count=row["due_count"],
        oldest_due_at=row["oldest_due_at"],
        parked_count=row["parked_count"],
        ambiguous_count=row["ambiguous_count"],
        in_flight_count=row["in_flight_count"],
        dead_capped=row["dead_examined_count"] >= dead_rows_max,
        dead_counts=row["dead_counts"],
    )
