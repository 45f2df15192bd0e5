"""What we sign, verifiers we did not write accept; what was changed on the way, nobody does."""

from __future__ import annotations

import base64
import time
from functools import partial

import pytest
import standardwebhooks
import svix.webhooks
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hmac import HMAC
from hypothesis import given
from hypothesis import strategies as st

from service import ed25519
from service.domain import signing
from service.domain.ids import Prefix, to_typeid
from service.domain.signing import Verdict

KEYS = st.binary(min_size=24, max_size=64)
IDS = st.uuids().map(partial(to_typeid, Prefix.DELIVERY))
TIMES = st.integers(0, 10**11)
TEXTS = st.text(st.characters(codec="utf-8"))
JUNK = st.none() | st.text() | st.text("v1,= .0123456789abcdef")


def secret_of(key: bytes) -> str:
    secret = signing.format_secret(key)
    assert secret is not None
    return secret


@given(KEYS)
def test_a_key_survives_its_text(key: bytes) -> None:
    assert signing.parse_secret(secret_of(key)) == key


@given(IDS, TIMES, st.binary(), st.lists(KEYS, min_size=1, max_size=4), st.data())
def test_what_is_signed_with_several_keys_verifies_with_each(
    webhook_id: str, unix_seconds: int, body: bytes, keys: list[bytes], data: st.DataObject
) -> None:
    signature = signing.sign(webhook_id, unix_seconds, body, keys)
    key = data.draw(st.sampled_from(keys))
    assert (
        signing.verify(webhook_id, str(unix_seconds), signature, body, keys=[key], now_unix_seconds=unix_seconds)
        is Verdict.VALID
    )


@given(IDS, TIMES, st.binary(min_size=1), KEYS, st.data())
def test_a_changed_bit_of_the_body_does_not_verify(
    webhook_id: str, unix_seconds: int, body: bytes, key: bytes, data: st.DataObject
) -> None:
    signature = signing.sign(webhook_id, unix_seconds, body, [key])
    bit = data.draw(st.integers(0, len(body) * 8 - 1))
    changed = (int.from_bytes(body) ^ 1 << bit).to_bytes(len(body))
    assert (
        signing.verify(webhook_id, str(unix_seconds), signature, changed, keys=[key], now_unix_seconds=unix_seconds)
        is Verdict.MISMATCH
    )


@given(JUNK, JUNK, JUNK, st.binary(), KEYS)
def test_junk_never_raises_and_never_verifies(
    webhook_id: str | None, timestamp: str | None, signature: str | None, body: bytes, key: bytes
) -> None:
    assert (
        signing.verify(
            webhook_id, timestamp, signature, body, keys=[key], now_unix_seconds=0, tolerance_seconds=float("inf")
        )
        is not Verdict.VALID
    )


@given(IDS, TEXTS, st.lists(KEYS, min_size=1, max_size=4, unique=True), st.data())
def test_the_reference_libraries_accept_what_is_signed(
    webhook_id: str, text: str, keys: list[bytes], data: st.DataObject
) -> None:
    """Row of standard-webhooks.md: two independent verifiers, `standardwebhooks` and `svix`."""
    now = int(time.time())
    headers = {
        "webhook-id": webhook_id,
        "webhook-timestamp": str(now),
        "webhook-signature": signing.sign(webhook_id, now, text.encode(), keys),
    }
    secret = secret_of(data.draw(st.sampled_from(keys)))
    standardwebhooks.Webhook(secret).verify(text, headers, json_parse=False)
    svix.webhooks.Webhook(secret).verify(text, headers)


def test_the_reference_libraries_refuse_another_body() -> None:
    now = int(time.time())
    headers = {
        "webhook-id": "msg_1",
        "webhook-timestamp": str(now),
        "webhook-signature": signing.sign("msg_1", now, b"{}", [bytes(32)]),
    }
    with pytest.raises(standardwebhooks.WebhookVerificationError):
        standardwebhooks.Webhook(bytes(32)).verify("{} ", headers)
    with pytest.raises(svix.webhooks.WebhookVerificationError):
        svix.webhooks.Webhook(bytes(32)).verify("{} ", headers)


@given(IDS, TIMES, st.binary(), KEYS)
def test_a_verifier_written_from_the_specification_accepts_any_bytes(
    webhook_id: str, unix_seconds: int, body: bytes, key: bytes
) -> None:
    """Row of standard-webhooks.md: the content is `{id}.{timestamp}.{body}` over the exact bytes sent."""
    # The reference libraries read a body as UTF-8, and one may call the other: here is a third,
    # over another implementation of HMAC, for the bytes that are no text.
    signature = signing.sign(webhook_id, unix_seconds, body, [key])
    mac = HMAC(base64.b64decode(secret_of(key)[len("whsec_") :]), SHA256())
    mac.update(b"%s.%d.%s" % (webhook_id.encode(), unix_seconds, body))
    try:
        mac.verify(base64.b64decode(signature.removeprefix("v1,")))
    except InvalidSignature:
        pytest.fail("the signature is not over id.timestamp.body")


SEEDS = st.binary(min_size=32, max_size=32)


@given(IDS, TIMES, st.binary(), SEEDS)
def test_a_v1a_verifier_written_from_the_specification_accepts_any_bytes(
    webhook_id: str, unix_seconds: int, body: bytes, seed: bytes
) -> None:
    # The reference libraries verify v1 alone. This verifier shares nothing with the service but OpenSSL's
    # Ed25519, and tests/contract/test_receivers.py runs one of Node and one of another arithmetic.
    signature = signing.sign(webhook_id, unix_seconds, body, [ed25519.signer(seed)])
    public = signing.format_public_key(ed25519.public_key(seed))
    raw = base64.b64decode(public[len("whpk_") :])
    signed = b"%s.%d.%s" % (webhook_id.encode(), unix_seconds, body)
    try:
        Ed25519PublicKey.from_public_bytes(raw).verify(base64.b64decode(signature[len("v1a,") :]), signed)
    except InvalidSignature:
        pytest.fail("the signature is not over id.timestamp.body")


@given(IDS, TIMES, st.binary(min_size=1), SEEDS, st.data())
def test_a_changed_bit_of_the_body_does_not_verify_under_v1a(
    webhook_id: str, unix_seconds: int, body: bytes, seed: bytes, data: st.DataObject
) -> None:
    signature = signing.sign(webhook_id, unix_seconds, body, [ed25519.signer(seed)])
    verify = ed25519.verifier(ed25519.public_key(seed))
    bit = data.draw(st.integers(0, len(body) * 8 - 1))
    changed = (int.from_bytes(body) ^ 1 << bit).to_bytes(len(body))
    for sent, verdict in ((body, Verdict.VALID), (changed, Verdict.MISMATCH)):
        given_back = signing.verify(
            webhook_id, str(unix_seconds), signature, sent, keys=[verify], now_unix_seconds=unix_seconds
        )
        assert given_back is verdict


@given(JUNK, JUNK, JUNK | st.text("v1a,=A ").map("v1a,".__add__), st.binary())
def test_junk_never_raises_and_never_verifies_under_v1a(
    webhook_id: str | None, timestamp: str | None, signature: str | None, body: bytes
) -> None:
    verify = ed25519.verifier(ed25519.public_key(bytes(32)))
    judged = signing.verify(
        webhook_id, timestamp, signature, body, keys=[verify], now_unix_seconds=0, tolerance_seconds=float("inf")
    )
    assert judged is not Verdict.VALID


@given(IDS, TEXTS, KEYS, SEEDS)
def test_the_reference_libraries_pass_over_a_v1a_signature_and_find_the_v1_one(
    webhook_id: str, text: str, key: bytes, seed: bytes
) -> None:
    """Row of standard-webhooks.md: traps, reference libraries verify `v1` only."""
    now = int(time.time())
    signature = signing.sign(webhook_id, now, text.encode(), [ed25519.signer(seed), key])
    headers = {"webhook-id": webhook_id, "webhook-timestamp": str(now), "webhook-signature": signature}
    standardwebhooks.Webhook(secret_of(key)).verify(text, headers, json_parse=False)
    svix.webhooks.Webhook(secret_of(key)).verify(text, headers)
