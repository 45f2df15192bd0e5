"""Whatever content type the intake takes can be sent."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from service.api.intake import _CONTENT_TYPE
from service.domain.headers import wire_problem

TEXTS = st.one_of(
    st.from_regex(_CONTENT_TYPE, fullmatch=True),
    st.text(st.characters(max_codepoint=0x100), max_size=40).map("text/plain;".__add__),
)


@given(TEXTS)
def test_an_accepted_content_type_is_a_header_that_may_be_written(text: str) -> None:
    if _CONTENT_TYPE.fullmatch(text):
        assert wire_problem([("content-type", text)]) is None
