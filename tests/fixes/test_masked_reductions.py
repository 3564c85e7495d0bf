"""Fixes of reductions over selected elements."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from fixes import proving
from torchtrim.fixes.masked_reductions import MASKED_CROSS_ENTROPY, MASKED_REDUCTION
from torchtrim.source.facts import FixRefused

FLOATS = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)
WHOLE = (torch.int64, torch.uint8, torch.bool, torch.int32)
REDUCTION_HEAD = "import torch\nimport torch.nn.functional as F\ndef function(x, y, mask, scale):\n"


reduction_code = partial(proving.code_of, REDUCTION_HEAD)


def hide(x: torch.Tensor, mask: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """The tensor with a NaN or an infinity wherever the mask does not select."""
    odd = rng.choice((float("nan"), float("inf"), float("-inf"), 0.0))
    view = mask.reshape(mask.shape + (1,) * (x.dim() - mask.dim()))
    return x.masked_fill_(~view, odd)


def floats(rng: random.Random) -> Iterator[proving.Inputs]:
    """Floating tensors of one shape; what the mask leaves out is NaN, infinite or zero."""
    size = proving.shape(rng)
    of_mask = size[: rng.randint(1, len(size))]
    dtype = rng.choice(FLOATS)
    graded, scaled = rng.random() < 0.7, rng.random() < 0.4
    row = size[len(of_mask) :] if rng.random() < 0.5 else ()
    for _ in range(proving.DRAWS):
        mask = proving.mask(rng, of_mask)
        x = hide(proving.floating(rng, size, dtype), mask, rng)
        y = hide(proving.floating(rng, size, dtype), mask, rng)
        yield {
            "x": x.requires_grad_(graded),
            "y": y,
            "mask": mask,
            "scale": proving.floating(rng, row, dtype).requires_grad_(scaled),
        }


def rows(rng: random.Random) -> Iterator[proving.Inputs]:
    """Floating rows, selected whole."""
    of_mask = proving.shape(rng, most=2)
    size = (*of_mask, rng.choice((1, 2, 5)))
    dtype = rng.choice(FLOATS)
    graded = rng.random() < 0.7
    for _ in range(proving.DRAWS):
        mask = proving.mask(rng, of_mask)
        x = hide(proving.floating(rng, size, dtype), mask, rng).requires_grad_(graded)
        y = hide(proving.floating(rng, size, dtype), mask, rng)
        yield {"x": x, "y": y, "mask": mask, "scale": 0.5}


def whole(rng: random.Random) -> Iterator[proving.Inputs]:
    """Integers and truth values."""
    size = proving.shape(rng)
    of_mask = size[: rng.randint(1, len(size))]
    dtype = rng.choice(WHOLE)
    for _ in range(proving.DRAWS):
        x, y = (proving.integral(rng, size, dtype, 0, 3) for _ in "xy")
        yield {"x": x, "y": y, "mask": proving.mask(rng, of_mask), "scale": 1}


OF_FLOATS = [
    "return x[mask].mean()",
    "return torch.mean((x[mask] - y[mask]).abs() * scale, dim=0)",
    "return (x[mask] / scale).tanh().sum(0)",
    "return {'loss': (x[mask].float() - y[mask].float()).pow(2).mean()}",
    "return torch.sqrt(x[mask].abs() + 1.0).sum() / mask.sum()",
    "picked = x[\n    mask.logical_not()\n]\nreturn picked.square().mean()",
    "p = x[mask]\nt = y[mask]  # what is wanted\nreturn F.smooth_l1_loss(p, t, beta=0.5)",
    "diff = x[mask] - y[mask]\nfar = diff.abs() * scale\nreturn (far * diff).sum()",
    "p = x[mask]\nt = y[mask]\nerror = (p - t) ** 2\nloss = error.mean()\nreturn loss",
    "return F.mse_loss(x[mask], y[mask], reduction='sum')",
    "return 2 * F.binary_cross_entropy_with_logits(x[mask], y[mask].sigmoid())",
    "return (x[mask] > y[mask]).float().mean()",
]
OF_ROWS = [
    "return (x[mask] - y[mask]).norm(dim=-1).mean()",
    "return (x[mask, :].argmax(dim=-1) == y[mask, :].argmax(dim=-1)).sum()",
    "return -(y[mask].softmax(-1) * x[mask].log_softmax(-1)).sum(-1).mean()",
]
OF_WHOLE = [
    "return (x[mask] == y[mask]).sum(), 0",
    "return torch.any(x[mask] > y[mask])",
    "return x[mask.bool()].all()",
    "return torch.count_nonzero(x[mask] * scale)",
    "return x[mask].sum(dim=0)",
]


@pytest.mark.parametrize(
    ("make", "least", "body"),
    [
        *((floats, 90, body) for body in OF_FLOATS),
        *((rows, 92, body) for body in OF_ROWS),
        *((whole, 92, body) for body in OF_WHOLE),
    ],
)
def test_masked_reduction_is_sound(make: proving.Make, least: int, body: str) -> None:
    proof = proving.prove(MASKED_REDUCTION, reduction_code(body), make, structures=24)
    assert proof.reaches(least)
    assert not proof.unsafe


MASK = torch.tensor([True, False, True])
ROW = {"x": torch.ones(3), "y": torch.ones(3), "mask": MASK, "scale": 2.0}


def fixed(body: str, inputs: proving.Inputs | None = None) -> str:
    rewrite = proving.fixed(MASKED_REDUCTION, reduction_code(body), inputs or ROW)
    assert rewrite.safe
    return proving.text_of(rewrite).removeprefix(REDUCTION_HEAD)


def test_what_is_written_reads_like_its_surroundings() -> None:
    graded = {**ROW, "x": torch.ones(3, requires_grad=True)}
    body = "p = x[mask > 0]\nt = y[mask > 0]  # wanted\nreturn 1 - F.mse_loss(p, t)"
    assert fixed(body, graded) == (
        "    kept = mask > 0\n    p = torch.where(kept, x, 1)\n"
        "    t = torch.where(kept, y, 1)  # wanted\n    return 1 - "
        '(torch.where(kept, F.mse_loss(p, t, reduction="none"), 0).sum() / kept.sum())\n'
    )
    text = fixed("return (x[mask] == y[mask]).sum()")
    assert text == "    return torch.where(mask, x == y, False).sum()\n"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("return (x[mask] - y[~mask]).sum()", "no dimension for the selected elements"),
        ("picked = y.sort().values\nreturn (x[mask] * picked[1:]).sum()", "no dimension"),
        ("return x[torch.tensor([0, 2])].sum()", "is a boolean mask"),
        ("return (x[scale.add_(0) < mask] - 1).sum()", "Assign its result to a name first"),
        (
            "return (print(x) or x)[mask.bool()].sum()",
            "Assign its result, or the mask, to a name first",
        ),
        ("return torch.masked_select(x, mask[:1]).mean()", "is a boolean mask"),
        ("return sum(x[mask > k].sum() for k in (0, 1))", "Assign that part to a name first"),
        ("return F.mse_loss(x[mask].double(), scale * y[mask])", "has the type of the selection"),
    ],
)
def test_masked_reduction_is_refused(body: str, why: str) -> None:
    scale = torch.tensor(2.0, requires_grad="add_" not in body)
    inputs = {**ROW, "scale": scale}
    proving.refuses(MASKED_REDUCTION, reduction_code(body), inputs, why)


@pytest.mark.parametrize(
    "body",
    [
        "return x[mask].max()",
        "picked = y[mask].sort().values\nreturn (x[mask] * picked).sum()",
        "return x[mask].sum(-1)",
        "return x[0].sum() + y[1:].sum()",
        "p = x[mask]\nprint(p)\nreturn p * 2",
        "return F.mse_loss(x[mask], y[mask], reduction='none')",
        "return (x[mask] // y[mask]).sum()",
    ],
)
def test_masked_reduction_ignores_other_code(body: str) -> None:
    assert not proving.matches(MASKED_REDUCTION, reduction_code(body))


@pytest.mark.parametrize(
    "between",
    [
        "x.zero_()",
        "mask = ~mask",
        "mask[0] = False",
        "q = p + 1",
        "def later():\n        return p",
        "p = p + 1",
        "if scale:\n        p = x",
        "global p",
    ],
)
def test_a_name_stays_where_something_may_change_between(between: str) -> None:
    body = f"p = x[mask]\n{between}\nreturn (p - y[mask]).sum()"
    if between == "global p":
        body = f"{between}\n{body.replace(between, 'pass')}"
    for match in proving.matches(MASKED_REDUCTION, reduction_code(body)):
        assert match.begin is None
        with pytest.raises(FixRefused):
            proving.fixed(MASKED_REDUCTION, reduction_code(body), ROW)


def test_a_name_stays_where_its_statement_may_change_the_mask() -> None:
    body = "p = x[mask]\nreturn mask.zero_().sum() + (p * 2).sum()"
    assert not proving.matches(MASKED_REDUCTION, reduction_code(body))


MADE = "mask = torch.zeros_like(mask)\nmask[0] = True\n"
SCALED = {**ROW, "scale": torch.tensor(2.0, requires_grad=True)}


def test_a_mask_may_be_made_in_place_before() -> None:
    assert "mask[0] = True" in fixed(f"{MADE}return (x[mask] * scale).sum()", SCALED)
    looped = "for k in range(2):\n    " + MADE.strip().replace("\n", "\n    ")
    fixed(f"{looped}\n    x = x * (y[mask] * scale).sum()\nreturn x", SCALED)


@pytest.mark.parametrize("change", ["mask &= x > 0", "mask[0] = False", "mask[1:].fill_(0)"])
def test_a_mask_that_is_changed_later_is_refused(change: str) -> None:
    proving.refuses(
        MASKED_REDUCTION,
        reduction_code(f"l = (x[mask] * scale).sum()\n{change}\nreturn l"),
        SCALED,
        "changes the mask in place",
    )
    looped = f"for k in range(2):\n    {change}\n    x = x * (y[mask] * scale).sum()\nreturn x"
    proving.refuses(MASKED_REDUCTION, reduction_code(looped), SCALED, "changes the mask in place")


def test_what_a_call_may_bind_anew_is_not_taken_for_the_same() -> None:
    code = reduction_code("global seen\nseen = mask\nreturn scale(x)[seen].sum()")
    proving.refuses(
        MASKED_REDUCTION,
        code,
        {**SCALED, "scale": torch.abs},
        "Assign its result, or the mask, to a name first",
    )


def test_masked_reduction_is_not_safe_without_evidence() -> None:
    rewrite = proving.unseen(MASKED_REDUCTION, reduction_code("return x[x > y].mean()"))
    assert not rewrite.safe
    assert "boolean mask" in rewrite.open_needs[0]


def test_masked_reduction_without_evidence_a_mask_may_have_fewer_dimensions() -> None:
    with pytest.raises(FixRefused, match="the source does not show"):
        proving.unseen(MASKED_REDUCTION, reduction_code("return x[mask].mean()"))


@pytest.mark.parametrize(
    ("body", "before"),
    [
        ("p = x[mask]\nt = y[mask]\nreturn F.mse_loss(p, t) + 1", 3),
        ("return x[mask].mean()", 2),
    ],
)
def test_masked_reduction_waits_no_more(body: str, before: int) -> None:
    x, mask = torch.ones(4, 5, requires_grad=True), torch.ones(4, 5, dtype=torch.bool)
    inputs = {"x": x, "y": torch.ones(4, 5), "mask": mask, "scale": 2.0}
    assert proving.syncs_go(MASKED_REDUCTION, reduction_code(body), inputs) == (before, 0)


CROSS_ENTROPY_HEAD = (
    "import torch\nimport torch.nn.functional as F\ndef function(scores, labels, mask, weight):\n"
)
CLASSES = 4


cross_entropy_code = partial(proving.code_of, CROSS_ENTROPY_HEAD)


def make(rng: random.Random) -> Iterator[proving.Inputs]:
    """Scores that are NaN or infinite, and labels out of range, wherever the mask does not select."""
    size = proving.shape(rng)
    dtype = rng.choice((torch.float32, torch.float64, torch.bfloat16))
    for _ in range(proving.DRAWS):
        mask = proving.mask(rng, size)
        odd = rng.choice((float("nan"), float("inf"), float("-inf"), 0.0))
        scores = proving.floating(rng, (*size, CLASSES), dtype).masked_fill_(~mask[..., None], odd)
        labels = proving.integral(rng, size, torch.int64, 0, CLASSES).masked_fill_(~mask, 77)
        if rng.random() < 0.3:
            labels = torch.where(mask & (labels == 0), -100, labels)
        yield {
            "scores": scores.requires_grad_(),
            "labels": labels,
            "mask": mask,
            "weight": torch.linspace(0.5, 2, CLASSES, dtype=dtype),
        }


BODIES = [
    "return F.cross_entropy(scores[mask], labels[mask])",
    "return {'loss': 2 * F.cross_entropy(\n    scores[labels != 77],  # those that count\n"
    "    labels[labels != 77], weight=weight, label_smoothing=0.1)}",
    "s = scores[mask]\nwanted = labels[mask]  # by name\nreturn F.cross_entropy(s, wanted, reduction='sum')",
    "return F.nll_loss(scores[mask], labels[mask], weight=weight)",
    "picked = scores[mask]\nreturn F.cross_entropy(picked.double(), labels[mask].long(), ignore_index=0)",
    "kept = labels != 77\nturned = scores.movedim(-1, 1)\n"
    "return F.cross_entropy(turned.movedim(1, -1)[kept], labels[kept])",
]


@pytest.mark.parametrize("body", BODIES)
def test_masked_cross_entropy_is_sound(body: str) -> None:
    proof = proving.prove(MASKED_CROSS_ENTROPY, cross_entropy_code(body), make, structures=55)
    assert proof.reaches(200), proof
    assert not proof.unsafe


def inputs(**others: object) -> proving.Inputs:
    found = {
        "scores": torch.randn(3, CLASSES, requires_grad=True),
        "labels": torch.tensor([0, 1, 2]),
        "mask": torch.tensor([True, False, True]),
        "weight": torch.ones(CLASSES),
    }
    return {**found, **others}


def test_masked_cross_entropy_what_is_written_keeps_names_and_comments() -> None:
    body = "s = scores[mask > 0]\nt = labels[mask > 0]  # wanted\nreturn F.cross_entropy(s, t)"
    rewrite = proving.fixed(MASKED_CROSS_ENTROPY, cross_entropy_code(body), inputs())
    assert proving.text_of(rewrite).removeprefix(CROSS_ENTROPY_HEAD) == (
        "    kept = mask > 0\n    s = scores.masked_fill(~kept.unsqueeze(-1), 0)\n"
        "    t = torch.where(kept, labels.long(), -100)  # wanted\n    return F.cross_entropy(s, t)\n"
    )
    assert rewrite.match.lines == (4, 6)


def test_long_scores_get_a_name() -> None:
    body = "return F.cross_entropy(scores.permute(0, 2, 1)[mask], labels[mask], reduction='sum')"
    images = {"labels": torch.ones(2, 3).long(), "mask": torch.ones(2, 3) > 0}
    images["scores"] = torch.randn(2, CLASSES, 3, requires_grad=True)
    rewrite = proving.fixed(MASKED_CROSS_ENTROPY, cross_entropy_code(body), inputs(**images))
    assert proving.text_of(rewrite).removeprefix(CROSS_ENTROPY_HEAD) == (
        "    rows = scores.permute(0, 2, 1).masked_fill(~mask.unsqueeze(-1), 0).flatten(0, -2)\n"
        "    return F.cross_entropy("
        "rows, torch.where(mask, labels.long(), -100).flatten(), reduction='sum')\n"
    )


@pytest.mark.parametrize(
    ("words", "others", "why"),
    [
        (", reduction='none'", {}, "another shape"),
        (", size_average=False", {}, "use `reduction`"),
        (", ignore_index=int('3')", {}, "Assign it to a name first"),
        ("", {"labels": torch.ones(3, CLASSES)}, "a mask with the shape"),
        ("", {"mask": torch.tensor([0, 2])}, "a mask with the shape"),
        ("", {"labels": torch.tensor([0, 1, 2], dtype=torch.uint8)}, "class indices"),
    ],
)
def test_masked_cross_entropy_is_refused(words: str, others: proving.Inputs, why: str) -> None:
    code = cross_entropy_code(f"return F.cross_entropy(scores[mask], labels[mask]{words})")
    proving.refuses(MASKED_CROSS_ENTROPY, code, inputs(**others), why)


@pytest.mark.parametrize(
    "body",
    [
        "return F.cross_entropy(scores[mask], labels[~mask])",
        "s = scores[mask]\nmask = ~mask\nreturn F.cross_entropy(s, labels[mask])",
        "s = scores[mask]\nprint(s)\nreturn F.cross_entropy(s, labels[mask])",
        "return F.cross_entropy(scores, labels[mask])",
    ],
)
def test_masked_cross_entropy_ignores_other_code(body: str) -> None:
    assert not proving.matches(MASKED_CROSS_ENTROPY, cross_entropy_code(body))


def test_masked_cross_entropy_is_not_safe_without_evidence() -> None:
    assert len(proving.unseen(MASKED_CROSS_ENTROPY, cross_entropy_code(BODIES[0])).open_needs) == 3


@pytest.mark.parametrize("body", [BODIES[0], BODIES[2]])
def test_masked_cross_entropy_waits_no_more(body: str) -> None:
    before, after = proving.syncs_go(MASKED_CROSS_ENTROPY, cross_entropy_code(body), inputs())
    assert before == 3
    assert after == 0
