"""`len(x[mask])`, `mask.nonzero().size(0)` and their like."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fixes import proving
from torchtrim.fixes.counts import MASKED_COUNT as FIX
from torchtrim.rewriter.edits import patch
from torchtrim.source.facts import Facts, Refused
from torchtrim.source.source import Source

HEAD = "import torch\ndef function(x, y, mask, least):\n"


def code_of(body: str) -> str:
    return HEAD + "".join(f"    {line}\n" for line in body.splitlines())


def make(rng: random.Random) -> Iterator[proving.Inputs]:
    size = proving.shape(rng)
    of_mask = size[: rng.randint(1, len(size))]
    dtype = rng.choice((torch.float32, torch.bfloat16, torch.int64, torch.bool))
    real = rng.choice((torch.float32, torch.float64))
    for _ in range(proving.DRAWS):
        if dtype.is_floating_point:
            x = proving.floating(rng, size, dtype, odd=0.5)
        else:
            x = proving.integral(rng, size, dtype, 0, 2)
        yield {
            "x": x,
            "y": proving.floating(rng, (3,), real).requires_grad_(),
            "mask": proving.mask(rng, of_mask),
            "least": rng.choice((0, 1, 4)),
        }


BODIES = [
    "return y.sum() / x[mask].numel()",
    "return y / max(len(x[mask]), least)",
    "n = x[mask].shape[0]  # those that count\nloss = y * n\nreturn loss / -n",
    "return {'loss': y.sum() / max(1, x.nonzero().size(0))}",
    "return y * torch.nonzero(x).numel()",
    "return y - torch.where(mask)[0].numel()",
    "n = x[mask].numel()\nm = max(1, n)\nreturn y / max(n, 1) - y * m",
    "count = mask.nonzero(as_tuple=True)[0].shape[0]\nreturn (y + count) * (count - y)",
]


@pytest.mark.parametrize("body", BODIES)
def test_it_is_sound(body: str) -> None:
    proof = proving.prove(FIX, code_of(body), make, structures=40)
    assert proof.reaches(160), proof


def inputs(**others: object) -> proving.Inputs:
    found = {
        "x": torch.ones(3),
        "y": torch.ones(2),
        "mask": torch.tensor([True, False, True]),
        "least": 1,
    }
    return {**found, **others}


def fixed(body: str, **others: object) -> str:
    rewrite = proving.fixed(FIX, code_of(body), inputs(**others))
    return patch(rewrite.match.source, [rewrite]).text.removeprefix(HEAD)


def test_what_is_written() -> None:
    seen = "(y.dim(), y.dtype, mask.dim(), mask.dtype) == (1, torch.float32, 1, torch.bool)"
    assert fixed("return y / max(len(x[mask]), 1)") == (
        "    return y / (\n"
        "        mask.sum().clamp(min=1)\n"
        f"        if {seen}\n"
        "        else max(len(x[mask]), 1)\n"
        "    )\n"
    )
    assert fixed("return y / x[mask].numel()", x=torch.ones(3, 2)) == (
        "    return y / (\n"
        "        (mask.sum() * x.shape[mask.dim():].numel())\n"
        f"        if {seen}\n"
        "        else x[mask].numel()\n"
        "    )\n"
    )
    assert fixed("return y * torch.nonzero(x > 0).size(0)") == (
        "    return y * (\n"
        "        torch.count_nonzero(x > 0)\n"
        "        if (y.dim(), y.dtype) == (1, torch.float32)\n"
        "        else torch.nonzero(x > 0).size(0)\n"
        "    )\n"
    )


@pytest.mark.parametrize(
    ("body", "others", "why"),
    [
        ("return y / len(x[mask])", {"mask": torch.tensor([0, 2])}, "boolean mask"),
        ("return y / len(x[mask])", {"y": torch.ones(2).half()}, "float32 or float64"),
        ("return y / len(x[mask])", {"y": torch.ones(2).long()}, "floating tensor"),
        ("return 2 * len(x[mask])", {}, "floating tensor"),
        ("return torch.zeros(len(x[mask]))", {}, "number of Python's"),
        ("if len(x[mask]) == 0:\n    return 0\nreturn y", {}, "number of Python's"),
        ("n = x[mask].numel()\nreturn y / n, n", {}, "number of Python's"),
        ("return y / max(len(x[mask]), least)", {"least": 0.5}, "whole number"),
        ("n = len(x[mask])\nreturn y / max(n, least)", {}, "number of Python's"),
        ("max = min\nn = len(x[mask])\nreturn y / max(n, 1)", {}, "number of Python's"),
        ("return y / len((print() or x)[mask])", {}, "may do more"),
    ],
)
def test_refused(body: str, others: proving.Inputs, why: str) -> None:
    with pytest.raises(Refused, match=why):
        proving.fixed(FIX, code_of(body), inputs(**others))


def test_without_evidence_it_is_not_safe() -> None:
    (match,) = FIX.find(Source("case.py", code_of("return y / len(x[mask])")))
    assert not FIX.rewrite(match, Facts()).safe


@pytest.mark.parametrize(
    "body", ["return y / max(len(x[mask]), 1)", "n = torch.where(mask)[0].numel()\nreturn y * n"]
)
def test_it_waits_no_more(body: str) -> None:
    before, after = proving.syncs_go(FIX, code_of(body), inputs())
    assert before == 1
    assert after == 0
