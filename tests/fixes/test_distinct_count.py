"""`torch.unique(x).numel()` and `(torch.unique(x) != c).sum()`."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fixes import proving
from torchtrim.fixes.counts import DISTINCT_COUNT as FIX
from torchtrim.rewriter.edits import patch
from torchtrim.source.facts import Facts, Refused
from torchtrim.source.source import Source

WHOLE = (torch.int64, torch.int32, torch.uint8, torch.int8, torch.bool)
HEAD = "import torch\nfrom torch import unique\ndef function(x, y, c):\n"


def code_of(body: str) -> str:
    return HEAD + "".join(f"    {line}\n" for line in body.splitlines())


def make(rng: random.Random) -> Iterator[proving.Inputs]:
    size = proving.shape(rng)
    dtype, real = rng.choice(WHOLE), rng.choice((torch.float32, torch.float64))
    for _ in range(proving.DRAWS):
        yield {
            "x": proving.integral(rng, size, dtype, 0, rng.choice((1, 2, 6))),
            "y": proving.floating(rng, (2,), real).requires_grad_(),
            "c": rng.choice((0, 1, -1, 100)),
        }


BODIES = [
    "return (torch.unique(x) != c).sum(), 0",
    "return (x.unique() != c).sum() < 2",
    "return y / len(torch.unique(x + 1))",
    "n = x.unique().numel()  # classes\nloss = y.sum() * n\nreturn loss - n",
    "return y.sum() - -x[..., :1].unique().size(0)",
    "total = y.sum() + 1 / y.exp() * unique(x).shape[0]\nreturn total",
]


@pytest.mark.parametrize("body", BODIES)
def test_it_is_sound(body: str) -> None:
    proof = proving.prove(FIX, code_of(body), make, structures=45)
    assert proof.reaches(180)
    assert not proof.unsafe


def inputs(**others: object) -> proving.Inputs:
    return {"x": torch.tensor([1, 1, 2]), "y": torch.ones(2), "c": 0, **others}


@pytest.mark.parametrize(
    ("body", "others", "why"),
    [
        ("return (x.unique() != c).sum()", {"x": torch.ones(3)}, "a tensor of integers"),
        ("return (x.unique() != c).sum()", {"c": torch.tensor(1)}, "number of Python's"),
        ("return y * x.unique().numel()", {"y": torch.ones(2).half()}, "float32 or float64"),
        ("return y * x.unique().numel()", {"y": torch.ones(2).long()}, "floating tensor"),
        ("return y * x.unique().numel()", {"y": 2.0}, "floating tensor"),
        ("return range(len(x.unique()))", {}, "number of Python's"),
        ("n = len(x.unique())\nreturn y[:n]", {}, "number of Python's"),
        ("n = len(x.unique())\nn = n if c else 1\nreturn y * n", {}, "number of Python's"),
        ("n = len(x.unique())\ndef later():\n    return n\nreturn y * n, later()", {}, "within"),
        ("return len(x.unique())", {}, "number of Python's"),
    ],
)
def test_refused(body: str, others: proving.Inputs, why: str) -> None:
    with pytest.raises(Refused, match=why):
        proving.fixed(FIX, code_of(body), inputs(**others))


def test_what_is_computed_is_computed_once() -> None:
    rewrite = proving.fixed(FIX, code_of("return (torch.unique(x.abs() + 1) != c).sum()"), inputs())
    assert patch(rewrite.match.source, [rewrite]).text.removeprefix(HEAD) == (
        "    if (x.dim(), x.dtype) == (1, torch.int64):\n"
        "        values = x.abs() + 1\n"
        "        return (values.flatten().sort().values.diff() != 0).sum() + (values.numel() > 0)"
        " - (values == c).any().long()\n"
        "    return (torch.unique(x.abs() + 1) != c).sum()\n"
    )


def test_without_evidence_it_is_not_safe() -> None:
    (match,) = FIX.find(Source("case.py", code_of(BODIES[0])))
    assert not FIX.rewrite(match, Facts()).safe


@pytest.mark.parametrize(
    "body", ["return (torch.unique(x) != 0).sum()", "return y * len(x.unique())"]
)
def test_it_waits_no_more(body: str) -> None:
    before, after = proving.syncs_go(FIX, code_of(body), inputs())
    assert before >= 1
    assert after == 0
