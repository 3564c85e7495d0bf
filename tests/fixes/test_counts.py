"""Fixes of counts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from fixes import proving
from torchtrim.fixes.counts import COUNTED_VALUES, DISTINCT_COUNT, MASKED_COUNT

COUNTED_HEAD = "import torch\ndef function(x, w, k):\n"
COUNTED_WHOLE = (torch.int64, torch.int32, torch.uint8)


def counted_code(line: str) -> str:
    return f"{COUNTED_HEAD}    {line}\n"


def make_counted(rng: random.Random) -> Iterator[proving.Inputs]:
    """Values below k alone."""
    many, k = rng.choice((0, 1, 9)), rng.choice((1, 3, 8))
    dtype, real = rng.choice(COUNTED_WHOLE), rng.choice((torch.float32, torch.float64))
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
def test_counted_values_agrees_where_all_values_are_below(line: str) -> None:
    code = counted_code(line)
    for number in range(84):
        draws = list(make_counted(random.Random(number)))
        rewrite = proving.fixed(COUNTED_VALUES, code, draws[0])
        assert "would make the original's result longer" in rewrite.risk
        assert not rewrite.safe
        assert not rewrite.open_needs
        after = proving.text_of(rewrite)
        for draw in draws:
            assert proving.agree(rewrite, code, after, draw)


@pytest.mark.parametrize(
    ("line", "others", "why"),
    [
        ("return torch.bincount(x)", {}, "the data decides"),
        ("return x.bincount(w)", {}, "integers for an empty input, else"),
        (
            "return torch.bincount(x, weights=w, minlength=k)",
            {},
            "integers for an empty input, else",
        ),
        (
            "return torch.bincount(x, minlength=k)",
            {"x": torch.ones(2, 2).long()},
            "one-dimensional",
        ),
        (
            "return torch.bincount(x, minlength=k)",
            {"x": torch.ones(2)},
            "one-dimensional integer tensor",
        ),
        ("return torch.bincount(x, minlength=k)", {"k": torch.tensor(4)}, "Python integer"),
    ],
)
def test_counted_values_is_refused(line: str, others: proving.Inputs, why: str) -> None:
    inputs = {"x": torch.tensor([0, 2, 2]), "w": torch.ones(3), "k": 4, **others}
    proving.refuses(COUNTED_VALUES, counted_code(line), inputs, why)


def test_counted_values_waits_no_more() -> None:
    inputs = {"x": torch.tensor([0, 2, 2]), "w": torch.ones(3), "k": 4}
    assert proving.syncs_go(
        COUNTED_VALUES, counted_code("return torch.bincount(x, minlength=k)"), inputs
    ) == (2, 0)


DISTINCT_WHOLE = (torch.int64, torch.int32, torch.uint8, torch.int8, torch.bool)
DISTINCT_HEAD = "import torch\nfrom torch import unique\ndef function(x, y, c):\n"


distinct_code = partial(proving.code_of, DISTINCT_HEAD)


def make_distinct(rng: random.Random) -> Iterator[proving.Inputs]:
    size = proving.shape(rng)
    dtype, real = rng.choice(DISTINCT_WHOLE), rng.choice((torch.float32, torch.float64))
    for _ in range(proving.DRAWS):
        yield {
            "x": proving.integral(rng, size, dtype, 0, rng.choice((1, 2, 6))),
            "y": proving.floating(rng, (2,), real).requires_grad_(),
            "c": rng.choice((0, 1, -1, 100)),
        }


DISTINCT_BODIES = [
    "return (torch.unique(x) != c).sum(), 0",
    "return (x.unique() != c).sum() < 2",
    "return y / len(torch.unique(x + 1))",
    "n = x.unique().numel()  # classes\nloss = y.sum() * n\nreturn loss - n",
    "return y.sum() - -x[..., :1].unique().size(0)",
    "total = y.sum() + 1 / y.exp() * unique(x).shape[0]\nreturn total",
]


@pytest.mark.parametrize("body", DISTINCT_BODIES)
def test_distinct_count_is_sound(body: str) -> None:
    proof = proving.prove(DISTINCT_COUNT, distinct_code(body), make_distinct, structures=45)
    assert proof.reaches(180)
    assert not proof.unsafe


def distinct_inputs(**others: object) -> proving.Inputs:
    return {"x": torch.tensor([1, 1, 2]), "y": torch.ones(2), "c": 0, **others}


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
        (
            "n = len(x.unique())\ndef later():\n    return n\nreturn y * n, later()",
            {},
            "inner function",
        ),
        ("return len(x.unique())", {}, "Python number"),
    ],
)
def test_distinct_count_is_refused(body: str, others: proving.Inputs, why: str) -> None:
    proving.refuses(DISTINCT_COUNT, distinct_code(body), distinct_inputs(**others), why)


def test_what_is_computed_is_computed_once() -> None:
    rewrite = proving.fixed(
        DISTINCT_COUNT,
        distinct_code("return (torch.unique(x.abs() + 1) != c).sum()"),
        distinct_inputs(),
    )
    assert proving.text_of(rewrite).removeprefix(DISTINCT_HEAD) == (
        "    if (x.dim(), x.dtype) == (1, torch.int64):\n"
        "        values = x.abs() + 1\n"
        "        return (values.flatten().sort().values.diff() != 0).sum() + (values.numel() > 0)"
        " - (values == c).any().long()\n"
        "    return (torch.unique(x.abs() + 1) != c).sum()\n"
    )


def test_distinct_count_is_not_safe_without_evidence() -> None:
    assert not proving.unseen(DISTINCT_COUNT, distinct_code(DISTINCT_BODIES[0])).safe


@pytest.mark.parametrize(
    "body", ["return (torch.unique(x) != 0).sum()", "return y * len(x.unique())"]
)
def test_distinct_count_waits_no_more(body: str) -> None:
    before, after = proving.syncs_go(DISTINCT_COUNT, distinct_code(body), distinct_inputs())
    assert before >= 1
    assert after == 0


MASKED_HEAD = "import torch\ndef function(x, y, mask, least):\n"


masked_code = partial(proving.code_of, MASKED_HEAD)


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
        yield {
            "x": x,
            "y": proving.floating(rng, (3,), real).requires_grad_(),
            "mask": proving.mask(rng, of_mask),
            "least": rng.choice((0, 1, 4)),
        }


MASKED_BODIES = [
    "return y.sum() / x[mask].numel()",
    "return y / max(len(x[mask]), least)",
    "n = x[mask].shape[0]  # those that count\nloss = y * n\nreturn loss / -n",
    "return {'loss': y.sum() / max(1, x.nonzero().size(0))}",
    "return y * torch.nonzero(x).numel()",
    "return y - torch.where(mask)[0].numel()",
    "n = x[mask].numel()\nm = max(1, n)\nreturn y / max(n, 1) - y * m",
    "count = mask.nonzero(as_tuple=True)[0].shape[0]\nreturn (y + count) * (count - y)",
]


@pytest.mark.parametrize("body", MASKED_BODIES)
def test_masked_count_is_sound(body: str) -> None:
    assert proving.prove(MASKED_COUNT, masked_code(body), make_masked, structures=40).reaches(160)


def masked_inputs(**others: object) -> proving.Inputs:
    found = {
        "x": torch.ones(3),
        "y": torch.ones(2),
        "mask": torch.tensor([True, False, True]),
        "least": 1,
    }
    return {**found, **others}


def fixed(body: str, **others: object) -> str:
    rewrite = proving.fixed(MASKED_COUNT, masked_code(body), masked_inputs(**others))
    return proving.text_of(rewrite).removeprefix(MASKED_HEAD)


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
        ("return torch.zeros(len(x[mask]))", {}, "Python number"),
        ("if len(x[mask]) == 0:\n    return 0\nreturn y", {}, "Python number"),
        ("n = x[mask].numel()\nreturn y / n, n", {}, "Python number"),
        ("return y / max(len(x[mask]), least)", {"least": 0.5}, "Python integer"),
        ("n = len(x[mask])\nreturn y / max(n, least)", {}, "Python number"),
        ("max = min\nn = len(x[mask])\nreturn y / max(n, 1)", {}, "Python number"),
        ("return y / len((print() or x)[mask])", {}, "may have a side effect"),
    ],
)
def test_masked_count_is_refused(body: str, others: proving.Inputs, why: str) -> None:
    proving.refuses(MASKED_COUNT, masked_code(body), masked_inputs(**others), why)


def test_masked_count_is_not_safe_without_evidence() -> None:
    assert not proving.unseen(MASKED_COUNT, masked_code("return y / len(x[mask])")).safe


@pytest.mark.parametrize(
    "body", ["return y / max(len(x[mask]), 1)", "n = torch.where(mask)[0].numel()\nreturn y * n"]
)
def test_masked_count_waits_no_more(body: str) -> None:
    before, after = proving.syncs_go(MASKED_COUNT, masked_code(body), masked_inputs())
    assert before == 1
    assert after == 0
