"""Standard Webhooks: the published vectors, the forms of a secret and of a pair, and every reason to refuse."""

from __future__ import annotations

import base64

import pytest

from service import ed25519
from service.domain import signing
from service.domain.signing import Verdict

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
WEBHOOK_ID = "msg_p5jXN8AQM9LWM0D4loKWxJek"
UNIX_SECONDS = 1_614_265_330
BODY = b'{"test": 2432232314}'
SIGNATURE = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="

KEY = base64.b64decode("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
OTHER_KEY = bytes(range(32))

# The vector that senders and verifiers of v1a are held against: `test_asymmetric_key_signing` of Svix's server.
PRIVATE_KEY = "whsk_6Xb/dCcHpPea21PS1N9VY/NZW723CEc77N4rJCubMbfVKIDij2HKpMKkioLlX0dRqSKJp4AJ6p9lMicMFs6Kvg=="
PUBLIC_KEY = "whpk_1SiA4o9hyqTCpIqC5V9HUakiiaeACeqfZTInDBbOir4="
SIGNATURE_A = "v1a,hnO3f9T8Ytu9HwrXslvumlUpqtNVqkhqw/enGzPCXe5BdqzCInXqYXFymVJaA7AZdpXwVLPo3mNl8EM+m7TBAg=="
SEED = base64.b64decode("6Xb/dCcHpPea21PS1N9VY/NZW723CEc77N4rJCubMbc=")
VERIFY_A = ed25519.verifier(base64.b64decode(PUBLIC_KEY.removeprefix("whpk_")))


def verdict(
    webhook_id: str | None = WEBHOOK_ID,
    timestamp: str | None = str(UNIX_SECONDS),
    signature: str | None = SIGNATURE,
    body: bytes = BODY,
    keys: tuple[bytes | signing.Ed25519Verify, ...] = (KEY,),
    now: float = UNIX_SECONDS,
    tolerance: float = 300,
) -> Verdict:
    return signing.verify(
        webhook_id, timestamp, signature, body, keys=keys, now_unix_seconds=now, tolerance_seconds=tolerance
    )


def encoded(byte_count: int) -> str:
    return "whsec_" + base64.b64encode(bytes(byte_count)).decode()


def test_the_published_vector_is_reproduced() -> None:
    """Row of standard-webhooks.md: the vector, recomputed."""
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


def test_the_published_vector_of_v1a_is_reproduced_and_verifies() -> None:
    """Row of standard-webhooks.md: Ed25519, `v1a,<base64>`, keys `whsk_` and `whpk_`."""
    assert ed25519.seed_of(PRIVATE_KEY) == SEED
    assert signing.format_public_key(ed25519.public_key(SEED)) == PUBLIC_KEY
    assert signing.sign(WEBHOOK_ID, UNIX_SECONDS, BODY, [ed25519.signer(SEED)]) == SIGNATURE_A
    assert verdict(signature=SIGNATURE_A, keys=(VERIFY_A,)) is Verdict.VALID


def test_keys_of_both_kinds_sign_in_the_order_given() -> None:
    keys: list[bytes | signing.Ed25519Sign] = [ed25519.signer(SEED), KEY]
    assert signing.sign(WEBHOOK_ID, UNIX_SECONDS, BODY, keys) == f"{SIGNATURE_A} {SIGNATURE}"
    assert signing.sign(WEBHOOK_ID, UNIX_SECONDS, BODY, keys[::-1]) == f"{SIGNATURE} {SIGNATURE_A}"


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param(PRIVATE_KEY.removeprefix("whsk_"), id="no prefix"),
        pytest.param(PUBLIC_KEY, id="the public key"),
        pytest.param("whsec_" + PRIVATE_KEY.removeprefix("whsk_"), id="a secret of v1"),
        pytest.param("whsk_" + base64.b64encode(SEED).decode(), id="the seed alone"),
        pytest.param("whsk_" + base64.b64encode(SEED + bytes(32)).decode(), id="the public key of another"),
        pytest.param(PRIVATE_KEY + "\n", id="trailing line end"),
        pytest.param("whsk_\ud800", id="a lone surrogate"),
    ],
)
def test_text_that_is_not_a_private_key_is_none(text: str) -> None:
    assert ed25519.seed_of(text) is None


def test_a_public_key_is_read_and_written_and_nothing_else_is_one() -> None:
    key = signing.parse_public_key(PUBLIC_KEY)
    assert key is not None
    assert signing.format_public_key(key) == PUBLIC_KEY
    for text in ("", "whpk_", PUBLIC_KEY + "=", PUBLIC_KEY.removeprefix("whpk_"), SECRET, PRIVATE_KEY):
        assert signing.parse_public_key(text) is None


@pytest.mark.parametrize("byte_count", [24, 32, 64])
def test_a_secret_of_24_to_64_bytes_is_read_and_written(byte_count: int) -> None:
    """Row of standard-webhooks.md: the key is what `whsec_` is followed by, 24 to 64 bytes."""
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
    assert verdict(signature=f"v1,x v1a, v1a,AAAA {SIGNATURE_A}", keys=(VERIFY_A,)) is Verdict.VALID


@pytest.mark.parametrize(
    "signature",
    [
        "v1a,",
        "v1a, v1a,",
        "v1a,é",
        "v1a,\ud800",
        SIGNATURE_A[:-1],
        SIGNATURE_A + "=",
        SIGNATURE_A[:-4],
        "v1a," + base64.b64encode(bytes(64)).decode(),
        "v1a," + SIGNATURE.removeprefix("v1,"),
    ],
)
def test_a_v1a_signature_that_is_not_the_one_does_not_verify(signature: str) -> None:
    assert verdict(signature=signature, keys=(VERIFY_A,)) is Verdict.MISMATCH


def test_another_body_id_or_time_does_not_verify_under_v1a() -> None:
    assert verdict(signature=SIGNATURE_A, keys=(VERIFY_A,), body=BODY + b" ") is Verdict.MISMATCH
    assert verdict(signature=SIGNATURE_A, keys=(VERIFY_A,), webhook_id="msg_1") is Verdict.MISMATCH
    assert verdict(signature=SIGNATURE_A, keys=(VERIFY_A,), timestamp="1") is Verdict.MISMATCH


def test_a_signature_of_one_kind_says_nothing_to_a_key_of_the_other() -> None:
    """A public key is known to everybody: taken for a v1 secret, anyone could sign with it."""
    public = base64.b64decode(PUBLIC_KEY.removeprefix("whpk_"))
    forged = signing.sign(WEBHOOK_ID, UNIX_SECONDS, BODY, [public])
    assert verdict(signature=forged, keys=(VERIFY_A,)) is Verdict.SIGNATURE_MISSING
    assert verdict(signature="v1a," + forged.removeprefix("v1,"), keys=(VERIFY_A,)) is Verdict.MISMATCH
    assert verdict(signature=SIGNATURE_A, keys=(KEY,)) is Verdict.SIGNATURE_MISSING
    assert verdict(signature=f"{SIGNATURE_A} {SIGNATURE}", keys=(KEY,)) is Verdict.VALID


def test_bytes_that_are_no_public_key_verify_nothing() -> None:
    not_a_point = bytes([2]) + bytes(31)
    assert verdict(signature=SIGNATURE_A, keys=(ed25519.verifier(not_a_point),)) is Verdict.MISMATCH


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
