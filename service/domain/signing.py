"""Standard Webhooks v1: what is signed is `id.timestamp.body`, over the exact bytes sent. Pure.

Expected failure is a value: a secret that is none is None, a signature that does not hold is a
verdict. No junk from outside raises here.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Final

from service.domain import limits

SECRET_PREFIX: Final = "whsec_"  # noqa: S105 — the public marker of a secret, not one
SECRET_BYTES_NEW: Final = 32  # as long as the hash: longer keys add nothing
TOLERANCE_SECONDS: Final = 300  # how far a timestamp may be off before it is taken for a replay

_VERSION: Final = "v1,"
_TIMESTAMP: Final = re.compile("[0-9]{1,12}")  # bounded: `int` of thousands of digits raises


class Verdict(StrEnum):
    """What came of a verification. Each value but `valid` reads on after "invalid:"."""

    VALID = "valid"
    ID_UNUSABLE = "webhook-id is missing, not ASCII, or holds a dot"
    TIMESTAMP_UNUSABLE = "webhook-timestamp is missing or not Unix seconds"
    SIGNATURE_MISSING = "webhook-signature is missing or holds no v1 signature"
    TOO_OLD = "webhook-timestamp is too old"
    TOO_NEW = "webhook-timestamp is in the future"
    MISMATCH = "no signature matches the secret and the bytes"


def parse_secret(text: str) -> bytes | None:
    """The key of a `whsec_` secret, or None unless it is the base64 of 24 to 64 bytes."""
    try:
        key = base64.b64decode(text.removeprefix(SECRET_PREFIX), validate=True)
    except ValueError:  # not base64 (binascii.Error), or not ASCII
        return None
    # How strict `validate` is about the end of the text depends on the Python: one key has one text.
    return key if format_secret(key) == text else None


def format_secret(key: bytes) -> str | None:
    """The `whsec_` text of a key, or None unless it has 24 to 64 bytes."""
    fits = limits.SECRET_BYTES_MIN <= len(key) <= limits.SECRET_BYTES_MAX
    return SECRET_PREFIX + _base64(key) if fits else None


def new_secret(random_bytes: bytes) -> str:
    """The `whsec_` text of 32 fresh random bytes. Another number of them is a bug: ValueError."""
    if len(random_bytes) != SECRET_BYTES_NEW:
        raise ValueError(f"a new secret takes {SECRET_BYTES_NEW} random bytes")
    return SECRET_PREFIX + _base64(random_bytes)


def sign(webhook_id: str, unix_seconds: int, body: bytes, keys: Sequence[bytes]) -> str:
    """The `webhook-signature` of one attempt: one `v1,` signature for each key, in their order.

    `unix_seconds` must be the `webhook-timestamp` sent with it. Raises ValueError for an id with a
    dot, which is a bug: the signed content would then have more than one reading.
    """
    if "." in webhook_id:
        raise ValueError("a webhook-id must not hold a dot")
    content = _content(webhook_id, str(unix_seconds), body)
    return " ".join([_VERSION + _signature(key, content) for key in keys])


def verify(
    webhook_id: str | None,
    timestamp: str | None,
    signature: str | None,
    body: bytes,
    *,
    keys: Sequence[bytes],
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
    given = [part.removeprefix(_VERSION) for part in (signature or "").split() if part.startswith(_VERSION)]
    if not given:
        return Verdict.SIGNATURE_MISSING
    # The timestamp as it was written, not as a number: the sender signed these very characters.
    content = _content(webhook_id, timestamp, body)
    if not any(_matches(given, _signature(key, content)) for key in keys):
        return Verdict.MISMATCH
    age_seconds = now_unix_seconds - int(timestamp)
    if age_seconds > tolerance_seconds:
        return Verdict.TOO_OLD
    return Verdict.TOO_NEW if age_seconds < -tolerance_seconds else Verdict.VALID


def _content(webhook_id: str, timestamp: str, body: bytes) -> bytes:
    return f"{webhook_id}.{timestamp}.".encode() + body


def _signature(key: bytes, content: bytes) -> str:
    return _base64(hmac.digest(key, content, "sha256"))


def _base64(data: bytes) -> str:
    return binascii.b2a_base64(data, newline=False).decode()


def _matches(given: Sequence[str], expected: str) -> bool:
    # Compared in constant time, as bytes: `compare_digest` refuses text that is not ASCII. What
    # cannot be encoded becomes `?`, which no base64 holds.
    wanted = expected.encode()
    return any(hmac.compare_digest(wanted, one.encode(errors="replace")) for one in given)
