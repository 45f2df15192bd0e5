"""What we sign, verifiers we did not write accept; what was changed on the way, nobody does."""

from __future__ import annotations

import base64
import time
from functools import partial

import pytest
import standardwebhooks
import svix.webhooks
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.hmac import HMAC
from hypothesis import given
from hypothesis import strategies as st

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
    # The reference libraries read a body as UTF-8, and one may call the other: here is a third,
    # over another implementation of HMAC, for the bytes that are no text.
    signature = signing.sign(webhook_id, unix_seconds, body, [key])
    mac = HMAC(base64.b64decode(secret_of(key)[len("whsec_") :]), SHA256())
    mac.update(b"%s.%d.%s" % (webhook_id.encode(), unix_seconds, body))
    try:
        mac.verify(base64.b64decode(signature.removeprefix("v1,")))
    except InvalidSignature:
        pytest.fail("the signature is not over id.timestamp.body")
