"""URLs and addresses: what is refused and why, and what is left as it was."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from service.domain.address import AllowList, DestinationUrl, UrlProblem, judge, judge_url, parse_proxy, parse_url

ACCEPTED = {
    # text: host, port, target, Host
    "http://h": ("h", 80, "/", "h"),
    "http://h:80/A": ("h", 80, "/A", "h"),
    "HTTPS://H.Example:8443/a": ("h.example", 8443, "/a", "h.example:8443"),
    "https://h:443": ("h", 443, "/", "h"),
    "http://h:443/": ("h", 443, "/", "h:443"),
    "http://h?": ("h", 80, "/?", "h"),
    "http://h?a=http://b@c": ("h", 80, "/?a=http://b@c", "h"),
    "http://h#a/b?c": ("h", 80, "/", "h"),
    "http://h/a%2Fb/./c?sig=%26%2B+x&z=a|b&empty=&dup=1&dup=2#frag": (
        *("h", 80),
        *("/a%2Fb/./c?sig=%26%2B+x&z=a|b&empty=&dup=1&dup=2", "h"),
    ),
    "http://8.8.8.8:65535//..": ("8.8.8.8", 65535, "//..", "8.8.8.8:65535"),
    "http://[2606:4700::0:1]:8080/": ("2606:4700::1", 8080, "/", "[2606:4700::1]:8080"),
    "https://[2606:4700::1]": ("2606:4700::1", 443, "/", "[2606:4700::1]"),
    "http://under_score.local-name.x2/": ("under_score.local-name.x2", 80, "/", "under_score.local-name.x2"),
    "http://1.2.3.example/": ("1.2.3.example", 80, "/", "1.2.3.example"),
    "http://xn--mnchen-3ya.example/": ("xn--mnchen-3ya.example", 80, "/", "xn--mnchen-3ya.example"),
    "http://xn--ls8h.la/": ("xn--ls8h.la", 80, "/", "xn--ls8h.la"),
    f"http://{'a' * 63}.example/": (f"{'a' * 63}.example", 80, "/", f"{'a' * 63}.example"),
}


@pytest.mark.parametrize(("text", "parts"), ACCEPTED.items(), ids=lambda value: str(value)[:40])
def test_a_url_is_read_into_its_parts(text: str, parts: tuple[str, int, str, str]) -> None:
    url = parse_url(text)
    assert isinstance(url, DestinationUrl), url
    assert (url.host, url.port, url.target, url.host_header) == parts
    assert url.text == text
    assert url.tls == text.lower().startswith("https")


REFUSED = {
    "": "empty",
    "http://h/" + "a" * 2_040: "longer than 2048",
    " http://h/x ": "blank",
    "http://h/a b": "blank",
    "http://127.0.0.1\t/": "blank",
    "http://h/\n": "blank",
    "http://h/\x00": "control",
    "http://h/\x7f": "control",
    "http://h/é": "outside ASCII",
    "http://h/\ud800": "outside ASCII",
    "http://😀.example/": "outside ASCII",
    "http://127。0。0。1/": "outside ASCII",
    "http://127.0.0.\uff11/": "outside ASCII",
    "http://good.example\\@127.0.0.1/": "backslash",
    "ftp://h/": "must start with http",
    "//h/": "must start with http",
    "h": "must start with http",
    "http:/h": "must start with http",
    "http:h": "must start with http",
    "javascript:alert(1)//": "must start with http",
    "http:///x": "no host",
    "http://": "no host",
    "http://:80/": "no host",
    "http://?a": "no host",
    "http://a@127.0.0.1#@good.example/": "user name",
    "http://a:b@h/": "user name",
    "http://@h/": "user name",
    "http://h:0/": "port",
    "http://h:99999/": "port",
    "http://h:65536/": "port",
    "http://h:/": "port",
    "http://h:080/": "port",
    "http://h:+80/": "port",
    "http://h:8_0/": "port",
    "http://h:80:80/": "port",
    "http://::1/": "port",
    "http://127.0.0.1%2eexample.com/": "escapes",
    "http://%68/": "escapes",
    "http://[fe80::1%25lo]/": "zone id",
    "http://[fe80::1%lo]/": "zone id",
    "http://[::1": "IPv6",
    "http://[::1]x/": "IPv6",
    "http://[1.2.3.4]/": "IPv6",
    "http://[v1.x]/": "IPv6",
    "http://[]/": "IPv6",
    "http://[::1]:0/": "port",
    "http://2130706433/": "looks like a number",
    "http://0x7f.1/": "looks like a number",
    "http://0x7f000001/": "looks like a number",
    "http://1.2.3.0x/": "looks like a number",
    "http://127.1/": "looks like a number",
    "http://0177.0.0.1/": "looks like a number",
    "http://0/": "looks like a number",
    "http://1.2.3.4.5/": "looks like a number",
    "http://256.1.1.1/": "looks like a number",
    "http://.x/": "Each part",
    "http://x./": "Each part",
    "http://a..b/": "Each part",
    f"http://{'a' * 64}.example/": "Each part",
    "http://-a.example/": "Each part",
    "http://a-.example/": "Each part",
    "http://a*.example/": "Each part",
    "http://a,b/": "Each part",
    "http://]/": "Each part",
    f"http://{'a.' * 127}a/": "longer than 253",
    "http://xn--a/": "international",
    "http://xn--abc-/": "Each part",
    "http://xn--aaaaaaaaaaaaaaaaaaaaa9999/": "international",
}


@pytest.mark.parametrize(("text", "reason"), REFUSED.items(), ids=lambda value: ascii(value)[:40])
def test_a_url_that_parsers_could_disagree_about_is_refused_in_one_sentence(text: str, reason: str) -> None:
    problem = parse_url(text)
    assert isinstance(problem, UrlProblem), problem
    assert reason in problem.detail
    assert problem.detail.endswith(".")
    assert problem.detail.isascii()
    assert "\n" not in problem.detail


def test_the_longest_url_is_accepted() -> None:
    assert isinstance(parse_url("http://h/" + "a" * 2_039), DestinationUrl)


def test_what_may_be_logged_of_a_url_has_no_path_and_no_query() -> None:
    url = parse_url("https://h.example:8443/hooks/T0KEN?sig=secret")
    assert isinstance(url, DestinationUrl)
    assert url.origin == "https://h.example:8443"
    assert "secret" not in repr(url)
    assert "T0KEN" not in repr(url)


NOT_PUBLIC = {
    "0.0.0.0": "this network",
    "10.1.2.3": "private",
    "100.64.0.1": "carrier",
    "100.127.255.255": "carrier",
    "127.0.0.1": "this machine",
    "168.63.129.16": "cloud",
    "169.254.169.254": "local link",
    "172.16.0.1": "private",
    "172.31.255.255": "private",
    "192.0.0.192": "protocol",
    "192.0.2.1": "documentation",
    "192.88.99.1": "6to4",
    "192.168.255.255": "private",
    "198.18.0.1": "benchmarks",
    "198.19.255.255": "benchmarks",
    "198.51.100.1": "documentation",
    "203.0.113.1": "documentation",
    "224.0.0.1": "multicast",
    "239.255.255.255": "multicast",
    "240.0.0.1": "reserved",
    "255.255.255.255": "reserved",
    "::": "no address",
    "::1": "this machine",
    "::127.0.0.1": "disguise",
    "::8.8.8.8": "disguise",
    "::ffff:127.0.0.1": "disguise",
    "::ffff:8.8.8.8": "disguise",
    "64:ff9b::7f00:1": "this machine",
    "64:ff9b::a00:1": "private",
    "64:ff9b:1::7f00:1": "translation",
    "64:ff9b:1::808:808": "translation",
    "2002:7f00:1::": "6to4",
    "2001:0:7f00:1::1": "Teredo",
    "2001:20::1": "protocol",
    "2001:db8::1": "documentation",
    "3fff::1": "documentation",
    "fec0::1": "private",
    "fe80::1": "local link",
    "fe80::1%1": "local link",
    "fc00::1": "private",
    "fd00:ec2::254": "private",
    "ff02::1": "multicast",
    "5f00::1": "segment routing",
    "100::1": "discard",
    "100:0:0:1::1": "discard",
    "4000::1": "outside",
    "::2:0:0:0:0": "outside",
}


@pytest.mark.parametrize(("text", "reason"), NOT_PUBLIC.items())
def test_a_non_public_address_is_refused_with_what_it_is(text: str, reason: str) -> None:
    denied = judge(ip_address(text), 443, AllowList())
    assert denied is not None
    assert denied.startswith(str(ip_address(text)))
    assert reason in denied


PUBLIC = (
    *("1.1.1.1", "8.8.8.8", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "126.255.255.255"),
    *("128.0.0.0", "168.63.129.15", "168.63.129.17", "169.253.255.255", "169.255.0.0", "172.15.255.255"),
    *("172.32.0.0", "192.0.1.0", "192.167.255.255", "192.169.0.0", "198.17.255.255", "198.20.0.0"),
    *("223.255.255.255", "2606:4700::1111", "2a00:1450::1", "2001:200::1", "2001:4860:4860::8888"),
    *("64:ff9b::808:808", "2620:4f:8000::1", "3ffe::1"),
)


@pytest.mark.parametrize("text", PUBLIC)
def test_a_public_address_next_to_a_denied_range_is_not_refused(text: str) -> None:
    assert judge(ip_address(text), 443, AllowList()) is None


def test_the_allow_list_covers_an_address_with_its_port() -> None:
    allow = AllowList.parse(" 127.0.0.0/8:* , ::1/128:8080,10.1.2.3:443 ")
    for address, port, allowed in [
        ("127.9.9.9", 1, True),
        ("::1", 8080, True),
        ("::1", 8081, False),
        ("10.1.2.3", 443, True),
        ("10.1.2.3", 80, False),
        ("10.1.2.4", 443, False),
        ("::ffff:127.0.0.1", 80, False),
        ("64:ff9b::7f00:1", 80, False),
    ]:
        assert (judge(ip_address(address), port, allow) is None) is allowed, (address, port)


@pytest.mark.parametrize("text", ["", "  "])
def test_an_empty_allow_list_allows_nothing(text: str) -> None:
    assert AllowList.parse(text) == AllowList()


@pytest.mark.parametrize(
    "text",
    ["127.0.0.0/8", "127.0.0.0/8:", "127.0.0.0/8:0", "127.0.0.1/8:80", "localhost:80", ":80", "*:80", "10.0.0.0/8:*,"],
)
def test_an_allow_list_that_cannot_be_read_says_so_in_plain_words(text: str) -> None:
    with pytest.raises(ValueError, match=r"must read network:port|is not a network such as"):
        AllowList.parse(text)


@pytest.mark.parametrize(
    ("text", "allow", "refused"),
    [
        ("http://10.0.0.1/", "", True),
        ("http://[::1]/", "", True),
        ("http://8.8.8.8/", "", False),
        ("http://localhost/", "", True),
        ("http://a.localhost/", "", True),
        ("http://localhost:8080/", "127.0.0.0/8:8080", False),
        ("http://localhost:8080/", "::1:8080", False),
        ("http://localhost:8081/", "127.0.0.0/8:8080", True),
        ("http://notlocalhost/", "", False),
        ("http://hooks.example/", "", False),
    ],
)
def test_intake_refuses_what_shows_without_a_lookup(text: str, allow: str, refused: bool) -> None:
    url = parse_url(text)
    assert isinstance(url, DestinationUrl)
    assert (judge_url(url, AllowList.parse(allow)) is not None) is refused


@pytest.mark.parametrize(
    ("text", "host", "port", "authorization"),
    [
        ("http://proxy.internal:3128", "proxy.internal", 3128, None),
        ("HTTP://10.0.0.5:8080/", "10.0.0.5", 8080, None),
        ("http://[fd00::5]:3128", "fd00::5", 3128, None),
        ("http://localhost:3128", "localhost", 3128, None),
        # RFC 7617, 2: Aladdin and his password; and its test in UTF-8.
        ("http://Aladdin:open%20sesame@proxy:3128", "proxy", 3128, "Basic QWxhZGRpbjpvcGVuIHNlc2FtZQ=="),
        ("http://test:123%C2%A3@proxy:3128", "proxy", 3128, "Basic dGVzdDoxMjPCow=="),
        ("http://user:@proxy:3128", "proxy", 3128, "Basic dXNlcjo="),
        ("http://u:p%40s%3As@proxy:3128", "proxy", 3128, "Basic dTpwQHM6cw=="),
    ],
)
def test_a_proxy_is_read_into_its_parts(text: str, host: str, port: int, authorization: str | None) -> None:
    proxy = parse_proxy(text)
    assert proxy is not None
    assert (proxy.host, proxy.port, proxy.authorization) == (host, port, authorization)
    assert authorization is None or authorization not in repr(proxy)


def test_no_proxy_is_none() -> None:
    assert parse_proxy("") is None


@pytest.mark.parametrize(
    "text",
    [
        *("proxy:3128", "http://proxy", "http://proxy:0", "http://proxy:99999", "https://proxy:3128", "socks5://p:1"),
        *("http://proxy:3128/path", "http://proxy:3128?a", "http://proxy:3128#a", " http://proxy:3128", "http://:3128"),
        *("http://very-secret@proxy:3128", "http://:very-secret@proxy:3128", "http://u:very-secret%@proxy:3128"),
        *("http://u:very-secret@x@proxy:3128", "http://u:very:secret@proxy:3128", "http://é:very-secret@proxy:3128"),
        *("http://u:very-secret/@proxy:3128", "http://u:p@proxy/:3128", "http://2130706433:3128", "http://pro xy:1"),
    ],
)
def test_a_proxy_that_cannot_be_read_says_so_in_plain_words_without_its_password(text: str) -> None:
    with pytest.raises(ValueError, match=r"^must ") as caught:
        parse_proxy(text)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("host", "address", "refused"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "127.0.0.2", False),
        ("0.0.0.0", "127.0.0.1", True),
        ("0.0.0.0", "::1", True),
        ("::", "127.0.0.1", True),
        ("8.8.8.8", "8.8.8.8", True),
        ("a.name", "127.0.0.1", False),
    ],
)
def test_this_service_itself_is_no_destination_whatever_is_allowed(host: str, address: str, refused: bool) -> None:
    allow = AllowList.parse("127.0.0.0/8:*,::1/128:*").without_ourselves(host, 8080)
    said = judge(ip_address(address), 8080, allow)
    assert (said is not None and "this service itself" in said) is refused
    assert judge(ip_address(address), 8081, allow) is None
