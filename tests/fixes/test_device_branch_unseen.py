"""`device_branch` without a run: written where the source says enough, refused elsewhere."""

from __future__ import annotations

import pytest
import torch

from fixes import proving
from torchtrim.fixes.device_branch import FIX
from torchtrim.rewriter.edits import patch
from torchtrim.rewriter.fix import Rewrite
from torchtrim.source.facts import Facts, Refused, Told
from torchtrim.source.source import Source

HEAD = "import torch\ndef function(x, m):\n"


def _unseen(code: str) -> Rewrite:
    (match,) = FIX.find(Source("case.py", code))
    tensors = {part: Told(kind="tensor") for part in match.parts}
    return FIX.rewrite(match, Facts(told=tensors))


@pytest.mark.parametrize(
    "body",
    [
        "    if x.sum() == 0:\n        return torch.ones_like(x, dtype=torch.float32)\n    return x / m\n",
        "    return torch.ones_like(x) if x.sum() == 0 else x * 0.5\n",
        "    return (x * m if m.sum() > 0 else torch.zeros_like(x)) + 1\n",
        "    if x.sum() > 0:\n        y = x @ m\n    else:\n        y = x * 2\n    return y\n",
        "    y = x * 2\n    if y.sum() > 0:\n        y = y / m\n    return y\n",
        "    if x.sum() > 0:\n        z = x @ m\n        return x * 2\n    return x * 3\n",
        "    return x.float() * 2 if x.sum() > 0 else x * 3\n",
        "    return x.view(2, 3) * 2 if x.sum() > 0 else x * 3\n",
    ],
)
def test_ways_that_may_differ_are_refused(body: str) -> None:
    with pytest.raises(Refused, match="the source does not say that both ways"):
        _unseen(HEAD + body)


def test_products_of_tensors_are_refused_for_their_gradient() -> None:
    with pytest.raises(Refused, match="could make a gradient NaN"):
        _unseen(f"{HEAD}    return x * m if x.sum() > 0 else m + x\n")


@pytest.mark.parametrize("ways", [("x * 2", "x * 3"), ("x.sqrt()", "x * 0.5"), ("x + m", "m + x")])
@pytest.mark.parametrize("value", [0.0, 4.0, -1.0])
def test_ways_that_agree_are_written_and_compute_the_same(
    ways: tuple[str, str], value: float
) -> None:
    code = f"{HEAD}    return {ways[0]} if x.sum() > 0 else {ways[1]}\n"
    rewrite = _unseen(code)
    after = patch(rewrite.match.source, [rewrite]).text
    assert "torch.where(" in after
    for dtype in (torch.float32, torch.float16, torch.int64):
        x = torch.full((3,), value, dtype=dtype).requires_grad_(dtype.is_floating_point)
        assert proving.agree(rewrite, code, after, {"x": x, "m": torch.ones(2, 3)})
