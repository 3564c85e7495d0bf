"""Slices whose bound lies on the device: recognised, and refused with the reason."""

from __future__ import annotations

import pytest
import torch

from fixes import proving
from torchtrim.fixes.refusals import DEVICE_BOUND as FIX
from torchtrim.source.facts import Facts, Refused
from torchtrim.source.source import Source

HEAD = "import torch\ndef function(x, n, mask):\n"
INPUTS = {"x": torch.ones(3, 2), "n": torch.tensor(1), "mask": torch.ones(2, 2)}


@pytest.mark.parametrize(
    "line", ["return x[:n]", "return x[..., -n:]", "x[n : n + 1, :] = 0", "return x[::n]"]
)
def test_the_reason_is_told(line: str) -> None:
    code = f"{HEAD}    {line}\n"
    with pytest.raises(Refused, match="how large the slice is"):
        proving.fixed(FIX, code, INPUTS)
    with pytest.raises(Refused, match="something else"):
        proving.fixed(FIX, code, {**INPUTS, "n": 1})
    (match,) = FIX.find(Source("case.py", code))
    with pytest.raises(Refused, match="how large"):
        FIX.rewrite(match, Facts())


@pytest.mark.parametrize(
    "line",
    [
        "return x[:3], x[-1:], x[: len(mask)], x[: mask.shape[0] - 1], x[n]",
        "for i, end in enumerate(n):\n        mask[i, :end] = 1",
    ],
)
def test_not_its_business(line: str) -> None:
    assert not list(FIX.find(Source("case.py", f"{HEAD}    {line}\n")))
