"""Weeks of ids: the ranges have no gap and no overlap, and each id has the week of its millisecond."""

from __future__ import annotations

import datetime as dt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.domain.ids import RANDOM_BITS, uuid7
from service.ledger import partitions

INSTANTS = st.datetimes(
    min_value=dt.datetime(2020, 1, 1),  # noqa: DTZ001 — the strategy takes bare bounds and a zone
    max_value=dt.datetime(2100, 1, 1),  # noqa: DTZ001
    timezones=st.just(dt.UTC),
)
MONDAY = dt.datetime(2026, 11, 30, tzinfo=dt.UTC)


def test_a_weeks_range_begins_with_the_least_id_of_its_monday() -> None:
    [week] = partitions.weeks(MONDAY + dt.timedelta(days=2, hours=23), ahead=0)
    assert week.suffix == "2026w49"
    assert week.first.int == int(MONDAY.timestamp() * 1000) << 80


@given(INSTANTS, st.integers(min_value=0, max_value=2**RANDOM_BITS - 1))
def test_an_id_lies_in_the_week_of_its_millisecond(instant: dt.datetime, random_bits: int) -> None:
    [week] = partitions.weeks(instant, ahead=0)
    unix_ms = (instant - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(milliseconds=1)
    assert week.first <= uuid7(unix_ms, random_bits) < week.end


@given(INSTANTS)
def test_weeks_follow_each_other_without_gap_or_overlap(instant: dt.datetime) -> None:
    found = partitions.weeks(instant, back=3, ahead=60)
    assert [week.end for week in found[:-1]] == [week.first for week in found[1:]]
    assert len({week.suffix for week in found}) == len(found) == 64


def test_the_last_millisecond_of_a_sunday_and_the_first_of_a_monday_are_two_weeks() -> None:
    [before] = partitions.weeks(MONDAY - dt.timedelta(milliseconds=1), ahead=0)
    [after] = partitions.weeks(MONDAY, ahead=0)
    assert (before.suffix, after.suffix) == ("2026w48", "2026w49")


def test_a_year_of_53_weeks_names_them_all() -> None:
    across = partitions.weeks(dt.datetime(2026, 12, 28, tzinfo=dt.UTC), ahead=1)
    assert [week.suffix for week in across] == ["2026w53", "2027w01"]


@pytest.mark.parametrize("hours", [-11, 0, 14])
def test_an_instant_of_any_zone_has_the_week_of_its_utc(hours: int) -> None:
    zone = dt.timezone(dt.timedelta(hours=hours))
    assert partitions.weeks(MONDAY.astimezone(zone)) == partitions.weeks(MONDAY)


def test_a_partition_is_made_beside_its_parent_and_then_attached() -> None:
    [week] = partitions.weeks(MONDAY, ahead=0)
    create, attach, _ = partitions.statements("attempts", week)
    assert create == "CREATE TABLE attempts_2026w49 (LIKE attempts INCLUDING ALL)"
    assert attach == (
        f"ALTER TABLE attempts ATTACH PARTITION attempts_2026w49 FOR VALUES FROM ('{week.first}') TO ('{week.end}')"
    )
