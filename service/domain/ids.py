"""Identity: UUIDv7 inside, TypeID text outside. Pure: time and randomness are arguments.

Ids sort by the millisecond they were made in, in the database as in text, because both forms are
big-endian and begin with the time (RFC 9562 section 5.7; TypeID specification 0.3).
"""

from __future__ import annotations

import re
import uuid
from enum import StrEnum
from typing import Final, NewType

DeliveryId = NewType("DeliveryId", uuid.UUID)
DestinationId = NewType("DestinationId", uuid.UUID)
RedriveId = NewType("RedriveId", uuid.UUID)
KeyId = NewType("KeyId", uuid.UUID)


class Prefix(StrEnum):
    """What a TypeID names, with the separator, so that a text is `prefix + suffix`."""

    DELIVERY = "dlv_"
    DESTINATION = "dst_"
    REDRIVE = "rdv_"
    KEY = "key_"


UNIX_MS_BITS: Final = 48
RANDOM_BITS: Final = 74  # rand_a and rand_b of RFC 9562 taken as one number

_VERSION_AND_VARIANT: Final = 0x7 << 76 | 0b10 << 62
_RAND_B_BITS: Final = 62
_RAND_B_MASK: Final = (1 << _RAND_B_BITS) - 1

_ALPHABET: Final = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's, in lower case
_30_BITS: Final = (1 << 30) - 1
_PAIRS: Final = tuple(high + low for high in _ALPHABET for low in _ALPHABET)  # the text of ten bits
_SUFFIX: Final = re.compile(f"[0-7][{_ALPHABET}]{{25}}")  # 26 chars hold 130 bits: the first has 3
_TO_INT_DIGITS: Final = bytes.maketrans(_ALPHABET.encode(), b"0123456789abcdefghijklmnopqrstuv")


def uuid7(unix_ms: int, random_bits: int) -> uuid.UUID:
    """The UUIDv7 of a millisecond and 74 random bits.

    A caller that wants ids of one millisecond to rise passes a rising number: it is laid out
    big-endian. Raises ValueError for a number that does not fit, which is a bug of the caller.
    """
    if unix_ms >> UNIX_MS_BITS or random_bits >> RANDOM_BITS:  # a negative number shifts to -1
        raise ValueError("a UUIDv7 holds 48 bits of Unix milliseconds and 74 random bits")
    rand_a = random_bits >> _RAND_B_BITS
    rand_b = random_bits & _RAND_B_MASK
    return uuid.UUID(int=unix_ms << 80 | rand_a << 64 | rand_b | _VERSION_AND_VARIANT)


def to_typeid(prefix: Prefix, value: uuid.UUID) -> str:
    """The TypeID text: the prefix and 26 characters."""
    number = value.int
    # Spelled out because every delivery passes here several times. Thirty bits are one digit of
    # a Python integer, on which shifting is cheap; `join` beats an f-string and `+`.
    a, b, c, d = number >> 90 & _30_BITS, number >> 60 & _30_BITS, number >> 30 & _30_BITS, number & _30_BITS
    pairs = _PAIRS
    return "".join(
        (
            prefix,
            pairs[number >> 120],
            pairs[a >> 20],
            pairs[a >> 10 & 1023],
            pairs[a & 1023],
            pairs[b >> 20],
            pairs[b >> 10 & 1023],
            pairs[b & 1023],
            pairs[c >> 20],
            pairs[c >> 10 & 1023],
            pairs[c & 1023],
            pairs[d >> 20],
            pairs[d >> 10 & 1023],
            pairs[d & 1023],
        )
    )


def parse_typeid(prefix: Prefix, text: str) -> uuid.UUID | None:
    """The UUID of a TypeID text, or None for anything `to_typeid` would not have written.

    Upper case and Crockford's look-alikes are refused, so that one id has one text.
    """
    if not text.startswith(prefix):
        return None
    suffix = text[len(prefix) :]
    if _SUFFIX.fullmatch(suffix) is None:
        return None
    return uuid.UUID(int=int(suffix.encode().translate(_TO_INT_DIGITS), 32))
