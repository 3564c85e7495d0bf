"""`x[index] = 1.0` by an index that lies on the device."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fixes import proving
from torchtrim.fixes.index_assignment import FIX
from torchtrim.rewriter.edits import patch
from torchtrim.source.facts import Facts, NoTensor, Refused, Told
from torchtrim.source.source import Source
from torchtrim.syncs.lookup import is_from

DTYPES = (
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.bool,
)
pytestmark = pytest.mark.skipif(
    is_from("2.15"), reason="no number is uploaded, so nothing is fixed"
)
HEAD = "import torch\ndef function(x, i, j, value):\n"


def code_of(body: str) -> str:
    return HEAD + "".join(f"    {line}\n" for line in body.splitlines())


def make(rng: random.Random) -> Iterator[proving.Inputs]:
    """Repeated and negative indices, now and then none or one out of range."""
    size = (rng.choice((1, 3, 5)), rng.choice((1, 2, 5)), rng.choice((0, 1, 3)))
    dtype = rng.choice(DTYPES)
    numbers = (0, 1.5, True, -2, 1e30, float("nan"), float("-inf"))
    value = rng.choice(
        numbers if dtype.is_floating_point else (True,) if dtype == torch.bool else (0, -3, 7)
    )
    many = rng.choice((0, 1, 4))
    for _ in range(proving.DRAWS):
        if dtype.is_floating_point:
            x = proving.floating(rng, size, dtype, odd=0.3).requires_grad_(rng.random() < 0.5)
        else:
            x = proving.integral(rng, size, dtype, 0, 3)
        wide = size[0] + (rng.random() < 0.1)
        i = proving.integral(rng, (many,), torch.int64, -size[0], wide)
        yield {
            "x": x,
            "i": i,
            "j": proving.integral(rng, (many,), torch.int64, 0, size[1]),
            "value": value,
        }


BODIES = [
    "x = x.clone()\nview = x[:1]\nx[i] = value\nreturn x, view",
    "x = x * 1\nx[i, j] = value  # the chosen\nreturn x",
    "x = [x.clone()]\nx[0][:, j % x[0].shape[1]] = value\nreturn x",
    "x = x.clone()\nx[i[:, None], j, ...] = value\nreturn x",
    "x = x.clone()\nx[i.reshape(-1, 1)] = value\nreturn x",
]


@pytest.mark.parametrize("body", BODIES)
def test_it_is_sound(body: str) -> None:
    proof = proving.prove(FIX, code_of(body), make, structures=50)
    assert proof.reaches(200), proof


def one(rng: random.Random) -> Iterator[proving.Inputs]:
    for draw in make(rng):
        yield {**draw, "i": torch.tensor(rng.randrange(-draw["x"].shape[0], draw["x"].shape[0]))}


@pytest.mark.parametrize("index", ["i", "i, j", "j, i % 1", "..., i % 1"])
def test_an_index_of_no_dimensions(index: str) -> None:
    body = f"x = x.clone()\nx[{index}] = value\nreturn x"
    proof = proving.prove(FIX, code_of(body), one, structures=25)
    assert proof.reaches(100), proof


def inputs(**others: object) -> proving.Inputs:
    found = {
        "x": torch.ones(3, 2),
        "i": torch.tensor([0, 2]),
        "j": torch.tensor([1, 0]),
        "value": 0.0,
    }
    return {**found, **others}


def test_what_is_written() -> None:
    rewrite = proving.fixed(FIX, code_of("x[i] = value  # none"), inputs())
    assert patch(rewrite.match.source, [rewrite]).text.endswith(
        "    x[i] = x.new_full((), value) if x.dtype == torch.float32 else value  # none\n"
    )
    rewrite = proving.fixed(FIX, code_of("x[i] = 0"), inputs(i=torch.tensor(1)))
    assert patch(rewrite.match.source, [rewrite]).text.endswith(
        "    x[i[None] if i.dtype == torch.int64 else i] = x.new_full((), 0)\n"
    )
    rewrite = proving.fixed(FIX, code_of("y = [x]\ny[0][i, j] = 0"), inputs())
    assert patch(rewrite.match.source, [rewrite]).text.endswith(
        "    target = y[0]\n    target[i, j] = target.new_full((), 0)\n"
    )


@pytest.mark.parametrize(
    ("body", "others", "why"),
    [
        ("x[i] = value", {"value": torch.tensor(0.0)}, "number of Python's"),
        ("x[i] = value", {"i": torch.tensor([True, False, True])}, "by no mask"),
        ("x[i] = value", {"i": [0, 2]}, "by whole numbers"),
        ("x[i] = value", {"x": torch.ones(3, 2).long(), "value": 2.5}, "can hold"),
        ("x[i] = value", {"x": torch.ones(3, 2).to(torch.uint8), "value": 300}, "can hold"),
        ("x[i] = float(print() or 1)", {}, "Give it a name first"),
        ("x[i] = value", {"x": {}, "i": 1}, "number of Python's"),
        ("x[i, [0, 1]] = -float('inf')", {}, "is uploaded to be an index"),
    ],
)
def test_refused(body: str, others: proving.Inputs, why: str) -> None:
    with pytest.raises(Refused, match=why):
        proving.fixed(FIX, code_of(body), inputs(**others))


@pytest.mark.parametrize(
    "body",
    [
        "x[i] = x.new_full((), x.new_full((), 0))",
        "x[i] = x.new_zeros(())",
        "x[0] = value",
        "x[1:] = value",
        "x[x > 0] = value",
        "x[..., None] = 1",
    ],
)
def test_not_its_business(body: str) -> None:
    assert not list(FIX.find(Source("case.py", code_of(body))))


def test_without_evidence_it_is_not_safe() -> None:
    tensor, number = Told(kind="tensor"), Told(kind=NoTensor("plain"))
    (match,) = FIX.find(Source("case.py", code_of("x[i] = float(value)")))
    assert not FIX.rewrite(match, Facts(told={"X": tensor, "V": number})).safe
    for told in ({}, {"X": tensor, "V": tensor}, {"X": number, "V": number}):
        with pytest.raises(Refused, match="source"):
            FIX.rewrite(match, Facts(told=told))


@pytest.mark.parametrize("value", ["value", "None", "[0, 1]", "value.T"])
def test_what_may_be_no_number_is_refused_without_evidence(value: str) -> None:
    (match,) = FIX.find(Source("case.py", code_of(f"x[i] = {value}")))
    told = {"X": Told(kind="tensor"), "V": Told(kind=NoTensor("plain"))}
    with pytest.raises(Refused, match="source"):
        FIX.rewrite(match, Facts(told=told))


@pytest.mark.parametrize("index", [torch.tensor([0, 2]), torch.tensor(1)])
def test_it_waits_no_more(index: torch.Tensor) -> None:
    code = code_of("x[i] = value\nreturn x")
    assert proving.syncs_go(FIX, code, inputs(i=index)) == (1, 0)
    assert proving.syncs_go(FIX, code_of("x[i, j] = 1\nreturn x"), inputs()) == (1, 0)
