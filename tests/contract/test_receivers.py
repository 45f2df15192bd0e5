"""The verifiers that docs/receivers.md hands out, run as they stand there, and one that shares no code with any.

What they judge is signed by the service. Node's and Python's `cryptography` both stand on OpenSSL, so a third does
the arithmetic of RFC 8032 in whole numbers.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from service import ed25519
from service.domain import signing

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "receivers.md").read_text(encoding="utf-8")
KEY = bytes(range(32))
SEEDS = [bytes([number]) * 32 for number in (1, 2)]
PUBLIC_KEYS = [signing.format_public_key(ed25519.public_key(seed)) for seed in SEEDS]
BODY = '{"n": 1.50, "é": "\\u0000"}'.encode() + bytes(range(256))
NODE = shutil.which("node")

Judge = Callable[[list[str], dict[str, str], bytes], bool]


def example(language: str, name: str) -> str:
    """The one example of the page in this language that defines this name and no server."""
    blocks: list[str] = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    [block] = [block for block in blocks if name in block]
    return block


def by_python(public_keys: list[str], headers: dict[str, str], body: bytes) -> bool:
    names: dict[str, Any] = {}
    exec(example("python", "public_keys: list[str]"), names)
    return bool(names["is_genuine"](public_keys, headers, body))


def by_node(public_keys: list[str], headers: dict[str, str], body: bytes) -> bool:
    if NODE is None:
        pytest.skip("no node on this machine")
    asked = json.dumps([public_keys, headers, base64.b64encode(body).decode()])
    script = f"""{example("js", "isGenuine(publicKeys")}
        const [publicKeys, headers, body] = {asked};
        console.log(isGenuine(publicKeys, headers, Buffer.from(body, "base64")));
    """
    done = subprocess.run(
        [NODE, "--input-type=module"], input=script, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stderr
    return {"true\n": True, "false\n": False}[done.stdout]


P = 2**255 - 19
ORDER = 2**252 + 27742317777372353535851937790883648493
D = -121665 * pow(121666, -1, P) % P
Point = tuple[int, int]


def add(a: Point, b: Point) -> Point:
    """RFC 8032, section 5.1.4, in affine coordinates: slow and short."""
    (x1, y1), (x2, y2) = a, b
    product = D * x1 * x2 * y1 * y2
    x = (x1 * y2 + y1 * x2) * pow(1 + product, -1, P)
    y = (y1 * y2 + x1 * x2) * pow(1 - product, -1, P)
    return x % P, y % P


def times(factor: int, point: Point) -> Point:
    total: Point = (0, 1)
    while factor:
        if factor & 1:
            total = add(total, point)
        point, factor = add(point, point), factor >> 1
    return total


def decoded(data: bytes) -> Point | None:
    """Section 5.1.3."""
    number = int.from_bytes(data, "little")
    sign, y = number >> 255, number & (1 << 255) - 1
    square = (y * y - 1) * pow(D * y * y + 1, -1, P) % P
    x = pow(square, (P + 3) // 8, P)
    if x * x % P != square:
        x = x * pow(2, (P - 1) // 4, P) % P
    if y >= P or x * x % P != square:
        return None
    return (P - x if x & 1 != sign else x), y


BASE = decoded((4 * pow(5, -1, P) % P).to_bytes(32, "little"))


def by_arithmetic(public_keys: list[str], headers: dict[str, str], body: bytes) -> bool:
    signed = b".".join([headers["webhook-id"].encode(), headers["webhook-timestamp"].encode(), body])
    if abs(time.time() - int(headers["webhook-timestamp"])) >= 300:
        return False
    for entry in headers["webhook-signature"].split(" "):
        version, _, text = entry.partition(",")
        signature = base64.b64decode(text)
        if version != "v1a" or len(signature) != 64:
            continue
        r, s = decoded(signature[:32]), int.from_bytes(signature[32:], "little")
        for public_key in public_keys:
            raw = base64.b64decode(public_key[5:])
            a = decoded(raw)
            if r is None or a is None or BASE is None or s >= ORDER:
                continue
            h = int.from_bytes(hashlib.sha512(signature[:32] + raw + signed).digest(), "little") % ORDER
            if times(s, BASE) == add(r, times(h, a)):  # section 5.1.7
                return True
    return False


JUDGES = [by_python, by_node, by_arithmetic]


def headers_of(*keys: bytes | signing.Ed25519Sign, age_seconds: int = 0) -> dict[str, str]:
    now = int(time.time()) - age_seconds
    return {
        "webhook-id": "dlv_1",
        "webhook-timestamp": str(now),
        "webhook-signature": signing.sign("dlv_1", now, BODY, keys),
    }


@pytest.mark.parametrize("judge", JUDGES)
def test_a_v1a_signature_is_accepted_by_verifiers_that_are_not_ours(judge: Judge) -> None:
    first, second = map(ed25519.signer, SEEDS)
    assert judge(PUBLIC_KEYS[:1], headers_of(first), BODY)
    assert judge(PUBLIC_KEYS[:1], headers_of(second, KEY, first), BODY)  # during a rotation, the older key
    assert judge(PUBLIC_KEYS, headers_of(second), BODY)


@pytest.mark.parametrize("judge", JUDGES)
def test_what_is_not_signed_with_the_key_is_refused_by_them(judge: Judge) -> None:
    first, second = map(ed25519.signer, SEEDS)
    assert not judge(PUBLIC_KEYS[:1], headers_of(first), BODY + b" ")
    assert not judge(PUBLIC_KEYS[:1], headers_of(second), BODY)
    assert not judge(PUBLIC_KEYS[:1], headers_of(KEY), BODY)
    assert not judge(PUBLIC_KEYS[:1], {**headers_of(first), "webhook-id": "dlv_2"}, BODY)
    assert not judge(PUBLIC_KEYS[:1], headers_of(first, age_seconds=400), BODY)
    for junk in ("", "v1a,", "v1a", "v1a, v1a,AAAA"):
        assert not judge(PUBLIC_KEYS, {**headers_of(first), "webhook-signature": junk}, BODY)


def test_the_verifier_by_hand_accepts_either_secret_during_a_rotation() -> None:
    names: dict[str, Any] = {}
    exec(example("python", "is_genuine(secret"), names)
    other = bytes(32)
    during = headers_of(other, KEY, ed25519.signer(SEEDS[0]))
    for key in (other, KEY):
        assert names["is_genuine"](signing.format_secret(key), during, BODY)
    assert not names["is_genuine"](signing.format_secret(KEY), headers_of(other), BODY)
    assert not names["is_genuine"](signing.format_secret(KEY), {**during, "webhook-signature": "v1, v1,"}, BODY)
