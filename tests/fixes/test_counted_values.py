"""`torch.bincount(x, minlength=k)`: suggested, for no run shows that all values are below k."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fixes import proving
from torchtrim.fixes.counts import COUNTED_VALUES as FIX
from torchtrim.rewriter.edits import patch
from torchtrim.source.facts import Refused

HEAD = "import torch\ndef function(x, w, k):\n"
WHOLE = (torch.int64, torch.int32, torch.uint8)


def code_of(line: str) -> str:
    return f"{HEAD}    {line}\n"


def make(rng: random.Random) -> Iterator[proving.Inputs]:
    """Values below k alone."""
    many, k = rng.choice((0, 1, 9)), rng.choice((1, 3, 8))
    dtype, real = rng.choice(WHOLE), rng.choice((torch.float32, torch.float64))
    for _ in range(proving.DRAWS):
        x = proving.integral(rng, (many,), dtype, 0, k)
        yield {"x": x, "w": proving.floating(rng, (many,), real), "k": k}


@pytest.mark.parametrize(
    "line",
    [
        "return torch.bincount(x, minlength=k)",
        "return x.flip(0).bincount(minlength=k) + 1",
        "return {'n': torch.bincount(x % k, minlength=k)[:1]}",
        "return x.clamp(max=k - 1).bincount(minlength=k + 1).float()",
    ],
)
def test_it_agrees_where_all_values_are_below(line: str) -> None:
    code = code_of(line)
    for number in range(84):
        draws = list(make(random.Random(number)))
        rewrite = proving.fixed(FIX, code, draws[0])
        assert "would make the original's result longer" in rewrite.risk
        assert not rewrite.safe
        assert not rewrite.open_needs
        after = patch(rewrite.match.source, [rewrite]).text
        for draw in draws:
            assert proving.agree(rewrite, code, after, draw)


@pytest.mark.parametrize(
    ("line", "others", "why"),
    [
        ("return torch.bincount(x)", {}, "the data decides"),
        ("return x.bincount(w)", {}, "whole numbers, else"),
        ("return torch.bincount(x, weights=w, minlength=k)", {}, "whole numbers, else"),
        ("return torch.bincount(x, minlength=k)", {"x": torch.ones(2, 2).long()}, "one dimension"),
        ("return torch.bincount(x, minlength=k)", {"x": torch.ones(2)}, "whole numbers"),
        ("return torch.bincount(x, minlength=k)", {"k": torch.tensor(4)}, "number of Python's"),
    ],
)
def test_refused(line: str, others: proving.Inputs, why: str) -> None:
    inputs = {"x": torch.tensor([0, 2, 2]), "w": torch.ones(3), "k": 4, **others}
    with pytest.raises(Refused, match=why):
        proving.fixed(FIX, code_of(line), inputs)


def test_it_waits_no_more() -> None:
    inputs = {"x": torch.tensor([0, 2, 2]), "w": torch.ones(3), "k": 4}
    assert proving.syncs_go(FIX, code_of("return torch.bincount(x, minlength=k)"), inputs) == (
        2,
        0,
    )
