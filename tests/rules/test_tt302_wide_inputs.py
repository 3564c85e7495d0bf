import pytest
from msgspec.structs import replace

from profiles import Step
from torchtrim.records.loader import BatchParts, LoaderCost
from torchtrim.rules.tt302_wide_inputs import check

WIDE = BatchParts(
    samples=64,
    bytes=64 << 20,
    reading=0.0,
    decoding=0.1,
    collating=0.0,
    narrow_bytes=16 << 20,
    narrow=("float32 -> uint8",),
)


@pytest.mark.parametrize(
    ("device", "parts", "count"),
    [
        ("emulated a100", WIDE, 1),
        ("cuda:0", WIDE, 1),
        ("cpu", WIDE, 0),
        ("emulated a100", replace(WIDE, narrow_bytes=40 << 20), 0),
        ("emulated a100", replace(WIDE, bytes=4000, narrow_bytes=1000), 0),
        ("emulated a100", None, 0),
    ],
)
def test_wide_types(device: str, parts: BatchParts | None, count: int) -> None:
    cost = LoaderCost(step_seconds=1.0, ready_seconds=None, waited_seconds=0.0, parts=parts)
    found = list(check(replace(Step(device).profile(seconds=1.0), loader=cost)))
    assert len(found) == count
    for finding in found:
        assert finding.price_ms == pytest.approx((48 << 20) / 31.5e9 * 1e3)
        assert finding.source == "modelled"
        assert "float32 -> uint8" in finding.message
