"""Calls whose result is as long as the data decides: recognised, and refused with the reason."""

from __future__ import annotations

import pytest

from torchtrim.fixes.refusals import OPEN_SHAPE as FIX
from torchtrim.source.facts import Facts, Refused
from torchtrim.source.source import Source

HEAD = "import torch\nimport torch.nn.functional as F\ndef function(x, mask, n):\n"

SAMPLING = """    positive = torch.nonzero((mask != -1) & (mask != n), as_tuple=True)[0]
    perm = torch.randperm(positive.numel(), device=positive.device)[:n]
    return positive[perm]
"""
LOOP = """    ids = x[:, 0].unique()  # the images
    for one in ids:
        n = n + (x[:, 0] == one).sum()
    return n
"""


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (SAMPLING, "random numbers"),
        (LOOP, "once for each value"),
        ("    for one in x.unique():\n        print(one)\n", "once for each value"),
        ("    return torch.where(x > 0)\n", "nonzero_static"),
        ("    rows, columns = mask.nonzero(as_tuple=True)\n    return rows\n", "nonzero_static"),
        ("    return torch.argwhere(mask).flip(0)\n", "nonzero_static"),
        ("    return torch.unique(x, return_inverse=True, dim=0)\n", "different ones"),
        ("    return x.unique_consecutive(return_counts=True)\n", "different ones"),
        ("    return F.one_hot(x)\n", "num_classes=k"),
    ],
)
def test_the_reason_is_told(body: str, why: str) -> None:
    (match,) = FIX.find(Source("case.py", HEAD + body))
    with pytest.raises(Refused, match=why):
        FIX.rewrite(match, Facts())


@pytest.mark.parametrize(
    "line",
    [
        "return (torch.unique(x) != 3).sum()",
        "return x.sum() / len(mask.nonzero())",
        "x[torch.where(mask)] = 0",
        "return x[mask.nonzero()]",
        "return torch.where(mask, x, 0), F.one_hot(x, 3), F.one_hot(x, num_classes=n)",
    ],
)
def test_what_another_fix_is_for_is_left_to_it(line: str) -> None:
    assert not list(FIX.find(Source("case.py", f"{HEAD}    {line}\n")))
