"""Signing secrets at rest: AES-256-GCM, bound to the tenant and destination they belong to.

A ciphertext says which key made it, so that keys rotate; moved to another row it does not decrypt. The
seed of a `v1a` pair is bound to its public key as well: it is never taken for a `v1` secret, nor by a
version of the service that knows no pairs.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from service.errors import KeyringError

_NONCE_BYTES = 12


class Keyring:
    """Encrypts with its first key, decrypts with any. `random_bytes` is `os.urandom` outside of tests."""

    def __init__(self, keys: Mapping[str, bytes], random_bytes: Callable[[int], bytes]) -> None:
        self._ciphers = {key_id: AESGCM(key) for key_id, key in keys.items()}
        self._current = next(iter(keys))
        self._random_bytes = random_bytes

    def encrypt(self, secret: bytes, *, tenant: str, destination_id: uuid.UUID, public_key: str | None) -> bytes:
        """The ciphertext: key id, a colon, nonce, sealed secret. `public_key` is the text of a pair's."""
        nonce = self._random_bytes(_NONCE_BYTES)
        sealed = self._ciphers[self._current].encrypt(nonce, secret, _bound_to(tenant, destination_id, public_key))
        return self._current.encode() + b":" + nonce + sealed

    def decrypt(self, ciphertext: bytes, *, tenant: str, destination_id: uuid.UUID, public_key: str | None) -> bytes:
        """The secret. Raises KeyringError when no key of the ring opens it for this row."""
        key_id, _, rest = ciphertext.partition(b":")
        cipher = self._ciphers.get(key_id.decode("ascii", "replace"))
        if cipher is None:
            raise KeyringError("a signing secret was encrypted with a key that SECRET_KEYS does not hold")
        try:
            bound_to = _bound_to(tenant, destination_id, public_key)
            return cipher.decrypt(rest[:_NONCE_BYTES], rest[_NONCE_BYTES:], bound_to)
        except (InvalidTag, ValueError) as error:
            raise KeyringError("a signing secret does not decrypt for its destination") from error


def _bound_to(tenant: str, destination_id: uuid.UUID, public_key: str | None) -> bytes:
    # No tenant holds a NUL, which Postgres' text cannot: the parts have one reading.
    return destination_id.bytes + tenant.encode() + (b"" if public_key is None else b"\x00" + public_key.encode())
