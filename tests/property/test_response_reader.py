"""The response reader does not care how bytes are cut into packets, and nothing makes it fail."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from service.domain.limits import EXCERPT_BYTES_MAX
from service.egress.response import Head, NotHttp, ResponseReader

Facts = tuple[Head | None, bytes, bool, bool, str | None]

LINES = st.sampled_from(
    [
        *(b"HTTP/1.1 200 OK", b"HTTP/1.1 102 Processing", b"HTTP/1.0 500 No", b"HTTP/1.1 204", b"HTTP/1.1 101 Go"),
        *(b"Content-Length: 5", b"Content-Length: 0", b"content-length:7", b"Content-Length: x", b"X Bad : 1"),
        *(b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked", b"Connection: close", b"X: \xff"),
        *(b"", b"", b"", b"5", b"hello", b"0", b"3;a=b", b"abc", b"zz"),
    ]
)
ENDS = st.sampled_from([b"\r\n", b"\r\n", b"\n"])
NEARLY_RESPONSES = st.one_of(
    st.lists(st.tuples(LINES, ENDS), max_size=10).map(lambda lines: b"".join(line + end for line, end in lines)),
    st.lists(st.tuples(LINES, ENDS), max_size=10).map(
        lambda lines: b"HTTP/1.1 200 OK\r\n" + b"".join(line + end for line, end in lines)
    ),
    st.binary(max_size=64),
    st.binary(max_size=64).map(lambda data: b"HTTP/1.1 200 OK\r\n\r\n" + data),
)


def _read(pieces: list[bytes]) -> Facts | str:
    reader = ResponseReader()
    try:
        for piece in pieces:
            reader.feed(piece)
    except NotHttp as error:
        return str(error)
    reader.feed_eof()
    return reader.head, bytes(reader.excerpt), reader.done, reader.reusable, reader.note


@given(NEARLY_RESPONSES, st.lists(st.integers(0, 400), max_size=5))
def test_a_response_reads_alike_however_it_is_cut(data: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    pieces = [data[start:end] for start, end in itertools.pairwise(edges)]
    ways = ([data], [piece for piece in pieces if piece], [bytes([byte]) for byte in data])
    assert len({repr(_lasting(_read(way))) for way in ways}) == 1


@given(NEARLY_RESPONSES)
def test_what_is_kept_is_bounded_and_a_head_has_three_digits(data: bytes) -> None:
    facts = _read([data])
    if not isinstance(facts, str) and facts[0] is not None:
        assert 100 <= facts[0].status_code <= 999
        assert facts[2], "a response whose connection ended is over"
        assert len(facts[1]) <= EXCERPT_BYTES_MAX


def _lasting(facts: Facts | str) -> object:
    """The facts, without the excerpt where a head contradicts itself: of that body only what came with it is taken."""
    if isinstance(facts, str) or "the body was not read to its end" not in (facts[4] or ""):
        return facts
    return facts[0], facts[2:]
