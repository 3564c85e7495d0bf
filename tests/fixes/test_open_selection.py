"""Selections whose length goes on: recognised, and refused with the reason."""

from __future__ import annotations

import pytest
import torch

from fixes import proving
from torchtrim.fixes.refusals import OPEN_SELECTION as FIX
from torchtrim.source.facts import Facts, Refused
from torchtrim.source.source import Source

HEAD = "import torch\ndef function(self, x, mask):\n"
MASK = torch.tensor([True, False, True])
INPUTS = {"self": {}, "x": torch.ones(3, 2), "mask": MASK}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("return x[mask]", "as many rows go on"),
        ("return x[mask].max()", "raises an error"),
        ("return torch.amin(x[mask])", "raises an error"),
        ("return x[mask].flatten().sort().values", "as many rows go on"),
        ("return x[mask].topk(1)", "among themselves"),
        ("return torch.median(x[mask])", "among themselves"),
        ("return x[mask].std()", "the spread"),
        ("return x[mask.nonzero()]", "would wait as well"),
        ("return x[torch.nonzero(mask)]", "would wait as well"),
        ("return x[mask.nonzero().squeeze(1)]", "would wait as well"),
        ("return x[mask.bool(), 0]", "as many rows go on"),
        ("return torch.masked_select(x, mask[:, None])", "as many rows go on"),
        ("return x[torch.arange(3)]", "something else"),
        ("return self.get('a', [x])[x.dim() - 2]", "something else"),
    ],
)
def test_the_reason_is_told(line: str, why: str) -> None:
    with pytest.raises(Refused, match=why):
        proving.fixed(FIX, f"{HEAD}    {line}\n", INPUTS)


@pytest.mark.parametrize(
    "line",
    [
        "return x[mask].mean()",
        "return torch.nn.functional.cross_entropy(x[mask], self.labels[mask])",
        "x[mask] = x[mask] * 2",
        "return torch.cat([x[mask], x[~mask]])",
        "return self.loss / x[mask].numel()",
        "return x[0], x[1:], x[..., None], x[0, :]",
    ],
)
def test_what_another_fix_is_for_is_left_to_it(line: str) -> None:
    assert not list(FIX.find(Source("case.py", f"{HEAD}    {line}\n")))


def test_it_is_refused_without_evidence_too() -> None:
    (match,) = FIX.find(Source("case.py", f"{HEAD}    return x[mask]\n"))
    with pytest.raises(Refused, match="as many rows"):
        FIX.rewrite(match, Facts())


def test_the_alternative_that_is_named_computes_the_same_spread() -> None:
    x, mask = torch.randn(50), torch.rand(50) < 0.5
    n = mask.sum()
    m = (x * mask).sum() / n
    assert torch.allclose((((x - m) ** 2) * mask).sum() / (n - 1), x[mask].var())
