"""Ids keep their value through text, and their order in every form."""

from __future__ import annotations

import uuid

from hypothesis import given
from hypothesis import strategies as st

from service.domain.ids import RANDOM_BITS, UNIX_MS_BITS, Prefix, parse_typeid, to_typeid, uuid7

PREFIXES = st.sampled_from(Prefix)
MOMENTS = st.tuples(st.integers(0, (1 << UNIX_MS_BITS) - 1), st.integers(0, (1 << RANDOM_BITS) - 1))


@given(PREFIXES, st.uuids())
def test_an_id_survives_its_text(prefix: Prefix, value: uuid.UUID) -> None:
    assert parse_typeid(prefix, to_typeid(prefix, value)) == value


@given(PREFIXES, st.text() | st.text("01789abilouz", min_size=26, max_size=26).map("dlv_{}".format))
def test_one_id_has_one_text(prefix: Prefix, text: str) -> None:
    value = parse_typeid(prefix, text)
    assert value is None or to_typeid(prefix, value) == text


@given(MOMENTS, MOMENTS)
def test_ids_sort_by_time_and_then_by_their_random_bits(one: tuple[int, int], other: tuple[int, int]) -> None:
    first, second = uuid7(*one), uuid7(*other)
    texts = to_typeid(Prefix.DELIVERY, first), to_typeid(Prefix.DELIVERY, second)
    assert (one < other) == (first < second) == (first.bytes < second.bytes) == (texts[0] < texts[1])


@given(MOMENTS)
def test_every_uuid7_says_so_and_carries_its_time(moment: tuple[int, int]) -> None:
    made = uuid7(*moment)
    assert (made.version, made.variant) == (7, uuid.RFC_4122)
    assert made.int >> 80 == moment[0]
