"""Fixes of counts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from fixes import proving
from torchtrim.fixes.counts import COUNTED_VALUES, DISTINCT_COUNT, MASKED_COUNT
from torchtrim.rewriter.fix import Fix

HEAD = "import torch\nfrom torch import unique\ndef function(x, y, mask, c, k):\n"
MASK = torch.tensor([True, False, True])
FLOATS = {"x": torch.ones(3), "y": torch.ones(2), "mask": MASK, "c": 0, "k": 1}
INTEGERS = FLOATS | {"x": torch.tensor([1, 1, 2]), "k": 4}
code_of = partial(proving.code_of, HEAD)


def make_counted(rng: random.Random) -> Iterator[proving.Inputs]:
    """Values below k alone."""
    many, k = rng.choice((0, 1, 9)), rng.choice((1, 3, 8))
    dtype = rng.choice((torch.int64, torch.int32, torch.uint8))
    for _ in range(proving.DRAWS):
        yield {**INTEGERS, "x": proving.integral(rng, (many,), dtype, 0, k), "k": k}


def make_distinct(rng: random.Random) -> Iterator[proving.Inputs]:
    size, real = proving.shape(rng), rng.choice((torch.float32, torch.float64))
    dtype = rng.choice((torch.int64, torch.int32, torch.uint8, torch.int8, torch.bool))
    for _ in range(proving.DRAWS):
        x = proving.integral(rng, size, dtype, 0, rng.choice((1, 2, 6)))
        y = proving.floating(rng, (2,), real).requires_grad_()
        yield {**INTEGERS, "x": x, "y": y, "c": rng.choice((0, 1, -1, 100))}


def make_masked(rng: random.Random) -> Iterator[proving.Inputs]:
    size = proving.shape(rng)
    of_mask = size[: rng.randint(1, len(size))]
    dtype = rng.choice((torch.float32, torch.bfloat16, torch.int64, torch.bool))
    real = rng.choice((torch.float32, torch.float64))
    for _ in range(proving.DRAWS):
        if dtype.is_floating_point:
            x = proving.floating(rng, size, dtype, odd=0.5)
        else:
            x = proving.integral(rng, size, dtype, 0, 2)
        y = proving.floating(rng, (3,), real).requires_grad_()
        mask = proving.mask(rng, of_mask)
        yield {"x": x, "y": y, "mask": mask, "c": 0, "k": rng.choice((0, 1, 4))}


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "return torch.bincount(x, minlength=k)",
        "return x.flip(0).bincount(minlength=k) + 1",
        "return {'n': torch.bincount(x % k, minlength=k)[:1]}",
        "return x.clamp(max=k - 1).bincount(minlength=k + 1).float()",
    ],
)
def test_counted_values_agrees_where_all_values_are_below(line: str) -> None:
    code = code_of(line)
    for number in range(84):
        draws = list(make_counted(random.Random(number)))
        rewrite = proving.fixed(COUNTED_VALUES, code, draws[0])
        assert "would make the original's result longer" in rewrite.risk
        assert not rewrite.safe
        assert not rewrite.open_needs
        after = proving.text_of(rewrite)
        assert all(proving.agree(rewrite, code, after, draw) for draw in draws)


BODIES = {
    (DISTINCT_COUNT, make_distinct, 45, 180): (
        "return (torch.unique(x) != c).sum(), 0",
        "return (x.unique() != c).sum() < 2",
        "return y / len(torch.unique(x + 1))",
        "n = x.unique().numel()  # classes\nloss = y.sum() * n\nreturn loss - n",
        "return y.sum() - -x[..., :1].unique().size(0)",
        "total = y.sum() + 1 / y.exp() * unique(x).shape[0]\nreturn total",
    ),
    (MASKED_COUNT, make_masked, 40, 160): (
        "return y.sum() / x[mask].numel()",
        "return y / max(len(x[mask]), k)",
        "n = x[mask].shape[0]  # those that count\nloss = y * n\nreturn loss / -n",
        "return {'loss': y.sum() / max(1, x.nonzero().size(0))}",
        "return y * torch.nonzero(x).numel()",
        "return y - torch.where(mask)[0].numel()",
        "n = x[mask].numel()\nm = max(1, n)\nreturn y / max(n, 1) - y * m",
        "count = mask.nonzero(as_tuple=True)[0].shape[0]\nreturn (y + count) * (count - y)",
    ),
}


@pytest.mark.parametrize(
    ("fix", "make", "structures", "least", "body"),
    [(*case, body) for case, bodies in BODIES.items() for body in bodies],
)
def test_it_is_sound(fix: Fix, make: proving.Make, structures: int, least: int, body: str) -> None:
    proof = proving.prove(fix, code_of(body), make, structures=structures)
    assert proof.reaches(least)
    assert not proof.unsafe or fix is MASKED_COUNT


def fixed(body: str, **others: object) -> str:
    return proving.text_of(proving.fixed(MASKED_COUNT, code_of(body), FLOATS | others))


def test_what_is_written() -> None:
    assert fixed("return y / max(len(x[mask]), 1)").removeprefix(HEAD) == (
        "    return y / mask.sum().clamp(min=1)\n"
    )
    assert fixed("return y / x[mask].numel()", x=torch.ones(3, 2)).removeprefix(HEAD) == (
        "    return y / (mask.sum() * x.shape[mask.dim():].numel())\n"
    )
    assert fixed("return y * torch.nonzero(x > 0).size(0)").removeprefix(HEAD) == (
        "    return y * torch.count_nonzero(x > 0)\n"
    )


def test_what_is_computed_is_computed_once() -> None:
    code = code_of("return (torch.unique(x.abs() + 1) != c).sum()")
    rewrite = proving.fixed(DISTINCT_COUNT, code, INTEGERS)
    assert proving.text_of(rewrite).removeprefix(HEAD) == (
        "    flat = (x.abs() + 1).flatten().sort().values\n"
        "    return ((flat.diff(prepend=~flat[:1]) != 0) & (flat != c)).sum()\n"
    )


@pytest.mark.parametrize(
    ("line", "others", "why"),
    [
        ("return torch.bincount(x)", {}, "the data decides"),
        ("return x.bincount(y)", {}, "integers for an empty input, else"),
        ("return torch.bincount(x, weights=y, minlength=k)", {}, "integers for an empty input"),
        ("return x.bincount(minlength=k)", {"x": torch.ones(2, 2).long()}, "one-dimensional"),
        ("return x.bincount(minlength=k)", {"x": torch.ones(2)}, "one-dimensional integer tensor"),
        ("return x.bincount(minlength=k)", {"k": torch.tensor(4)}, "Python integer"),
    ],
)
def test_counted_values_is_refused(line: str, others: proving.Inputs, why: str) -> None:
    proving.refuses(COUNTED_VALUES, code_of(line), INTEGERS | others, why)


@pytest.mark.parametrize(
    ("body", "others", "why"),
    [
        ("return (x.unique() != c).sum()", {"x": torch.ones(3)}, "a tensor of integers"),
        ("return (x.unique() != c).sum()", {"c": torch.tensor(1)}, "Python number"),
        ("return y * x.unique().numel()", {"y": torch.ones(2).half()}, "float32 or float64"),
        ("return y * x.unique().numel()", {"y": torch.ones(2).long()}, "floating tensor"),
        ("return y * x.unique().numel()", {"y": 2.0}, "floating tensor"),
        ("return range(len(x.unique()))", {}, "Python number"),
        ("n = len(x.unique())\nreturn y[:n]", {}, "Python number"),
        ("n = len(x.unique())\nn = n if c else 1\nreturn y * n", {}, "Python number"),
        ("n = len(x.unique())\ndef f():\n    return n\nreturn y * n, f()", {}, "inner function"),
        ("return len(x.unique())", {}, "Python number"),
    ],
)
def test_distinct_count_is_refused(body: str, others: proving.Inputs, why: str) -> None:
    proving.refuses(DISTINCT_COUNT, code_of(body), INTEGERS | others, why)


@pytest.mark.parametrize(
    ("body", "others", "why"),
    [
        ("return y / len(x[mask])", {"mask": torch.tensor([0, 2])}, "boolean mask"),
        ("return y / len(x[mask])", {"y": torch.ones(2).half()}, "float32 or float64"),
        ("return y / len(x[mask])", {"y": torch.ones(2).long()}, "floating tensor"),
        ("return 2 * len(x[mask])", {}, "floating tensor"),
        ("return torch.zeros(len(x[mask]))", {}, "Python number"),
        ("if len(x[mask]) == 0:\n    return 0\nreturn y", {}, "Python number"),
        ("n = x[mask].numel()\nreturn y / n, n", {}, "Python number"),
        ("return y / max(len(x[mask]), k)", {"k": 0.5}, "Python integer"),
        ("n = len(x[mask])\nreturn y / max(n, k)", {}, "Python number"),
        ("max = min\nn = len(x[mask])\nreturn y / max(n, 1)", {}, "Python number"),
        ("return y / len((print() or x)[mask])", {}, "may have a side effect"),
    ],
)
def test_masked_count_is_refused(body: str, others: proving.Inputs, why: str) -> None:
    proving.refuses(MASKED_COUNT, code_of(body), FLOATS | others, why)


def test_it_is_not_safe_without_evidence() -> None:
    assert not proving.unseen(DISTINCT_COUNT, code_of("return (x.unique() != c).sum()")).safe
    assert not proving.unseen(MASKED_COUNT, code_of("return y / len(x[mask])")).safe


@pytest.mark.parametrize(
    ("fix", "body", "least"),
    [
        (COUNTED_VALUES, "return torch.bincount(x, minlength=k)", 2),
        (DISTINCT_COUNT, "return (torch.unique(x) != 0).sum()", 1),
        (DISTINCT_COUNT, "return y * len(x.unique())", 1),
        (MASKED_COUNT, "return y / max(len(x[mask]), 1)", 1),
        (MASKED_COUNT, "n = torch.where(mask)[0].numel()\nreturn y * n", 1),
    ],
)
def test_it_waits_no_more(fix: Fix, body: str, least: int) -> None:
    before, after = proving.syncs_go(fix, code_of(body), INTEGERS)
    assert before >= least
    assert after == 0
