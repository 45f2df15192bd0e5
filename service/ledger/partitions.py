"""Weekly partitions, made ahead of time, and statements that go straight to one.

A week is a range of UUIDv7 ids, which carry their time.

A DEFAULT partition takes what lies outside, such as the ids of an API whose clock is far off, so an
accept never fails for want of a partition. Retention drops whole weeks.
"""

from __future__ import annotations

import datetime as dt
import functools
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from service.errors import LedgerRefused, LedgerUnavailable
from service.ledger.columns import Columns, first_of
from service.ledger.session import Ledger, Row, Statement

PARTITIONED: Final = {"deliveries": "id", "payloads": "delivery_id", "attempts": "delivery_id"}
WEEKS_AHEAD: Final = 4

# Any number will do that nobody else takes: two dispatchers make no partition twice.
_LOCK: Final = 0x686F6F6B7061
_CHECK_VIOLATION: Final = "23514"
_IN_THE_WAY: Final = ("55P03", "57014")  # lock_timeout and statement_timeout ran out
_NOT_THERE_FOR_US: Final = ("42P01", "42501")  # no such table; no right to it
_WEEK: Final = dt.timedelta(weeks=1)
_WEEK_MS: Final = 7 * 86_400_000
_EPOCH_MONDAY: Final = dt.datetime(1969, 12, 29, tzinfo=dt.UTC)  # of the week in which Unix time begins
_EPOCH_TO_MONDAY_MS: Final = 3 * 86_400_000
_WEEKS_KEPT: Final = 16
_FORMS_KEPT: Final = 2 * _WEEKS_KEPT  # of a statement
_NO_COLUMNS: Final[Mapping[str, Sequence[Any]]] = {}
_ELSEWHERE_SECONDS: Final = 60.0


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
    """What makes one partition.

    The table is made beside its parent and attached, which leaves reading and writing the parent
    free; CREATE TABLE … PARTITION OF would lock all of it. Only the DEFAULT partition is locked
    whole, and looked through: briefly, because it is normally empty.
    """
    name = _name(table, week)
    column = PARTITIONED[table]
    return [
        f"CREATE TABLE {name} (LIKE {table} INCLUDING ALL)",
        f"ALTER TABLE {table} ATTACH PARTITION {name} FOR VALUES FROM ('{week.first}') TO ('{week.end}')",
        f"COMMENT ON TABLE {name} IS 'ids by {column} of the ISO week {week.suffix}'",
    ]


def _name(table: str, week: Week) -> str:
    return f"{table}_{week.suffix}"


class Weekly:
    """A statement over `{deliveries}`, `{payloads}` and `{attempts}`: sent to one week's partitions where that serves.

    Through their parents, what a statement costs before it touches a row grows with every week that is kept: each
    partition is opened and locked. Straight to a partition it costs the same after years. The rows of a week
    are all in its partition or, when that could not be made, all elsewhere; then, and where the role has no
    right to the partition itself, the statement goes to the parents.
    """

    def __init__(self, text: str, given: Columns | None = None) -> None:
        """`given`: the rows that take the place of `{given}`."""
        self._text = text
        self._given = given
        self.everywhere = self._write(None, alone=False)
        self._remembered = functools.lru_cache(_FORMS_KEPT)(self._write)
        self._elsewhere: dict[str, float] = {}  # weeks without partitions for us, and until when not to ask again

    async def rows(
        self,
        ledger: Ledger,
        ids: Collection[uuid.UUID],
        values: Mapping[str, Any],
        given: Mapping[str, Sequence[Any]] = _NO_COLUMNS,
    ) -> list[Row]:
        """Run it in one commit for deliveries with these ids, and read its rows.

        `given`: the values of the rows it is given, by the column; as many as there are ids.
        """
        alone = self._given is not None and len(ids) == 1
        values = {**values, **(first_of(given) if alone else given)}
        week = week_of(ids)
        if week is not None and self._elsewhere.get(week, 0.0) <= time.monotonic():
            try:
                async with ledger.statement() as connection:
                    return await connection.rows(self._remembered(week, alone=alone), values)
            except LedgerRefused as refused:
                if refused.sqlstate not in _NOT_THERE_FOR_US:
                    raise
                if len(self._elsewhere) >= _WEEKS_KEPT:
                    self._elsewhere.clear()
                self._elsewhere[week] = time.monotonic() + _ELSEWHERE_SECONDS
        async with ledger.statement() as connection:
            return await connection.rows(self._remembered(None, alone=alone), values)

    def _write(self, suffix: str | None, *, alone: bool) -> Statement:
        names = {table: f"{table}_{suffix}" if suffix else table for table in PARTITIONED}
        if self._given is not None:
            names["given"] = self._given.alone if alone else self._given.together
        return Statement(self._text.format_map(names))


def week_of(ids: Collection[uuid.UUID]) -> str | None:
    """The suffix of the week that all of the ids lie in; None when there are several, or none."""
    weeks_begun = {((each.int >> 80) + _EPOCH_TO_MONDAY_MS) // _WEEK_MS for each in ids}
    return _suffix(weeks_begun.pop()) if len(weeks_begun) == 1 else None


@functools.lru_cache(maxsize=64)
def _suffix(weeks_begun: int) -> str | None:
    try:
        return _week(_EPOCH_MONDAY + weeks_begun * _WEEK).suffix
    except OverflowError:  # an id of no time that a calendar knows
        return None


# Not `to_regclass`: it answers from the session's cache, which waiting for an advisory lock does not
# renew, so it would miss what another dispatcher made in the meantime.
_MISSING = Statement("""
SELECT name FROM unnest(CAST(:names AS text[])) AS name
WHERE NOT EXISTS (
    SELECT FROM pg_class JOIN pg_namespace ON pg_namespace.oid = relnamespace
    WHERE relname = name AND nspname = current_schema()
)
""")

# Nobody waits behind the advisory lock but other dispatchers. Behind a wait for the DEFAULT
# partition everybody does, and again while it is looked through: those are kept short.
_WAIT_FOR_TURN = Statement("SELECT set_config('lock_timeout', '5s', true)")
_TAKE_TURN = Statement("SELECT pg_advisory_xact_lock(:key)")
_BE_BRIEF = Statement("SELECT set_config('lock_timeout', '500ms', true), set_config('statement_timeout', '1s', true)")


async def ensure_ahead(ledger: Ledger, now: dt.datetime, weeks_ahead: int = WEEKS_AHEAD) -> list[str]:
    """Make the partitions of this week and the next ones that are missing; answers their names.

    Each is a transaction of its own under an advisory lock, so that a lock on a parent is brief.
    Raises LedgerRefused when a table is in use, and also when a week's rows stand in a DEFAULT
    partition already: they stay there, and the other weeks are made before it is said.
    """
    wanted = {_name(table, week): (table, week) for week in weeks(now, ahead=weeks_ahead) for table in PARTITIONED}
    async with ledger.statement() as connection:
        missing = {row["name"] for row in await connection.rows(_MISSING, {"names": list(wanted)})}
    made, strayed = [], []
    for name in filter(missing.__contains__, wanted):
        table, week = wanted[name]
        match await _make(ledger, table, week):
            case "made":
                made.append(name)
            case "strays":
                strayed.append(name)
            case "there":  # another dispatcher was quicker
                pass
    if strayed:
        raise LedgerRefused(f"rows in the DEFAULT partitions belong to {', '.join(strayed)}", _CHECK_VIOLATION)
    return made


async def _make(ledger: Ledger, table: str, week: Week) -> Literal["made", "there", "strays"]:
    """One partition, in one transaction. Guard: the advisory lock. Index: the DEFAULT partition's key."""
    column = PARTITIONED[table]
    strays = Statement(f"SELECT 1 FROM {table}_default WHERE {column} >= :first AND {column} < :end LIMIT 1")
    try:
        async with ledger.transaction() as connection:
            await connection.execute(_WAIT_FOR_TURN)
            await connection.execute(_TAKE_TURN, {"key": _LOCK})
            await connection.execute(_BE_BRIEF)
            if not await connection.rows(_MISSING, {"names": [_name(table, week)]}):
                return "there"
            if await connection.rows(strays, {"first": week.first, "end": week.end}):
                return "strays"  # attaching would look through all of them, with everybody waiting, and fail
            for statement in statements(table, week):
                await connection.execute(Statement(statement))
    except LedgerUnavailable as error:
        # A dump that reads the DEFAULT partition, say. The ledger is well, and asking again at once
        # would make everybody wait again.
        state = str(getattr(error.__cause__, "sqlstate", None))
        if state in _IN_THE_WAY:
            raise LedgerRefused(f"{table} is in use: {_name(table, week)} was not made ({state})", state) from error
        raise
    return "made"
