"""`[[False] * n + [True] * (size - n) for n in lengths]`."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

import draws
from fixes import proving
from torchtrim.fixes.repeated_list import FIX
from torchtrim.rewriter.edits import patch
from torchtrim.source.facts import Facts, Refused
from torchtrim.source.source import Source

HEAD = "import torch\ndef function(lengths, size):\n"


def code_of(body: str) -> str:
    return HEAD + "".join(f"    {line}\n" for line in body.splitlines())


def make(rng: random.Random) -> Iterator[proving.Inputs]:
    """Lengths from none to all of a row."""
    many, size = rng.choice((1, 2, 5)), rng.choice((0, 1, 6))
    kind = rng.choice((torch.int64, torch.int32, torch.uint8))
    for _ in range(proving.DRAWS):
        yield {"lengths": proving.integral(rng, (many,), kind, 0, size + 1), "size": size}


BODIES = [
    "return torch.tensor([[False] * n + [True] * (size - n) for n in lengths], dtype=torch.bool)",
    "return ~torch.tensor(\n    [[True] * k + [False] * (size - k) for k in lengths.clone()],\n"
    "    dtype=torch.bool,\n    device=lengths.device,\n)",
]


@pytest.mark.parametrize("body", BODIES)
def test_it_agrees_where_lengths_are_in_range(body: str) -> None:
    code = code_of(body)
    for number in draws.some(range(125)):
        cases = list(make(random.Random(number)))
        rewrite = proving.fixed(FIX, code, cases[0])
        assert "would make the original's rows longer" in rewrite.risk
        assert not rewrite.open_needs
        after = patch(rewrite.match.source, [rewrite]).text
        for draw in cases:
            assert proving.agree(rewrite, code, after, draw)


LOOP = """mask = torch.Tensor([]).to(dtype=torch.bool)
for i in range(len(lengths)):
    mask = torch.cat(
        [mask, torch.Tensor([False] * lengths[i] + [True] * (size - lengths[i])).to(dtype=torch.bool)]
    )
return mask"""


@pytest.mark.parametrize(
    ("body", "others", "why"),
    [
        (LOOP, {}, "All rows at once are"),
        (BODIES[0], {"lengths": [1, 2]}, "one dimension"),
        (BODIES[0].replace("True", "2"), {}, "not True and False"),
    ],
)
def test_refused(body: str, others: proving.Inputs, why: str) -> None:
    with pytest.raises(Refused, match=why):
        proving.fixed(FIX, code_of(body), {"lengths": torch.tensor([1, 2]), "size": 3, **others})


def test_without_evidence_it_is_not_safe() -> None:
    (match,) = FIX.find(Source("case.py", code_of(BODIES[0])))
    assert not FIX.rewrite(match, Facts()).safe


def test_it_waits_no_more() -> None:
    inputs = {"lengths": torch.tensor([1, 2]), "size": 3}
    body = BODIES[0].replace("torch.bool", "torch.bool, device=lengths.device")
    before, after = proving.syncs_go(FIX, code_of(body), inputs)
    assert before >= 4
    assert after == 0
