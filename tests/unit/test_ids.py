"""UUIDv7 and TypeID text against the published vectors of both."""

from __future__ import annotations

import uuid

import pytest

from service.domain.ids import Prefix, parse_typeid, to_typeid, uuid7

# From the TypeID specification's `valid.yml`: suffixes and the UUIDs they stand for.
SPEC_VECTORS = [
    ("00000000000000000000000000", "00000000-0000-0000-0000-000000000000"),
    ("00000000000000000000000001", "00000000-0000-0000-0000-000000000001"),
    ("0000000000000000000000000a", "00000000-0000-0000-0000-00000000000a"),
    ("0000000000000000000000000g", "00000000-0000-0000-0000-000000000010"),
    ("00000000000000000000000010", "00000000-0000-0000-0000-000000000020"),
    ("7zzzzzzzzzzzzzzzzzzzzzzzzz", "ffffffff-ffff-ffff-ffff-ffffffffffff"),
    ("0123456789abcdefghjkmnpqrs", "0110c853-1d09-52d8-d73e-1194e95b5f19"),
    ("01h455vb4pex5vsknk084sn02q", "01890a5d-ac96-774b-bcce-b302099a8057"),
]

GOOD = "dlv_01h455vb4pex5vsknk084sn02q"


@pytest.mark.parametrize(("suffix", "text"), SPEC_VECTORS)
def test_a_typeid_is_written_and_read_as_in_the_specification(suffix: str, text: str) -> None:
    assert to_typeid(Prefix.DELIVERY, uuid.UUID(text)) == f"dlv_{suffix}"
    assert parse_typeid(Prefix.DELIVERY, f"dlv_{suffix}") == uuid.UUID(text)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="empty"),
        pytest.param("dlv_", id="prefix alone"),
        pytest.param(GOOD[:-1], id="one character short"),
        pytest.param(GOOD + "0", id="one character long"),
        pytest.param(GOOD + "\n", id="trailing line end"),
        pytest.param(GOOD.upper(), id="upper case"),
        pytest.param("dlv_" + GOOD[4:].upper(), id="upper-case suffix"),
        pytest.param(GOOD[4:], id="no prefix"),
        pytest.param("dst_" + GOOD[4:], id="another kind"),
        pytest.param("dlv-" + GOOD[4:], id="wrong separator"),
        pytest.param("dlv_8zzzzzzzzzzzzzzzzzzzzzzzzz", id="more than 128 bits"),
        pytest.param("dlv_01h455vb4pex5vsknk084sn02i", id="i is not in the alphabet"),
        pytest.param("dlv_01h455vb4pex5vsknk084sn02l", id="l is not in the alphabet"),
        pytest.param("dlv_01h455vb4pex5vsknk084sn02o", id="o is not in the alphabet"),
        pytest.param("dlv_01h455vb4pex5vsknk084sn02u", id="u is not in the alphabet"),
        pytest.param("dlv_01h455vb4pex5vsknk084sn0_q", id="underscore within"),
        pytest.param("dlv_ 1h455vb4pex5vsknk084sn02q", id="space within"),
        pytest.param("dlv_01h455vb4pex5vsknk084sn02٣", id="another script's digit"),
        pytest.param("01890a5d-ac96-774b-bcce-b302099a8057", id="the UUID itself"),
    ],
)
def test_text_that_is_not_a_typeid_of_the_kind_is_none(text: str) -> None:
    assert parse_typeid(Prefix.DELIVERY, text) is None


def test_a_uuid7_is_laid_out_as_in_the_rfc() -> None:
    # RFC 9562, appendix A.6: rand_a 0xCC3, rand_b 0b01 and 0x8C4DC0C0C07398F.
    made = uuid7(0x017F22E279B0, 0xCC3 << 62 | 0x18C4DC0C0C07398F)
    assert str(made) == "017f22e2-79b0-7cc3-98c4-dc0c0c07398f"
    assert made.version == 7
    assert made.variant == uuid.RFC_4122


@pytest.mark.parametrize(("unix_ms", "random_bits"), [(1 << 48, 0), (-1, 0), (0, 1 << 74), (0, -1)])
def test_a_number_that_does_not_fit_a_uuid7_raises(unix_ms: int, random_bits: int) -> None:
    with pytest.raises(ValueError, match="48 bits"):
        uuid7(unix_ms, random_bits)
