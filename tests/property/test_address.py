"""The URL rules hold for whatever is submitted."""

from __future__ import annotations

import contextlib
import socket
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from urllib.parse import urlsplit

from hypothesis import example, given
from hypothesis import strategies as st

from service.domain.address import AllowList, DestinationUrl, UrlProblem, judge, parse_url

# Texts near the border of what is accepted, where parsers part ways.
_PIECES = st.sampled_from(
    [
        *"aZ0.:/?#@[]%\\-_|~+&= \t\n\x00é。",
        "http://",
        "https://",
        "127.0.0.1",
        "::1",
        "0x7f",
        "xn--",
        "%2e",
        ":80",
        "//",
    ]
)
NEARLY_URLS = st.one_of(
    st.lists(_PIECES, max_size=12).map("".join),
    st.lists(_PIECES, max_size=12).map(lambda pieces: "http://" + "".join(pieces)),
    st.text(max_size=40).map(lambda text: f"http://{text}/"),
    st.text(),
)
V4 = st.integers(0, 2**32 - 1).map(IPv4Address)
V6 = st.integers(0, 2**128 - 1).map(IPv6Address)
UNICAST = IPv6Network("2000::/3")
NAT64 = IPv6Network("64:ff9b::/96")


@given(NEARLY_URLS)
@example("http://good.example\\@127.0.0.1/")
@example("http://a@127.0.0.1#@good.example/")
def test_parsing_never_raises_and_an_accepted_url_is_safe_to_write(text: str) -> None:
    url = parse_url(text)
    if isinstance(url, UrlProblem):
        assert url.detail
        return
    line = f"POST {url.target} HTTP/1.1 Host: {url.host_header}"
    assert line.isascii()
    assert line.isprintable()
    assert url.target.startswith("/")
    assert " " not in url.target
    assert "#" not in url.target
    assert 1 <= url.port <= 65_535
    assert url.scheme in ("http", "https")
    assert url.host == url.host.lower()
    assert not set(url.host) & set("@/?#%\\[] ")
    assert url.text == text


@given(NEARLY_URLS)
def test_an_accepted_url_names_the_same_host_to_the_standard_librarys_parser(text: str) -> None:
    url = parse_url(text)
    if isinstance(url, DestinationUrl):
        other = urlsplit(text)
        hostname = other.hostname or ""
        assert ip_address(hostname) == url.literal if url.literal else hostname == url.host
        assert (other.port or {"http": 80, "https": 443}[url.scheme]) == url.port
        assert other.username is None
        assert other.password is None


@given(NEARLY_URLS)
def test_what_a_url_is_rewritten_to_is_read_alike(text: str) -> None:
    url = parse_url(text)
    if isinstance(url, DestinationUrl):
        again = parse_url(url.origin + url.target)
        assert isinstance(again, DestinationUrl)
        assert (again.scheme, again.host, again.port, again.target, again.literal) == (
            *(url.scheme, url.host, url.port, url.target, url.literal),
        )


@given(st.text("0123456789abcdefx.", min_size=1, max_size=16))
def test_a_host_that_the_c_library_reads_as_a_number_is_a_literal_or_refused(host: str) -> None:
    try:
        address = IPv4Address(socket.inet_aton(host))
    except OSError:
        return
    url = parse_url(f"http://{host}/")
    assert isinstance(url, UrlProblem) or url.literal == address


@given(V4, st.integers(1, 65_535))
def test_an_ipv4_address_in_disguise_is_never_judged_more_mildly(address: IPv4Address, port: int) -> None:
    number = int(address)
    disguises = [
        number,  # compatible
        0xFFFF << 32 | number,  # mapped
        0x64FF9B << 96 | number,  # NAT64
        0x64FF9B0001 << 80 | number,  # NAT64, local
        0x2002 << 112 | number << 80,  # 6to4
        0x20010000 << 96 | number << 64,  # Teredo, the server
        0x20010000 << 96 | (number ^ 0xFFFFFFFF),  # Teredo, the client
    ]
    if judge(address, port, AllowList()) is not None:
        assert all(judge(IPv6Address(disguise), port, AllowList()) for disguise in disguises)


@given(V6, st.integers(1, 65_535))
def test_an_ipv6_address_outside_the_assigned_space_is_refused(address: IPv6Address, port: int) -> None:
    if address not in UNICAST and address not in NAT64:
        assert judge(address, port, AllowList()) is not None


@given(st.one_of(V4, V6), st.integers(1, 65_535))
def test_an_allow_list_of_everything_allows_everything_and_an_empty_one_nothing_more(
    address: IPv4Address | IPv6Address, port: int
) -> None:
    assert judge(address, port, AllowList.parse("0.0.0.0/0:*,::/0:*")) is None
    assert judge(address, port, AllowList.parse("")) == judge(address, port, AllowList())


@given(st.text())
def test_reading_an_allow_list_ends_in_one_or_in_a_value_error(text: str) -> None:
    with contextlib.suppress(ValueError):
        AllowList.parse(text)
