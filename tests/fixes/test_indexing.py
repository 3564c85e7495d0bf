"""Fixes of reads and assignments by an index."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from fixes import proving
from torchtrim.fixes.indexing import INDEX_ASSIGNMENT, ROW_BY_INDEX
from torchtrim.source.facts import Facts, FixRefused, NoTensor, StaticValue
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


code_of = partial(proving.code_of, HEAD)


def make_assignment(rng: random.Random) -> Iterator[proving.Inputs]:
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


ASSIGNMENT_BODIES = [
    "x = x.clone()\nview = x[:1]\nx[i] = value\nreturn x, view",
    "x = x * 1\nx[i, j] = value  # the chosen\nreturn x",
    "x = [x.clone()]\nx[0][:, j % x[0].shape[1]] = value\nreturn x",
    "x = x.clone()\nx[i[:, None], j, ...] = value\nreturn x",
    "x = x.clone()\nx[i.reshape(-1, 1)] = value\nreturn x",
]


@pytest.mark.parametrize("body", ASSIGNMENT_BODIES)
def test_index_assignment_is_sound(body: str) -> None:
    assert proving.prove(INDEX_ASSIGNMENT, code_of(body), make_assignment, structures=50).reaches(
        200
    )


def one(rng: random.Random) -> Iterator[proving.Inputs]:
    for draw in make_assignment(rng):
        yield {**draw, "i": torch.tensor(rng.randrange(-draw["x"].shape[0], draw["x"].shape[0]))}


@pytest.mark.parametrize("index", ["i", "i, j", "j, i % 1", "..., i % 1"])
def test_an_index_of_no_dimensions(index: str) -> None:
    body = f"x = x.clone()\nx[{index}] = value\nreturn x"
    assert proving.prove(INDEX_ASSIGNMENT, code_of(body), one, structures=25).reaches(100)


def inputs(**others: object) -> proving.Inputs:
    found = {
        "x": torch.ones(3, 2),
        "i": torch.tensor([0, 2]),
        "j": torch.tensor([1, 0]),
        "value": 0.0,
    }
    return {**found, **others}


def test_index_assignment_what_is_written() -> None:
    rewrite = proving.fixed(INDEX_ASSIGNMENT, code_of("x[i] = value  # none"), inputs())
    assert proving.text_of(rewrite).endswith("    x[i] = x.new_full((), value)  # none\n")
    rewrite = proving.fixed(INDEX_ASSIGNMENT, code_of("x[i] = 0"), inputs(i=torch.tensor(1)))
    assert proving.text_of(rewrite).endswith("    x[i[None]] = x.new_full((), 0)\n")
    rewrite = proving.fixed(INDEX_ASSIGNMENT, code_of("y = [x]\ny[0][i, j] = 0"), inputs())
    assert proving.text_of(rewrite).endswith(
        "    target = y[0]\n    target[i, j] = target.new_full((), 0)\n"
    )


@pytest.mark.parametrize(
    ("body", "others", "why"),
    [
        ("x[i] = value", {"value": torch.tensor(0.0)}, "Python number"),
        ("x[i] = value", {"i": torch.tensor([True, False, True])}, "not masks"),
        ("x[i] = value", {"i": [0, 2]}, "indices are integers"),
        ("x[i] = value", {"x": torch.ones(3, 2).long(), "value": 2.5}, "can hold"),
        ("x[i] = value", {"x": torch.ones(3, 2).to(torch.uint8), "value": 300}, "can hold"),
        ("x[i] = float(print() or 1)", {}, "Assign it to a name first"),
        ("x[i] = value", {"x": {}, "i": 1}, "Python number"),
        ("x[i, [0, 1]] = -float('inf')", {}, "is uploaded to serve as an index"),
    ],
)
def test_index_assignment_is_refused(body: str, others: proving.Inputs, why: str) -> None:
    proving.refuses(INDEX_ASSIGNMENT, code_of(body), inputs(**others), why)


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
def test_index_assignment_ignores_other_code(body: str) -> None:
    assert not proving.matches(INDEX_ASSIGNMENT, code_of(body))


def test_index_assignment_is_not_safe_without_evidence() -> None:
    tensor, number = StaticValue(kind="tensor"), StaticValue(kind=NoTensor("plain"))
    (match,) = proving.matches(INDEX_ASSIGNMENT, code_of("x[i] = float(value)"))
    assert not INDEX_ASSIGNMENT.rewrite(match, Facts(static={"X": tensor, "V": number})).safe
    for static in ({}, {"X": tensor, "V": tensor}, {"X": number, "V": number}):
        with pytest.raises(FixRefused, match="source"):
            INDEX_ASSIGNMENT.rewrite(match, Facts(static=static))


@pytest.mark.parametrize("value", ["value", "None", "[0, 1]", "value.T"])
def test_what_may_be_no_number_is_refused_without_evidence(value: str) -> None:
    (match,) = proving.matches(INDEX_ASSIGNMENT, code_of(f"x[i] = {value}"))
    static = {"X": StaticValue(kind="tensor"), "V": StaticValue(kind=NoTensor("plain"))}
    with pytest.raises(FixRefused, match="source"):
        INDEX_ASSIGNMENT.rewrite(match, Facts(static=static))


@pytest.mark.parametrize("index", [torch.tensor([0, 2]), torch.tensor(1)])
def test_index_assignment_waits_no_more(index: torch.Tensor) -> None:
    code = code_of("x[i] = value\nreturn x")
    assert proving.syncs_go(INDEX_ASSIGNMENT, code, inputs(i=index)) == (1, 0)
    assert proving.syncs_go(INDEX_ASSIGNMENT, code_of("x[i, j] = 1\nreturn x"), inputs()) == (1, 0)


ROW_BODIES = (
    "return table[t.item()] * 2",
    "return table[int(t)].sum()",
    "return 1 - (table + 1)[t]",
    "return x * table[t[None][0]]",
)


def make_row(rng: random.Random) -> Iterator[proving.Inputs]:
    size = (rng.choice((1, 3, 5)), *proving.shape(rng, most=2, least=0))
    dtype, graded = rng.choice((torch.float32, torch.bfloat16, torch.float64)), rng.random() < 0.5
    for _ in range(proving.DRAWS):
        table = proving.floating(rng, size, dtype).requires_grad_(graded)
        t = torch.tensor(rng.randrange(-size[0], size[0]))
        yield {"table": table, "t": t, "x": proving.floating(rng, (), dtype)}


@pytest.mark.parametrize("body", ROW_BODIES)
def test_row_by_index_is_the_same_and_never_safe(body: str) -> None:
    code = f"def function(table, t, x):\n    {body}\n"
    if body.endswith("[0]]"):
        code = f"def function(table, t, x):\n    t = t + 0\n    {body.replace('t[None][0]', 't')}\n"
    assert proving.prove(ROW_BY_INDEX, code, make_row, structures=65, suggested=True).reaches(260)
    assert not proving.prove(ROW_BY_INDEX, code, make_row, structures=2).agreed


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return table[n] + 1", "64-bit integer"),
        ("return table[t.int()] + 1", "64-bit integer"),
        ("row = table[t]\n    row.add_(1)\n    return row", "may be written to"),
    ],
)
def test_row_by_index_is_refused(body: str, reason: str) -> None:
    inputs = {"table": torch.ones(3), "t": torch.tensor(1), "n": 2}
    proving.refuses(ROW_BY_INDEX, f"def function(table, t, n):\n    {body}\n", inputs, reason)


@pytest.mark.parametrize("read", ["t.item()", "t"])
def test_row_by_index_waits_no_more(read: str) -> None:
    code = f"def function(table, t):\n    return table[{read}] + 1\n"
    assert proving.syncs_go(ROW_BY_INDEX, code, {"table": torch.ones(3), "t": torch.tensor(1)}) == (
        1,
        0,
    )
