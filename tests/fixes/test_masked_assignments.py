"""Fixes of assignments by a mask."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from fixes import proving
from torchtrim.fixes.masked_assignments import MASKED_ASSIGNMENT, MASKED_FILL
from torchtrim.source.facts import FixRefused
from torchtrim.source.source import SourceFile

FLOATS = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)
WHOLE = (torch.int64, torch.uint8, torch.bool, torch.int32)
HEAD = "import torch\nimport torch.nn.functional as F\ndef function(x, y, mask, v):\n"


code_of = partial(proving.code_of, HEAD)


def filled(rng: random.Random, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        return proving.floating(rng, size, dtype, odd=0.3)
    return proving.integral(rng, size, dtype, 0, 3)


def make_assignment(
    rng: random.Random, dtypes: tuple[torch.dtype, ...] = FLOATS + WHOLE
) -> Iterator[proving.Inputs]:
    """A tensor with NaN and infinities all over, one like it, and a number or a row as the value."""
    size = proving.shape(rng)
    of_mask = size[: rng.randint(1, len(size))]
    row = size[len(of_mask) :] if rng.random() < 0.6 else ()
    dtype = rng.choice(dtypes)
    graded = dtype.is_floating_point and rng.random() < 0.6
    scaled = dtype.is_floating_point and rng.random() < 0.5
    for _ in range(proving.DRAWS):
        yield {
            "x": filled(rng, size, dtype).requires_grad_(graded),
            "y": filled(rng, size, dtype).requires_grad_(scaled),
            "mask": proving.mask(rng, of_mask),
            "v": filled(rng, row, dtype).requires_grad_(graded and scaled),
        }


def harmless(rng: random.Random) -> Iterator[proving.Inputs]:
    """NaN and infinities only where the mask does not select."""
    for draw in make_assignment(rng, FLOATS):
        mask = draw["mask"]
        for name in ("x", "y"):
            tensor = draw[name].detach()
            view = mask.reshape(mask.shape + (1,) * (tensor.dim() - mask.dim()))
            size = torch.where(view & ~tensor.isfinite(), 1, tensor)
            draw[name] = size.requires_grad_(draw[name].requires_grad)
        yield draw


def packed(rng: random.Random) -> Iterator[proving.Inputs]:
    """A value with a row for each selected element; in the observed draw, not a single row."""
    size = proving.shape(rng)
    of_mask = size[: rng.randint(1, len(size))]
    dtype = rng.choice(FLOATS + WHOLE)
    graded = dtype.is_floating_point and rng.random() < 0.6
    for _ in range(proving.DRAWS):
        mask = proving.mask(rng, of_mask)
        rows = (int(mask.sum()), *size[len(of_mask) :])
        yield {
            "x": filled(rng, size, dtype),
            "y": filled(rng, size, dtype).requires_grad_(graded),
            "mask": mask,
            "v": filled(rng, rows, dtype).requires_grad_(graded),
        }


OF_ANY = [
    "x = x.clone()\nold = x\nx[mask] = v",
    "x = x + y\nview = x[..., :1]\nx[mask] = y[mask]\nx = x, view",
    "x = x.clone()\nx[mask, ...] = v.clone()  # the token",
    "x = [x.clone(), y]\nx[0][mask.bool()] = v.detach()",
]
OF_NUMBERS = [
    "x = x.clone()\nx[mask] += v",
    "x = x * y\nx[mask] *= y[mask]",
    "x = x.clone()\nx[mask] = x[mask].clamp(min=0) + y[mask]",
    "x = x * 1\nx[mask] /= y[mask].exp() + 1",
    "x = x.clone()\nx[mask] = (y[mask] * v).sigmoid()",
    "x = x.clone()\nx[mask] -= 2 * v",
]
OF_PACKED = [
    "x = x.clone()\nx[mask] = v",
    "x = x.clone()\nx[mask.bool()] = v.flip(0)",
    "x = x + y\nx[mask] = v",
]


@pytest.mark.parametrize(
    ("make", "structures", "least", "body"),
    [
        *((make_assignment, 35, 130, body) for body in OF_ANY),
        *((harmless, 24, 88, body) for body in OF_NUMBERS),
        *((packed, 40, 100, body) for body in OF_PACKED),
    ],
)
def test_masked_assignment_is_sound(
    make: proving.Make, structures: int, least: int, body: str
) -> None:
    code = code_of(f"{body}\nreturn x")
    proof = proving.prove(MASKED_ASSIGNMENT, code, make, structures=structures)
    assert proof.reaches(least)
    assert not proof.unsafe


MASK = torch.tensor([True, False, True])
ROWS = {"x": torch.ones(3, 2), "y": torch.ones(3, 2), "mask": MASK, "v": torch.zeros(2)}


def fixed(body: str, inputs: proving.Inputs) -> str:
    rewrite = proving.fixed(MASKED_ASSIGNMENT, code_of(body), inputs)
    assert rewrite.safe
    return proving.text_of(rewrite).removeprefix(HEAD)


def test_what_is_written_reads_like_its_surroundings() -> None:
    assert fixed("x[mask] = v  # the token", ROWS) == (
        "    x.copy_(torch.where(mask[..., None], v, x))  # the token\n"
    )
    assert fixed("y = [x]\ny[-1][mask > 0] *= 2", ROWS) == (
        "    y = [x]\n    target = y[-1]\n    kept = mask > 0\n"
        "    target.copy_(torch.where(kept[..., None], target * 2, target))\n"
    )
    assert fixed("x[mask == 1] = F.relu(v)", {**ROWS, "v": torch.zeros(2, 2)}) == (
        "    rows = F.relu(v)\n"
        "    x[torch.nonzero_static(mask == 1, size=len(rows)).unbind(1)] = rows\n"
    )


@pytest.mark.parametrize(
    ("body", "value", "why"),
    [
        ("x[mask] = v", torch.zeros((), dtype=torch.float64), "has the type and device"),
        ("x[mask] = v", torch.zeros(1, 2), "not a single row"),
        ("x[mask] = v", 2.0, "does not wait"),
        ("x[mask.nonzero()[:, 0]] = v", torch.zeros(()), "is a boolean mask"),
        ("x.long()[mask] /= v", torch.zeros(()), "has the type and device"),
        (
            "y = [x]\ny[0][mask] = print(v) or v",
            torch.zeros(()),
            "Assign the value to a name first",
        ),
        ("try:\n    x[mask] = v\nexcept IndexError:\n    pass", torch.zeros(2, 2), "may catch"),
        ("if x is not None: x[mask > 0] = v", torch.zeros(()), "Assign that part to a name first"),
        (
            "w = v.clone().requires_grad_()\nx[mask] *= w\nmask[0] = False",
            torch.zeros(()),
            "changes the mask",
        ),
    ],
)
def test_masked_assignment_is_refused(body: str, value: object, why: str) -> None:
    proving.refuses(MASKED_ASSIGNMENT, code_of(body), {**ROWS, "v": value}, why)


@pytest.mark.parametrize(
    "body",
    [
        "x[mask] = 0.0",
        "x[0] = v",
        "x[1:] = v",
        "x[mask] //= v",
        "x[mask] = y[mask] = v",
        "x[:, mask] = v",
    ],
)
def test_masked_assignment_ignores_other_code(body: str) -> None:
    assert not proving.matches(MASKED_ASSIGNMENT, code_of(body))


def test_a_value_that_changes_the_tensor_needs_a_name() -> None:
    proving.refuses(
        MASKED_ASSIGNMENT,
        code_of("x[mask] = x.mul_(2)[0].clone()"),
        ROWS,
        "Assign the value to a name first",
    )


def test_rows_are_added_too() -> None:
    inputs = {**ROWS, "v": torch.ones(2, 2)}
    proof = proving.prove(
        MASKED_ASSIGNMENT,
        code_of("x[mask] += v\nreturn x"),
        lambda rng: iter([inputs]),
        structures=1,
    )
    assert proof.agreed == 1


def test_masked_assignment_is_not_safe_without_evidence() -> None:
    assert not proving.unseen(MASKED_ASSIGNMENT, code_of("x[x > 0] = v")).safe


def test_masked_assignment_without_evidence_a_mask_may_have_fewer_dimensions() -> None:
    with pytest.raises(FixRefused, match="the source does not show"):
        proving.unseen(MASKED_ASSIGNMENT, code_of("x[mask] = y[mask] * 2"))


@pytest.mark.parametrize(
    ("body", "value"),
    [
        ("x[mask] = v", torch.zeros(2)),
        ("x[mask] = v", torch.zeros(2, 2)),
        ("x[mask] *= y[mask].exp()", torch.zeros(())),
    ],
)
def test_masked_assignment_waits_no_more(body: str, value: torch.Tensor) -> None:
    before, after = proving.syncs_go(
        MASKED_ASSIGNMENT, code_of(f"{body}\nreturn x"), {**ROWS, "v": value}
    )
    assert before >= 1
    assert after == 0


@pytest.mark.parametrize(
    ("value", "grade"),
    [
        ("y[mask].exp()", "ROUNDING"),
        ("torch.sigmoid(y[mask])", "ROUNDING"),
        ("y[mask] ** 0.5", "ROUNDING"),
        ("y[mask].softmax(-1)", "ROUNDING"),
        ("y[mask] ** 2", "BITWISE"),
        ("y[mask].clamp(min=0) * 3", "BITWISE"),
    ],
)
def test_what_depends_on_its_place_is_up_to_rounding(value: str, grade: str) -> None:
    rewrite = proving.fixed(MASKED_ASSIGNMENT, code_of(f"x[mask] = {value}\nreturn x"), ROWS)
    assert rewrite.equivalence == grade


def test_a_rank_for_which_it_differs_is_named() -> None:
    code = code_of("x = x.clone()\nx[mask] = v\nreturn x")
    seen = {**ROWS, "x": torch.zeros(2, 3, 8), "mask": torch.ones(2, 3) > 0, "v": torch.ones(8)}
    rewrite = proving.written_by(MASKED_ASSIGNMENT, code, seen).rewrite
    assert not rewrite.safe
    assert "changes the result for `x` float32" in rewrite.risk


def test_what_is_kept_for_other_ranks_is_not_fixed_again() -> None:
    code = code_of("x[mask] = v\nreturn x")
    rewrite = proving.fixed(MASKED_ASSIGNMENT, code, ROWS)
    after = proving.text_of(rewrite)
    assert not MASKED_ASSIGNMENT.places(SourceFile("case.py", after))


DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool)


def make_fill(rng: random.Random) -> Iterator[proving.Inputs]:
    size = proving.shape(rng)
    dtype = rng.choice(DTYPES)
    of_mask = size[: rng.randint(1, len(size))]
    kind = rng.choice((torch.bool, torch.bool, torch.int64))
    value = rng.choice((0, 1, True, 2.5, -1, float("nan"))) if dtype.is_floating_point else 1
    for _ in range(proving.DRAWS):
        if dtype.is_floating_point:
            x = proving.floating(rng, size, dtype, odd=0.3)
        else:
            x = proving.integral(rng, size, dtype, 0, 4)
        yield {"x": x, "mask": proving.mask(rng, of_mask).to(kind), "value": value}


@pytest.mark.parametrize(
    "line",
    [
        "x[mask.nonzero(as_tuple=True)] = value",
        "x[torch.nonzero(mask, as_tuple=True)] = value",
        "x[torch.where(mask)] = value",
    ],
)
def test_masked_fill_is_sound(line: str) -> None:
    code = f"import torch\ndef function(x, mask, value):\n    view = x\n    {line}\n    return x, view\n"
    proof = proving.prove(MASKED_FILL, code, make_fill)
    assert proof.reaches(990)
    assert not proof.unsafe


def test_gradients_pass_where_nothing_was_written() -> None:
    def make_graded(rng: random.Random) -> Iterator[proving.Inputs]:
        size = proving.shape(rng)
        for _ in range(proving.DRAWS):
            x = proving.floating(rng, size, torch.float32, odd=0.3).requires_grad_()
            yield {"x": x, "mask": proving.mask(rng, size)}

    code = "def function(x, mask):\n    y = x * 2\n    y[mask.nonzero(as_tuple=True)] = 0\n    return y\n"
    assert proving.prove(MASKED_FILL, code, make_graded).reaches(1000)


def test_a_mask_of_another_shape_is_refused() -> None:
    code = "def function(x, mask):\n    x[mask.nonzero(as_tuple=True)] = 0\n    return x\n"

    def make_larger(rng: random.Random) -> Iterator[proving.Inputs]:
        yield {"x": torch.ones(5, 5), "mask": torch.ones(3, 3, dtype=torch.bool)}

    proof = proving.prove(MASKED_FILL, code, make_larger, structures=1)
    assert list(proof.refused) == [
        "it requires that `mask` is a tensor whose shape starts that of `x`, which an observed run "
        "contradicts"
    ]


def test_masked_fill_waits_no_more() -> None:
    code = "def function(x, mask):\n    x[mask.nonzero(as_tuple=True)] = 0\n    return x\n"
    inputs = {"x": torch.ones(4, 5), "mask": torch.ones(4, 5, dtype=torch.bool)}
    assert proving.syncs_go(MASKED_FILL, code, inputs) == (2, 0)
