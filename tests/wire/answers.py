"""The answers of the case file, byte for byte: played to the sender, and to a whole worker."""

from __future__ import annotations

import gzip
from dataclasses import dataclass

from service.domain.outcome import Fault
from tests.wire.receiver import close, drip, flood, hang, reset, send

HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
ZEROS = gzip.compress(bytes(1024 * 1024), 9)


@dataclass(frozen=True)
class Row:
    """An answer with a complete head, and what is kept of it."""

    answer: bytes
    status_code: int
    excerpt: bytes = b""
    note: str | None = None


RESPONDED = {
    "plain 200": Row(HEAD + b"Content-Length: 2\r\n\r\nok", 200, b"ok"),
    "200 without a body": Row(HEAD + b"Content-Length: 0\r\n\r\n", 200),
    "200 with HTML": Row(HEAD + b"Content-Type: text/html\r\nContent-Length: 6\r\n\r\n<html>", 200, b"<html>"),
    "200 without a reason": Row(b"HTTP/1.1 200\r\nContent-Length: 2\r\n\r\nok", 200, b"ok"),
    "200 to the end of the connection": Row(HEAD + b"\r\nok", 200, b"ok"),
    "200 of HTTP/1.0": Row(b"HTTP/1.0 200 OK\r\n\r\nok", 200, b"ok"),
    "200 with bare line feeds": Row(b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok", 200, b"ok"),
    "200 in chunks": Row(CHUNKED + b"2;x=y\r\nok\r\n3\r\nay!\r\n0\r\nTrailer: x\r\n\r\n", 200, b"okay!"),
    "204": Row(b"HTTP/1.1 204 No Content\r\n\r\n", 204),
    "100 and 103, then 200": Row(
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" + HEAD + b"\r\n", 200
    ),
    "trunc": Row(HEAD + b"Content-Length: 10\r\n\r\nabc", 200, b"abc", "ended early"),
    "badchunk": Row(CHUNKED + b"5\r\nab", 200, b"ab", "ended early"),
    "a chunk size that is none": Row(CHUNKED + b"2\r\nok\r\nzz\r\n", 200, b"ok", "malformed"),
    "a chunk longer than its size": Row(CHUNKED + b"2\r\nokay\r\n0\r\n\r\n", 200, b"ok", "malformed"),
    "a chunk size line without an end": Row(CHUNKED + b"1" * 5_000, 200, b"", "malformed"),
    "badgzip": Row(HEAD + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\nnope", 200, b"nope"),
    "badhdr": Row(HEAD + b"X Bad : 1\r\nContent-Length: 2\r\n\r\nok", 200, b"ok", "malformed"),
    "5xx head, then a broken body": Row(
        b"HTTP/1.1 503 Busy\r\nContent-Length: 10\r\n\r\nabc", 503, b"abc", "ended early"
    ),
    "odd: two different Content-Length": Row(
        HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nok", 200, b"ok", "no single valid Content-Length"
    ),
    "odd: Content-Length that is no number": Row(
        HEAD + b"Content-Length: +2\r\n\r\nok", 200, b"ok", "no single valid Content-Length"
    ),
    "odd: Content-Length of 5,000 digits": Row(
        HEAD + b"Content-Length: " + b"9" * 5_000 + b"\r\n\r\nok", 200, b"ok", "no single valid Content-Length"
    ),
    "odd: a length beside a coding": Row(
        HEAD + b"Content-Length: 99\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", 200, b"ok"
    ),
    "odd: an unknown coding": Row(HEAD + b"Transfer-Encoding: gzip\r\n\r\nok", 200, b"ok"),
    "odd: 101": Row(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\nwhatever", 101),
    "odd: status 600": Row(b"HTTP/1.1 600 What\r\nContent-Length: 0\r\n\r\n", 600),
    "odd: status 999": Row(b"HTTP/1.1 999 What\r\nContent-Length: 0\r\n\r\n", 999),
    "bytes: NUL": Row(HEAD + b"Content-Length: 1\r\n\r\n\x00", 200, b"\x00"),
    "bytes: not UTF-8": Row(HEAD + b"Content-Length: 2\r\n\r\n\xff\xfe", 200, b"\xff\xfe"),
    "bytes: an escaped NUL": Row(HEAD + b'Content-Length: 14\r\n\r\n{"a":"\\u0000"}', 200, b'{"a":"\\u0000"}'),
    "bytes: a Latin-1 header": Row(HEAD + b"X: caf\xe9\r\nContent-Length: 0\r\n\r\n", 200),
    "more than the response": Row(HEAD + b"Content-Length: 2\r\n\r\nokHTTP/1.1 500 Injected\r\n\r\n", 200, b"ok"),
}

# No complete head: the request may have arrived, and what ends the exchange.
FAULTS = {
    "reset right after the full request": (reset(), Fault.RESET),
    "close without an answer": (close(), Fault.RESET),
    "100, then close": (send(b"HTTP/1.1 100 Continue\r\n\r\n") + close(), Fault.RESET),
    "half a head, then close": (send(HEAD + b"Content-Le") + close(), Fault.RESET),
    "half a head, then reset": (send(HEAD + b"Content-Le") + reset(), Fault.RESET),
    "silence": (hang(), Fault.TIMEOUT),
    "hdrdrip": (drip(b"HTTP/1.1 102 Processing\r\n\r\n", 0.02), Fault.TIMEOUT),
    "header drip": (send(HEAD) + drip(b"X: y\r\n", 0.02), Fault.TIMEOUT),
    "interim heads as fast as they go": (flood(b"HTTP/1.1 102 Processing\r\n\r\n" * 100), Fault.GARBAGE),
    "odd: HTTP/0.9": (send(b"hello") + hang(), Fault.GARBAGE),
    "odd: a TLS alert": (send(b"\x15\x03\x01\x00\x02\x02\x16") + hang(), Fault.GARBAGE),
    "odd: a 200 kB header": (send(HEAD + b"X: " + b"y" * 200_000 + b"\r\n\r\n") + hang(), Fault.GARBAGE),
    "odd: a 64 kB head and an answer behind it": (
        send(HEAD + b"X: " + b"y" * 65_530 + b"\r\n\r\n" + HEAD + b"\r\n") + hang(),
        Fault.GARBAGE,
    ),
    "odd: status 099": (send(b"HTTP/1.1 099 What\r\n\r\n") + hang(), Fault.GARBAGE),
    "odd: HTTP/2": (send(b"HTTP/2 200\r\n\r\n") + hang(), Fault.GARBAGE),
    "odd: two digits": (send(b"HTTP/1.1 20 OK\r\n\r\n") + hang(), Fault.GARBAGE),
}

# A complete head, and a body that does not end.
BOTTOMLESS = {
    "bomb": send(HEAD + b"Content-Encoding: gzip\r\nContent-Length: 9999999\r\n\r\n") + flood(ZEROS),
    "endless": send(CHUNKED) + flood(b"1\r\na\r\n" * 1_000),
    "endless in one chunk": send(CHUNKED + b"ffffffffff\r\n") + flood(b"a" * 9_999),
    "endless trailers": send(CHUNKED + b"0\r\n") + flood(b"X: y\r\n" * 1_000),
    "endless to the end of the connection": send(HEAD + b"\r\n") + flood(b"a" * 9_999),
    "10 GB Content-Length": send(HEAD + b"Content-Length: 10000000000\r\n\r\n") + flood(b"a" * 9_999),
}

# Header lines, and what is handed on.
RETRY_AFTER = {
    "seconds": (b"Retry-After: 120\r\n", "120"),
    "two headers: the first": (b"Retry-After: 5\r\nretry-after: 300\r\n", "5"),
    "bytes": (b"Retry-After: \xff\r\n", "\xff"),
    "empty": (b"Retry-After:\r\n", ""),
    "none": (b"", None),
}
