"""Weekly partitions, made ahead of time. A week is a range of UUIDv7 ids, which carry their time.

A DEFAULT partition takes what lies outside, such as the ids of an API whose clock is far off, so an
accept never fails for want of a partition. Retention drops whole weeks.
"""

from __future__ import annotations

import datetime as dt
import uuid
from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa

from service.ledger.session import Ledger, rows

PARTITIONED: Final = {"deliveries": "id", "payloads": "delivery_id", "attempts": "delivery_id"}
WEEKS_AHEAD: Final = 4

# Any number will do that nobody else takes: two dispatchers make no partition twice.
_LOCK: Final = 0x686F6F6B7061
_WEEK: Final = dt.timedelta(weeks=1)


@dataclass(frozen=True, slots=True)
class Week:
    """One week's partitions: `suffix` names them, ids from `first` up to, not including, `end` go there."""

    suffix: str
    first: uuid.UUID
    end: uuid.UUID


def weeks(now: dt.datetime, *, back: int = 0, ahead: int = WEEKS_AHEAD) -> list[Week]:
    """The ISO weeks around an instant, from `back` before to `ahead` after; they begin on Monday, UTC."""
    utc = now.astimezone(dt.UTC)
    monday = dt.datetime.combine(utc.date() - dt.timedelta(days=utc.weekday()), dt.time(), dt.UTC)
    return [_week(monday + number * _WEEK) for number in range(-back, ahead + 1)]


def _week(monday: dt.datetime) -> Week:
    year, number, _ = monday.isocalendar()
    return Week(f"{year}w{number:02}", _least_id(monday), _least_id(monday + _WEEK))


def _least_id(at: dt.datetime) -> uuid.UUID:
    """The least UUID whose first 48 bits are the instant's Unix milliseconds."""
    return uuid.UUID(int=int(at.timestamp() * 1000) << 80)


def statements(table: str, week: Week) -> list[str]:
    """What makes one partition without keeping anyone waiting.

    The table is made beside its parent and attached with a CHECK that proves its range, so that the
    attaching scans nothing of it; only the DEFAULT partition is looked through, and it is empty.
    """
    name = f"{table}_{week.suffix}"
    column = PARTITIONED[table]
    return [
        f"CREATE TABLE {name} (LIKE {table} INCLUDING ALL)",
        f"ALTER TABLE {table} ATTACH PARTITION {name} FOR VALUES FROM ('{week.first}') TO ('{week.end}')",
        f"COMMENT ON TABLE {name} IS 'ids by {column} of the ISO week {week.suffix}'",
    ]


_MISSING = sa.text("SELECT to_regclass(:name) IS NULL AS missing")


async def ensure_ahead(ledger: Ledger, now: dt.datetime, weeks_ahead: int = WEEKS_AHEAD) -> list[str]:
    """Make the partitions of this week and the next ones that are missing; answers their names.

    Each is a transaction of its own under an advisory lock, so that a lock on a parent is brief.
    """
    made = []
    for week in weeks(now, ahead=weeks_ahead):
        for table in PARTITIONED:
            name = f"{table}_{week.suffix}"
            async with ledger.transaction() as connection:
                await connection.execute(sa.text("SET LOCAL lock_timeout = '2s'"))
                await connection.execute(sa.text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
                if (await rows(connection, _MISSING, {"name": name}))[0]["missing"]:
                    for statement in statements(table, week):
                        await connection.execute(sa.text(statement))
                    made.append(name)
    return made
