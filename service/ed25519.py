"""Ed25519, for `v1a` signatures: what the rules of `domain/signing.py` need and the standard library lacks.

A pair is kept as its seed, 32 bytes (RFC 8032); the public key follows from it. The private half leaves
the process in no form.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from service.domain import signing


def public_key(seed: bytes) -> bytes:
    """The 32 bytes of the public key that belongs to a seed."""
    return Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()


def seed_of(text: str) -> bytes | None:
    """The seed of a `whsk_` key, or None unless it is one and its halves belong together."""
    parsed = signing.parse_private_key(text)
    if parsed is None:
        return None
    seed, public = parsed
    return seed if public_key(seed) == public else None


def signer(seed: bytes) -> signing.Ed25519Sign:
    """Signs as the pair of a seed."""
    return Ed25519PrivateKey.from_private_bytes(seed).sign


def verifier(public: bytes) -> signing.Ed25519Verify:
    """Tells whether a signature is the pair's over some content. Of 32 bytes that are no key, none is."""
    key = Ed25519PublicKey.from_public_bytes(public)

    def holds(signature: bytes, content: bytes) -> bool:
        try:
            key.verify(signature, content)
        except InvalidSignature:
            return False
        return True

    return holds
