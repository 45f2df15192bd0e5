"""Counts by tenant, minute and name: what rates are read from. Each is told to people, and decides nothing.

The minute is the ledger's, at the writing: processes whose clocks differ still count into one row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from service.domain import limits
from service.ledger.session import Ledger, Statement

_ADD = Statement("""
INSERT INTO tallies AS t (tenant, minute, name, count)
SELECT tenant, date_trunc('minute', now()), name, count
FROM unnest(CAST(:tenants AS text[]), CAST(:names AS text[]), CAST(:counts AS bigint[])) AS g(tenant, name, count)
ORDER BY tenant, name
ON CONFLICT (tenant, minute, name) DO UPDATE SET count = t.count + excluded.count
""")


async def add(ledger: Ledger, counts: Mapping[tuple[str, str], int]) -> None:
    """Add counts, by tenant and name, to the current minute's; in sorted order, so that no two processes deadlock.

    Guard: none, two answers to one count add up. Index: the primary key.
    """
    values = {
        "tenants": [tenant for tenant, _ in counts],
        "names": [name for _, name in counts],
        "counts": list(counts.values()),
    }
    async with ledger.statement() as connection:
        await connection.execute(_ADD, values)


@dataclass(frozen=True, slots=True)
class Recent:
    """A tenant's counts by name, over the window, which is `window_seconds` long, and over the day."""

    window_seconds: float
    window: dict[str, int]
    day: dict[str, int]


_RECENT = Statement("""
SELECT CAST(extract(epoch FROM now() - w.since) AS float8) AS window_seconds, t.name,
    CAST(coalesce(sum(t.count) FILTER (WHERE t.minute >= w.since), 0) AS bigint) AS window_count,
    CAST(sum(t.count) AS bigint) AS day_count
FROM (SELECT date_trunc('minute', now() - make_interval(secs => :window_seconds)) AS since) w
LEFT JOIN tallies t ON t.tenant = :tenant AND t.minute > now() - make_interval(secs => :day_seconds)
GROUP BY w.since, t.name
""")


async def recent(ledger: Ledger, tenant: str) -> Recent:
    """Read what a tenant's processes counted. A minute counts whole, so the window is up to one longer than asked.

    At most a row for each name and minute of a day. Index: the primary key.
    """
    values = {
        "tenant": tenant,
        "window_seconds": limits.STATS_WINDOW_SECONDS,
        "day_seconds": limits.TALLIES_KEPT_SECONDS,
    }
    async with ledger.statement() as connection:
        found = await connection.rows(_RECENT, values)
    named = [row for row in found if row["name"] is not None]
    return Recent(
        window_seconds=found[0]["window_seconds"],
        window={row["name"]: row["window_count"] for row in named},
        day={row["name"]: row["day_count"] for row in named},
    )


_FORGET = Statement("""
DELETE FROM tallies WHERE ctid = ANY(ARRAY(
    SELECT ctid FROM tallies WHERE minute <= now() - make_interval(secs => :kept_seconds)
    ORDER BY minute LIMIT :batch FOR UPDATE SKIP LOCKED
))
RETURNING 1
""")


async def forget(ledger: Ledger, *, batch: int = limits.TALLIES_FORGET_BATCH) -> int:
    """Delete counts older than a day, a batch of the oldest; answers how many. Index: `ix_tallies_minute`."""
    async with ledger.statement() as connection:
        return len(await connection.rows(_FORGET, {"kept_seconds": limits.TALLIES_KEPT_SECONDS, "batch": batch}))
