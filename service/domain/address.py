"""Where a request may go: the one URL parser, and the one judge of numeric addresses. Pure.

The rule this module keeps: what is checked is what is dialled. Intake, the store and the sender
read a URL with `parse_url` and nothing else, and a spelling on which two parsers could disagree is
refused. Names prove nothing: `judge` looks at the numeric address a connection is about to use.
"""

from __future__ import annotations

import base64
import re
import unicodedata
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Final, Self
from urllib.parse import unquote_to_bytes

from service.domain.limits import HOST_CHARS_MAX, URL_CHARS_MAX

IPAddress = IPv4Address | IPv6Address
IPNetwork = IPv4Network | IPv6Network

PORTS_DEFAULT: Final = {"http": 80, "https": 443}

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_PORT = re.compile(r"[1-9][0-9]{0,4}")
_LABEL = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
# A name whose last label is a number is read as an IPv4 address by some parser or other (RFC 3986
# has only dotted decimal, the C library and browsers also take 0x7f.1, 0177.0.0.1 and 2130706433).
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_UNWANTED_IN_A_LABEL = frozenset({"Cc", "Cs", "Co", "Cn", "Zs", "Zl", "Zp"})


@dataclass(frozen=True, slots=True)
class DestinationUrl:
    """A URL that may be stored and sent to, subject to `judge`.

    `host` is lower-case ASCII without brackets, for TLS names and lookups. `target` is the request
    target as it goes on the wire: escapes, `+`, empty and repeated parameters as submitted, no
    fragment. `text` is what was submitted. The two that may carry a query stay out of `repr`.
    """

    scheme: str
    host: str
    port: int
    target: str = field(repr=False)
    text: str = field(repr=False)
    literal: IPAddress | None  # set when the host is a numeric address and needs no lookup

    @property
    def tls(self) -> bool:
        """Whether the connection is encrypted."""
        return self.scheme == "https"

    @property
    def host_header(self) -> str:
        """The value of `Host`: IPv6 in brackets, the port when it is not the scheme's own."""
        host = f"[{self.host}]" if isinstance(self.literal, IPv6Address) else self.host
        return host if self.port == PORTS_DEFAULT[self.scheme] else f"{host}:{self.port}"

    @property
    def origin(self) -> str:
        """Scheme, host and port: what may be shown and logged of a URL."""
        return f"{self.scheme}://{self.host_header}"


@dataclass(frozen=True, slots=True)
class UrlProblem:
    """Why a text is not a URL this service sends to: one sentence for whoever submitted it."""

    detail: str


def parse_url(text: str) -> DestinationUrl | UrlProblem:
    """Read a destination's URL, or say in one sentence why it is refused."""
    problem = _text_problem(text)
    if problem is not None:
        return UrlProblem(problem)
    scheme_match = _SCHEME.match(text)
    scheme = scheme_match[1].lower() if scheme_match else ""
    if scheme_match is None or scheme not in PORTS_DEFAULT:
        return UrlProblem("The URL must start with http:// or https://.")
    rest = text[scheme_match.end() :].partition("#")[0]
    authority = re.split(r"[/?]", rest, maxsplit=1)[0]
    target = rest[len(authority) :]
    if not target.startswith("/"):
        target = "/" + target
    endpoint = _parse_authority(authority, PORTS_DEFAULT[scheme])
    if isinstance(endpoint, UrlProblem):
        return endpoint
    host, port, literal = endpoint
    return DestinationUrl(scheme, host, port, target, text, literal)


def _text_problem(text: str) -> str | None:
    """What can be wrong with a URL's characters, wherever they stand in it."""
    if not text:
        return "The URL is empty."
    if len(text) > URL_CHARS_MAX:
        return f"The URL is longer than {URL_CHARS_MAX} characters."
    if not text.isascii():
        return "The URL has characters outside ASCII: write a host name in its xn-- form and escape the rest as %XX."
    if min(text) <= " " or max(text) == "\x7f":
        return "The URL has a blank or a control character in it."
    if "\\" in text:
        return "The URL has a backslash in it: write %5C where one is meant."
    return None


def _parse_authority(authority: str, port_default: int) -> tuple[str, int, IPAddress | None] | UrlProblem:
    """Split `host[:port]`. The port is refused rather than guessed when it is empty or padded."""
    if "@" in authority:
        return UrlProblem("The URL must not carry a user name or password: use a header.")
    if "%" in authority:
        return UrlProblem("The host must not have escapes or a zone id in it.")
    if authority.startswith("["):
        host, bracket, tail = authority[1:].partition("]")
        if not bracket or (tail and not tail.startswith(":")):
            return UrlProblem("The host is not a valid IPv6 address in brackets.")
        port_text = tail[1:] if tail else None
    else:
        host, colon, tail = authority.partition(":")
        port_text = tail if colon else None
    port = port_default if port_text is None else _parse_port(port_text)
    if port is None:
        return UrlProblem("The port must be a number from 1 to 65535.")
    if authority.startswith("["):
        return _parse_ipv6(host, port)
    return _parse_host(host.lower(), port)


def _parse_port(text: str) -> int | None:
    if _PORT.fullmatch(text) is None or int(text) > 65_535:
        return None
    return int(text)


def _parse_ipv6(text: str, port: int) -> tuple[str, int, IPAddress] | UrlProblem:
    try:
        literal = IPv6Address(text)
    except ValueError:
        return UrlProblem("The host is not a valid IPv6 address in brackets.")
    return str(literal), port, literal


def _parse_host(host: str, port: int) -> tuple[str, int, IPAddress | None] | UrlProblem:
    """A dotted-decimal IPv4 address or a DNS name; nothing that some parser reads as the other."""
    if not host:
        return UrlProblem("The URL has no host.")
    if len(host) > HOST_CHARS_MAX:
        return UrlProblem(f"The host is longer than {HOST_CHARS_MAX} characters.")
    labels = host.split(".")
    if _NUMBER.fullmatch(labels[-1]):
        try:
            return host, port, IPv4Address(host)
        except ValueError:
            return UrlProblem("The host looks like a number: write an IPv4 address as four decimal numbers.")
    for label in labels:
        if _LABEL.fullmatch(label) is None:
            return UrlProblem(
                "Each part of the host must be 1 to 63 letters, digits, hyphens or underscores, "
                "and neither start nor end with a hyphen."
            )
        if label.startswith("xn--") and not _is_a_label(label):
            return UrlProblem("The host has a part that starts with xn-- but is not a valid international name.")
    return host, port, None


def _is_a_label(label: str) -> bool:
    """Whether an `xn--` label is the one spelling of a text that can stand in a name."""
    encoded = label[len("xn--") :]
    try:
        decoded = encoded.encode("ascii").decode("punycode")
        canonical = decoded.encode("punycode").decode("ascii")
    except (UnicodeError, OverflowError):
        return False
    printable = all(unicodedata.category(char) not in _UNWANTED_IN_A_LABEL for char in decoded)
    return printable and not decoded.isascii() and canonical == encoded


# Every range that is not the public internet, and what it is. `ipaddress.is_global` is not used: on
# supported versions of Python it is wrong for several of these.
_NOT_PUBLIC: Final[tuple[tuple[IPNetwork, str], ...]] = tuple(
    (ip_network(network), name)
    for network, name in (
        ("0.0.0.0/8", "this network"),
        ("10.0.0.0/8", "a private network"),
        ("100.64.0.0/10", "a carrier's shared network"),
        ("127.0.0.0/8", "this machine"),
        ("168.63.129.16/32", "a cloud platform's host"),
        ("169.254.0.0/16", "the local link"),
        ("172.16.0.0/12", "a private network"),
        ("192.0.0.0/24", "protocol assignments"),
        ("192.0.2.0/24", "documentation"),
        ("192.88.99.0/24", "6to4 relays"),
        ("192.168.0.0/16", "a private network"),
        ("198.18.0.0/15", "benchmarks"),
        ("198.51.100.0/24", "documentation"),
        ("203.0.113.0/24", "documentation"),
        ("224.0.0.0/4", "multicast"),
        ("240.0.0.0/4", "reserved"),
        ("::/128", "no address"),
        ("::1/128", "this machine"),
        ("::ffff:0:0/96", "an IPv4 address in disguise"),
        ("::/96", "an IPv4 address in disguise"),
        ("64:ff9b:1::/48", "a local translation prefix"),
        ("100::/64", "discard"),
        ("100:0:0:1::/64", "discard"),
        ("2001::/32", "a Teredo tunnel"),
        ("2001::/23", "protocol assignments"),
        ("2001:db8::/32", "documentation"),
        ("2002::/16", "a 6to4 tunnel"),
        ("3fff::/20", "documentation"),
        ("5f00::/16", "segment routing"),
        ("fc00::/7", "a private network"),
        ("fe80::/10", "the local link"),
        ("fec0::/10", "a private network"),
        ("ff00::/8", "multicast"),
    )
)
_UNICAST: Final = IPv6Network("2000::/3")  # all of IPv6 that is assigned to the public internet
_NAT64: Final = IPv6Network("64:ff9b::/96")  # how an IPv6-only network reaches public IPv4: RFC 6052
_LOCAL_NAMES: Final = ("localhost", ".localhost")  # RFC 6761: always this machine


@dataclass(frozen=True, slots=True)
class AllowList:
    """The non-public ranges an operator lets destinations use, each with its port. Empty: none.

    `ours` is where this service itself listens, which no entry opens: it would deliver to itself.
    """

    entries: tuple[tuple[IPNetwork, int | None], ...] = ()  # no port: every port
    ours: frozenset[tuple[IPAddress, int]] = frozenset()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `network:port,network:*`; the last colon separates. Raises ValueError in plain words."""
        if not text.strip():
            return cls()
        return cls(tuple(_parse_entry(part.strip()) for part in text.split(",")))

    def without_ourselves(self, host: str, port: int) -> Self:
        """The same list for a service that listens there. A host that is a name names no address."""
        try:
            address = ip_address(host)
        except ValueError:
            return self
        local = (ip_address("127.0.0.1"), ip_address("::1")) if address.is_unspecified else (address,)
        return replace(self, ours=frozenset((each, port) for each in local))

    def permits(self, address: IPAddress, port: int) -> bool:
        """Whether an entry covers this very address; a disguise is covered by its own range alone."""
        return any(address in network and allowed in (None, port) for network, allowed in self.entries)


def _parse_entry(text: str) -> tuple[IPNetwork, int | None]:
    network_text, _, port_text = text.rpartition(":")
    port = _parse_port(port_text)
    if port is None and port_text != "*":
        raise ValueError(f"{text!r} must read network:port or network:*, such as 127.0.0.0/8:*")
    try:
        return ip_network(network_text), port
    except ValueError:
        raise ValueError(f"{network_text!r} is not a network such as 127.0.0.0/8 or ::1/128") from None


def judge(address: IPAddress, port: int, allow: AllowList) -> str | None:
    """Say why a connection to this address is refused, or nothing when it may be made."""
    if (address, port) in allow.ours:
        return f"{address} port {port} is this service itself"
    reason = _not_public(address)
    if reason is None or allow.permits(address, port):
        return None
    return f"{address} is not a public address ({reason})"


def judge_url(url: DestinationUrl, allow: AllowList) -> str | None:
    """Say at intake what the connection would be refused for, as far as it shows without a lookup."""
    if url.literal is not None:
        return judge(url.literal, url.port, allow)
    if url.host == _LOCAL_NAMES[0] or url.host.endswith(_LOCAL_NAMES[1]):
        refused = [judge(ip_address(local), url.port, allow) for local in ("127.0.0.1", "::1")]
        return refused[0] if all(refused) else None
    return None


def _not_public(address: IPAddress) -> str | None:
    for network, name in _NOT_PUBLIC:
        if address in network:
            return name
    if isinstance(address, IPv4Address) or address in _UNICAST:
        return None
    if address in _NAT64:
        return _not_public(IPv4Address(int(address) & 0xFFFF_FFFF))
    return "outside the public unicast space"


_PROXY_FORM: Final = "must read http://host:port or http://user:password@host:port"
_NOT_IN_USERINFO = re.compile(r"[/?#@\[\]]|%(?![0-9A-Fa-f]{2})")


@dataclass(frozen=True, slots=True)
class EgressProxy:
    """The proxy that every connection to a destination goes through, where a network requires one.

    Chosen by the operator, so its own address is not judged. `authorization` is the value of
    `Proxy-Authorization`; it stays out of `repr`.
    """

    host: str
    port: int
    literal: IPAddress | None
    authorization: str | None = field(repr=False)


def parse_proxy(text: str) -> EgressProxy | None:
    """Read EGRESS_PROXY; none when it is empty. Raises ValueError in plain words that repeat no value."""
    if not text:
        return None
    if _text_problem(text) is not None or not text.lower().startswith("http://"):
        raise ValueError(_PROXY_FORM)
    authority = text[len("http://") :].removesuffix("/")
    userinfo, at, host_and_port = authority.rpartition("@")
    endpoint = _parse_authority(host_and_port, 0)
    if isinstance(endpoint, UrlProblem) or endpoint[1] == 0:
        raise ValueError(_PROXY_FORM)
    host, port, literal = endpoint
    return EgressProxy(host, port, literal, _basic(userinfo) if at else None)


def _basic(userinfo: str) -> str:
    """RFC 7617, out of a URL's `user:password`, where what a URL cannot hold is escaped."""
    user, colon, password = userinfo.partition(":")
    if not user or not colon or ":" in password or _NOT_IN_USERINFO.search(userinfo):
        raise ValueError("must have the user and the password as user:password, with odd characters written as %XX")
    credentials = unquote_to_bytes(user) + b":" + unquote_to_bytes(password)
    return "Basic " + base64.b64encode(credentials).decode("ascii")
