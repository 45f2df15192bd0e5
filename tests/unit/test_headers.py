"""Headers: which may be configured, and which may be written."""

from __future__ import annotations

import pytest

from service.domain.headers import check_headers, wire_problem

REFUSED_NAMES = (
    *("host", "Host", "HOST", "content-length", "Transfer-Encoding", "connection", "expect", "te", "trailer"),
    *("upgrade", "keep-alive", "http2-settings", "accept-encoding", "proxy-authorization", "Proxy-Connection"),
    *("cookie", "content-type", "User-Agent", "idempotency-key", "webhook-id", "Webhook-Signature"),
    *("WEBHOOK-TIMESTAMP", "webhook-anything", "hookledger-attempt", "metadata", "Metadata-Flavor"),
    *("X-aws-ec2-metadata-token", "x-aws-ec2-metadata-token-ttl-seconds", "X-Metadata-Token"),
    *("x-metadata-token-ttl-seconds", "X-Google-Metadata-Request"),
)


@pytest.mark.parametrize("name", REFUSED_NAMES)
def test_a_header_that_is_not_the_customers_is_refused_in_any_case(name: str) -> None:
    problems = check_headers({name: "x"})
    assert [problem.name for problem in problems] == [name]


MALFORMED = {
    "a padded name": (" host", "x"),
    "a name with a blank": ("X A", "x"),
    "a name with a colon": ("X:A", "x"),
    "a name that holds a header": ("Host:evil", "x"),
    "no name": ("", "x"),
    "a long name": ("x" * 129, "x"),
    "a name beyond ASCII": ("é", "x"),
    "CR and LF": ("X-A", "a\r\nb: c"),
    "LF": ("X-A", "a\nb"),
    "LF at the end": ("X-A", "a\n"),
    "NUL": ("X-A", "a\x00"),
    "a tab": ("X-A", "a\tb"),
    "Latin-1": ("X-A", "é"),
    "a surrogate": ("X-A", "\ud800"),
    "DEL": ("X-A", "\x7f"),
    "a blank before": ("X-A", " a"),
    "a blank after": ("X-A", "a "),
    "a blank alone": ("X-A", " "),
    "64 kB": ("X-A", "a" * 65_536),
    "one too long": ("X-A", "a" * 2_049),
}


@pytest.mark.parametrize(("name", "value"), MALFORMED.values(), ids=MALFORMED.keys())
def test_a_header_that_cannot_stand_on_one_line_is_refused_twice(name: str, value: str) -> None:
    assert name in [problem.name for problem in check_headers({name: value})]
    assert wire_problem([(name, value)]) is not None


ALLOWED = {
    "Authorization": "Bearer abc.def",
    "X-Api-Key": "a b",
    "traceparent": "00-0-0-01",
    "Accept": "*/*",
    "X-Empty": "",
    "x!#$%&'*+-.^_`|~": "~ !",
    "x" * 128: "a" * 2_048,
}


def test_any_other_header_is_allowed() -> None:
    assert check_headers(ALLOWED) == []
    assert wire_problem(list(ALLOWED.items())) is None


def test_the_number_and_the_size_of_headers_are_limited() -> None:
    assert check_headers({f"X-{number}": "a" for number in range(32)}) == []
    assert [problem.name for problem in check_headers({f"X-{number}": "a" for number in range(33)})] == [""]
    value = "a" * 2_000
    assert check_headers({f"X-{number}": value for number in range(4)}) == []
    assert [problem.name for problem in check_headers({f"X-{number}": value for number in range(5)})] == [""]


def test_two_spellings_of_one_name_are_refused() -> None:
    assert [problem.name for problem in check_headers({"X-A": "1", "x-a": "2"})] == ["x-a"]


def test_a_problem_never_shows_the_value() -> None:
    problems = check_headers({"Authorization": "Bearer s3cret\n", "Cookie": "s3cret"})
    assert len(problems) == 2
    assert "s3cret" not in repr(problems) + str(wire_problem([("Authorization", "Bearer s3cret\n")]))


def test_the_services_own_headers_may_be_written_once() -> None:
    own = [("Webhook-Id", "msg_1"), ("Content-Type", "text/plain"), ("User-Agent", "Hookledger")]
    assert wire_problem(own) is None
    assert wire_problem([*own, ("webhook-id", "forged")]) == "header 'webhook-id': The header stands twice."
    assert wire_problem([*own, ("Proxy-Authorization", "x")]) is not None
    assert wire_problem([*own, ("X-A", "a\nb")]) is not None
    assert wire_problem([*own, ("HOST", "x")]) == "header 'HOST': The header belongs to the connection."


@pytest.mark.parametrize("name", ["webhook_signature", "Webhook_Id", "content_length", "Transfer_Encoding", "proxy_x"])
def test_a_name_that_some_servers_take_for_one_of_ours_is_refused(name: str) -> None:
    """CGI and WSGI put an underscore where a hyphen was, and cannot tell the two apart."""
    assert [problem.name for problem in check_headers({name: "x"})] == [name]
