"""Standard Webhooks v1: the published vector, the forms of a secret, and every reason to refuse."""

from __future__ import annotations

import base64

import pytest

from service.domain import signing
from service.domain.signing import Verdict

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
WEBHOOK_ID = "msg_p5jXN8AQM9LWM0D4loKWxJek"
UNIX_SECONDS = 1_614_265_330
BODY = b'{"test": 2432232314}'
SIGNATURE = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="

KEY = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
OTHER_KEY = bytes(range(32))


def verdict(
    webhook_id: str | None = WEBHOOK_ID,
    timestamp: str | None = str(UNIX_SECONDS),
    signature: str | None = SIGNATURE,
    body: bytes = BODY,
    keys: tuple[bytes, ...] = (KEY,),
    now: float = UNIX_SECONDS,
    tolerance: float = 300,
) -> Verdict:
    return signing.verify(
        webhook_id, timestamp, signature, body, keys=keys, now_unix_seconds=now, tolerance_seconds=tolerance
    )


def encoded(byte_count: int) -> str:
    return "whsec_" + base64.b64encode(bytes(byte_count)).decode()


def test_the_published_vector_is_reproduced() -> None:
    assert signing.parse_secret(SECRET) == KEY
    assert signing.sign(WEBHOOK_ID, UNIX_SECONDS, BODY, [KEY]) == SIGNATURE


def test_the_published_vector_verifies() -> None:
    assert verdict() is Verdict.VALID


def test_every_key_signs_once_in_the_order_given() -> None:
    both = signing.sign(WEBHOOK_ID, UNIX_SECONDS, BODY, [OTHER_KEY, KEY])
    first, second = both.split(" ")
    assert first.startswith("v1,")
    assert second == SIGNATURE
    assert first == signing.sign(WEBHOOK_ID, UNIX_SECONDS, BODY, [OTHER_KEY])


def test_an_id_with_a_dot_is_not_signed() -> None:
    with pytest.raises(ValueError, match="dot"):
        signing.sign("msg.1", UNIX_SECONDS, BODY, [KEY])


@pytest.mark.parametrize("byte_count", [24, 32, 64])
def test_a_secret_of_24_to_64_bytes_is_read_and_written(byte_count: int) -> None:
    assert signing.parse_secret(encoded(byte_count)) == bytes(byte_count)
    assert signing.format_secret(bytes(byte_count)) == encoded(byte_count)


@pytest.mark.parametrize("byte_count", [0, 23, 65])
def test_a_secret_of_another_length_is_none(byte_count: int) -> None:
    assert signing.parse_secret(encoded(byte_count)) is None
    assert signing.format_secret(bytes(byte_count)) is None


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param(SECRET.removeprefix("whsec_"), id="no prefix"),
        pytest.param("whsk_" + SECRET.removeprefix("whsec_"), id="another kind of key"),
        pytest.param(SECRET + "\n", id="trailing line end"),
        pytest.param(SECRET + "=", id="too much padding"),
        pytest.param(encoded(32).rstrip("="), id="no padding"),
        pytest.param("whsec_" + "-_" * 16, id="the URL alphabet"),
        pytest.param("whsec_" + "é" * 32, id="not ASCII"),
        pytest.param("whsec_" + "\ud800" * 32, id="a lone surrogate"),
    ],
)
def test_text_that_is_not_a_secret_is_none(text: str) -> None:
    assert signing.parse_secret(text) is None


def test_a_new_secret_is_made_of_32_bytes() -> None:
    assert signing.parse_secret(signing.new_secret(OTHER_KEY)) == OTHER_KEY
    with pytest.raises(ValueError, match="32 random bytes"):
        signing.new_secret(bytes(31))


@pytest.mark.parametrize("webhook_id", [None, "", "msg.1", "msg_é", "msg_\ud800"])
def test_an_unusable_id_is_said_to_be_the_reason(webhook_id: str | None) -> None:
    assert verdict(webhook_id=webhook_id) is Verdict.ID_UNUSABLE


@pytest.mark.parametrize("timestamp", [None, "", "now", "-1", "+1", " 1", "1.5", "1_0", "٣", "9" * 5_000])
def test_an_unusable_timestamp_is_said_to_be_the_reason(timestamp: str | None) -> None:
    assert verdict(timestamp=timestamp) is Verdict.TIMESTAMP_UNUSABLE


@pytest.mark.parametrize("signature", [None, "", " ", "v1", "v1a,AAAA", "v2," + SIGNATURE[3:], SIGNATURE[3:]])
def test_a_missing_v1_signature_is_said_to_be_the_reason(signature: str | None) -> None:
    assert verdict(signature=signature) is Verdict.SIGNATURE_MISSING


@pytest.mark.parametrize(
    "signature",
    ["v1,", "v1, v1,", "v1,,", "v1,é", "v1,\ud800", SIGNATURE[:-1], SIGNATURE + "=", SIGNATURE.replace("v1,", "v1,,")],
)
def test_a_signature_that_is_not_the_one_does_not_verify(signature: str) -> None:
    assert verdict(signature=signature) is Verdict.MISMATCH


def test_one_signature_among_others_is_enough() -> None:
    assert verdict(signature=f"v1a,x v1, v1,AAAA {SIGNATURE}") is Verdict.VALID


def test_one_key_among_others_is_enough() -> None:
    assert verdict(keys=(OTHER_KEY, KEY)) is Verdict.VALID


def test_without_the_right_key_nothing_verifies() -> None:
    assert verdict(keys=(OTHER_KEY,)) is Verdict.MISMATCH
    assert verdict(keys=()) is Verdict.MISMATCH


def test_another_body_id_or_time_does_not_verify() -> None:
    assert verdict(body=BODY + b" ") is Verdict.MISMATCH
    assert verdict(webhook_id=WEBHOOK_ID + "x") is Verdict.MISMATCH
    assert verdict(timestamp=str(UNIX_SECONDS + 1)) is Verdict.MISMATCH
    assert verdict(timestamp=f"0{UNIX_SECONDS}") is Verdict.MISMATCH


@pytest.mark.parametrize(
    ("age_seconds", "expected"),
    [
        (-301, Verdict.TOO_NEW),
        (-300, Verdict.VALID),
        (300, Verdict.VALID),
        (301, Verdict.TOO_OLD),
    ],
)
def test_a_right_signature_is_valid_within_the_tolerance_either_way(age_seconds: int, expected: Verdict) -> None:
    assert verdict(now=UNIX_SECONDS + age_seconds) is expected


def test_a_forged_request_is_called_forged_whatever_its_age() -> None:
    assert verdict(body=b"forged", now=0) is Verdict.MISMATCH
