"""Standard Webhooks: what is signed is `id.timestamp.body`, over the exact bytes sent. Pure.

`v1` is HMAC-SHA256 under a secret that both sides hold, `v1a` Ed25519 under a key that the sender
alone holds. The arithmetic of Ed25519 is no part of the standard library, so it comes in as a function
(`service/ed25519.py`).

Expected failure is a value: a secret that is none is None, a signature that does not hold is a
verdict. No junk from outside raises here.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import re
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Final

from service.domain import limits

SECRET_PREFIX: Final = "whsec_"  # noqa: S105 — the public marker of a secret, not one
PRIVATE_KEY_PREFIX: Final = "whsk_"
PUBLIC_KEY_PREFIX: Final = "whpk_"
SECRET_BYTES_NEW: Final = 32  # as long as the hash: longer keys add nothing
SEED_BYTES: Final = 32  # of Ed25519: what a private key is derived from (RFC 8032)
PUBLIC_KEY_BYTES: Final = 32
TOLERANCE_SECONDS: Final = 300  # how far a timestamp may be off before it is taken for a replay

_SIGNATURE_A_BYTES: Final = 64
_TIMESTAMP: Final = re.compile("[0-9]{1,12}")  # bounded: `int` of thousands of digits raises


# A `v1` key is its bytes; the halves of a `v1a` pair are what can be done with them.
Ed25519Sign = Callable[[bytes], bytes]  # content → signature
Ed25519Verify = Callable[[bytes, bytes], bool]  # signature, content → whether it holds


class Scheme(StrEnum):
    """How a signature is made: the identifier in front of its comma."""

    V1 = "v1"
    V1A = "v1a"


class Verdict(StrEnum):
    """What came of a verification. Each value but `valid` reads on after "invalid:"."""

    VALID = "valid"
    ID_UNUSABLE = "webhook-id is missing, not ASCII, or holds a dot"
    TIMESTAMP_UNUSABLE = "webhook-timestamp is missing or not Unix seconds"
    SIGNATURE_MISSING = "webhook-signature is missing or holds none of the kind that the secret checks"
    TOO_OLD = "webhook-timestamp is too old"
    TOO_NEW = "webhook-timestamp is in the future"
    MISMATCH = "no signature matches the secret and the bytes"


def parse_secret(text: str) -> bytes | None:
    """The key of a `whsec_` secret, or None unless it is the base64 of 24 to 64 bytes."""
    key = _decode(text, SECRET_PREFIX)
    return key if key is not None and format_secret(key) is not None else None


def format_secret(key: bytes) -> str | None:
    """The `whsec_` text of a key, or None unless it has 24 to 64 bytes."""
    fits = limits.SECRET_BYTES_MIN <= len(key) <= limits.SECRET_BYTES_MAX
    return SECRET_PREFIX + _base64(key) if fits else None


def new_secret(random_bytes: bytes) -> str:
    """The `whsec_` text of 32 fresh random bytes. Another number of them is a bug: ValueError."""
    if len(random_bytes) != SECRET_BYTES_NEW:
        raise ValueError(f"a new secret takes {SECRET_BYTES_NEW} random bytes")
    return SECRET_PREFIX + _base64(random_bytes)


def parse_private_key(text: str) -> tuple[bytes, bytes] | None:
    """The seed and the public key of a `whsk_` key, or None unless it is the base64 of both, 64 bytes.

    Whether the one belongs to the other is not asked here: that takes arithmetic.
    """
    pair = _decode(text, PRIVATE_KEY_PREFIX)
    if pair is None or len(pair) != SEED_BYTES + PUBLIC_KEY_BYTES:
        return None
    return pair[:SEED_BYTES], pair[SEED_BYTES:]


def parse_public_key(text: str) -> bytes | None:
    """The bytes of a `whpk_` key, or None unless it is the base64 of 32 bytes."""
    key = _decode(text, PUBLIC_KEY_PREFIX)
    return key if key is not None and len(key) == PUBLIC_KEY_BYTES else None


def format_public_key(key: bytes) -> str:
    """The `whpk_` text of a public key's 32 bytes."""
    return PUBLIC_KEY_PREFIX + _base64(key)


def sign(webhook_id: str, unix_seconds: int, body: bytes, keys: Sequence[bytes | Ed25519Sign]) -> str:
    """The `webhook-signature` of one attempt: one signature for each key, in their order.

    `unix_seconds` must be the `webhook-timestamp` sent with it. Raises ValueError for an id with a
    dot, which is a bug: the signed content would then have more than one reading.
    """
    if "." in webhook_id:
        raise ValueError("a webhook-id must not hold a dot")
    content = _content(webhook_id, str(unix_seconds), body)
    return " ".join([_entry(key, content) for key in keys])


def verify(
    webhook_id: str | None,
    timestamp: str | None,
    signature: str | None,
    body: bytes,
    *,
    keys: Sequence[bytes | Ed25519Verify],
    now_unix_seconds: float,
    tolerance_seconds: float = TOLERANCE_SECONDS,
) -> Verdict:
    """Hold the three headers, as received, against the body. Valid when any key matches any signature.

    The time is judged last: of a forged request its age says nothing.
    """
    if not webhook_id or not webhook_id.isascii() or "." in webhook_id:
        return Verdict.ID_UNUSABLE
    if timestamp is None or _TIMESTAMP.fullmatch(timestamp) is None:
        return Verdict.TIMESTAMP_UNUSABLE
    given = _by_scheme(signature or "")
    if not any(given[scheme] for scheme in {_scheme_of(key) for key in keys} or Scheme):
        return Verdict.SIGNATURE_MISSING
    # The timestamp as it was written, not as a number: the sender signed these very characters.
    content = _content(webhook_id, timestamp, body)
    if not any(_holds(given[_scheme_of(key)], key, content) for key in keys):
        return Verdict.MISMATCH
    age_seconds = now_unix_seconds - int(timestamp)
    if age_seconds > tolerance_seconds:
        return Verdict.TOO_OLD
    return Verdict.TOO_NEW if age_seconds < -tolerance_seconds else Verdict.VALID


def _content(webhook_id: str, timestamp: str, body: bytes) -> bytes:
    return f"{webhook_id}.{timestamp}.".encode() + body


def _entry(key: bytes | Ed25519Sign, content: bytes) -> str:
    if isinstance(key, bytes):
        return f"{Scheme.V1},{_signature(key, content)}"
    return f"{Scheme.V1A},{_base64(key(content))}"


def _signature(key: bytes, content: bytes) -> str:
    return _base64(hmac.digest(key, content, "sha256"))


def _by_scheme(header: str) -> dict[Scheme, list[str]]:
    """The signatures of a header by their scheme; those of any other are left out."""
    parts = [part.partition(",") for part in header.split()]
    return {scheme: [given for name, comma, given in parts if comma and name == scheme] for scheme in Scheme}


def _scheme_of(key: bytes | Ed25519Verify) -> Scheme:
    return Scheme.V1 if isinstance(key, bytes) else Scheme.V1A


def _holds(given: Sequence[str], key: bytes | Ed25519Verify, content: bytes) -> bool:
    if isinstance(key, bytes):
        return _matches(given, _signature(key, content))
    signatures = [_decode(one, "") for one in given]
    return any(one is not None and len(one) == _SIGNATURE_A_BYTES and key(one, content) for one in signatures)


def _decode(text: str, prefix: str) -> bytes | None:
    """The bytes whose base64 stands after the prefix, or None. Bytes have one text: no other is taken."""
    try:
        data = base64.b64decode(text.removeprefix(prefix), validate=True)
    except ValueError:  # not base64 (binascii.Error), or not ASCII
        return None
    # How strict `validate` is about the end of the text depends on the Python.
    return data if prefix + _base64(data) == text else None


def _base64(data: bytes) -> str:
    return binascii.b2a_base64(data, newline=False).decode()


def _matches(given: Sequence[str], expected: str) -> bool:
    # Compared in constant time, as bytes: `compare_digest` refuses text that is not ASCII. What
    # cannot be encoded becomes `?`, which no base64 holds.
    wanted = expected.encode()
    return any(hmac.compare_digest(wanted, one.encode(errors="replace")) for one in given)
