"""`x[mask].mean()` and its like."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fixes import proving
from torchtrim.fixes.masked_reduction import FIX
from torchtrim.rewriter.edits import patch
from torchtrim.source.facts import Facts, Refused
from torchtrim.source.source import Source

FLOATS = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)
WHOLE = (torch.int64, torch.uint8, torch.bool, torch.int32)
HEAD = "import torch\nimport torch.nn.functional as F\ndef function(x, y, mask, scale):\n"


def code_of(body: str) -> str:
    return HEAD + "".join(f"    {line}\n" for line in body.splitlines())


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


@pytest.mark.parametrize("body", OF_FLOATS)
def test_floats(body: str) -> None:
    proof = proving.prove(FIX, code_of(body), floats, structures=24)
    assert proof.reaches(90), proof
    assert not proof.unsafe


@pytest.mark.parametrize("body", OF_ROWS)
def test_rows(body: str) -> None:
    proof = proving.prove(FIX, code_of(body), rows, structures=24)
    assert proof.reaches(92), proof
    assert not proof.unsafe


@pytest.mark.parametrize("body", OF_WHOLE)
def test_whole_numbers(body: str) -> None:
    proof = proving.prove(FIX, code_of(body), whole, structures=24)
    assert proof.reaches(92), proof
    assert not proof.unsafe


MASK = torch.tensor([True, False, True])
ROW = {"x": torch.ones(3), "y": torch.ones(3), "mask": MASK, "scale": 2.0}


def fixed(body: str, inputs: proving.Inputs | None = None) -> str:
    rewrite = proving.fixed(FIX, code_of(body), inputs or ROW)
    assert rewrite.safe
    return patch(rewrite.match.source, [rewrite]).text.removeprefix(HEAD)


def test_what_is_written_reads_like_its_surroundings() -> None:
    graded = {**ROW, "x": torch.ones(3, requires_grad=True)}
    body = "p = x[mask > 0]\nt = y[mask > 0]  # wanted\nreturn 1 - F.mse_loss(p, t)"
    assert fixed(body, graded) == (
        "    if (x.dim(), y.dim(), mask.dim()) == (1, 1, 1) and x.dtype == torch.float32 and "
        "y.dtype == torch.float32:\n"
        "        kept = mask > 0\n        p = torch.where(kept, x, 1)\n"
        "        t = torch.where(kept, y, 1)  # wanted\n"
        "        return 1 - "
        '(torch.where(kept, F.mse_loss(p, t, reduction="none"), 0).sum() / kept.sum())\n'
        "    p = x[mask > 0]\n    t = y[mask > 0]  # wanted\n    return 1 - F.mse_loss(p, t)\n"
    )
    assert "        torch.where(mask, x == y, False).sum()\n        if (x.dim()" in fixed(
        "return (x[mask] == y[mask]).sum()"
    )


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("return (x[mask] - y[~mask]).sum()", "no dimension for the selected elements"),
        ("picked = y.sort().values\nreturn (x[mask] * picked[1:]).sum()", "no dimension"),
        ("return x[torch.tensor([0, 2])].sum()", "is a boolean mask"),
        ("return (x[scale.add_(0) < mask] - 1).sum()", "Give its result a name first"),
        ("return (print(x) or x)[mask.bool()].sum()", "Give its result, or the mask, a name first"),
        ("return torch.masked_select(x, mask[:1]).mean()", "is a boolean mask"),
        ("return sum(x[mask > k].sum() for k in (0, 1))", "Give that part a name first"),
        ("return F.mse_loss(x[mask].double(), scale * y[mask])", "has the type of the selection"),
    ],
)
def test_refused(body: str, why: str) -> None:
    scale = torch.tensor(2.0, requires_grad="add_" not in body)
    inputs = {**ROW, "scale": scale}
    with pytest.raises(Refused, match=why):
        proving.fixed(FIX, code_of(body), inputs)


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
def test_not_its_business(body: str) -> None:
    assert not list(FIX.find(Source("case.py", code_of(body))))


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
    for match in FIX.find(Source("case.py", code_of(body))):
        assert match.begin is None
        with pytest.raises(Refused):
            proving.fixed(FIX, code_of(body), ROW)


def test_a_name_stays_where_its_statement_may_change_the_mask() -> None:
    body = "p = x[mask]\nreturn mask.zero_().sum() + (p * 2).sum()"
    assert not list(FIX.find(Source("case.py", code_of(body))))


MADE = "mask = torch.zeros_like(mask)\nmask[0] = True\n"
SCALED = {**ROW, "scale": torch.tensor(2.0, requires_grad=True)}


def test_a_mask_may_be_made_in_place_before() -> None:
    assert "mask[0] = True" in fixed(f"{MADE}return (x[mask] * scale).sum()", SCALED)
    looped = "for k in range(2):\n    " + MADE.strip().replace("\n", "\n    ")
    fixed(f"{looped}\n    x = x * (y[mask] * scale).sum()\nreturn x", SCALED)


@pytest.mark.parametrize("change", ["mask &= x > 0", "mask[0] = False", "mask[1:].fill_(0)"])
def test_a_mask_that_is_changed_later_is_refused(change: str) -> None:
    with pytest.raises(Refused, match="changes the mask in place"):
        proving.fixed(FIX, code_of(f"l = (x[mask] * scale).sum()\n{change}\nreturn l"), SCALED)
    looped = f"for k in range(2):\n    {change}\n    x = x * (y[mask] * scale).sum()\nreturn x"
    with pytest.raises(Refused, match="changes the mask in place"):
        proving.fixed(FIX, code_of(looped), SCALED)


def test_what_a_call_may_bind_anew_is_not_taken_for_the_same() -> None:
    code = code_of("global seen\nseen = mask\nreturn scale(x)[seen].sum()")
    with pytest.raises(Refused, match="Give its result, or the mask, a name first"):
        proving.fixed(FIX, code, {**SCALED, "scale": torch.abs})


def test_without_evidence_it_is_not_safe() -> None:
    (match,) = FIX.find(Source("case.py", code_of("return x[x > y].mean()")))
    rewrite = FIX.rewrite(match, Facts())
    assert not rewrite.safe
    assert "boolean mask" in rewrite.open_needs[0]


def test_without_evidence_a_mask_may_have_fewer_dimensions() -> None:
    (match,) = FIX.find(Source("case.py", code_of("return x[mask].mean()")))
    with pytest.raises(Refused, match="the source does not say so"):
        FIX.rewrite(match, Facts())


def test_it_waits_no_more() -> None:
    x = torch.ones(4, 5, requires_grad=True)
    inputs = {
        "x": x,
        "y": torch.ones(4, 5),
        "mask": torch.ones(4, 5, dtype=torch.bool),
        "scale": 2.0,
    }
    body = "p = x[mask]\nt = y[mask]\nreturn F.mse_loss(p, t) + 1"
    assert proving.syncs_go(FIX, code_of(body), inputs) == (3, 0)
    assert proving.syncs_go(FIX, code_of("return x[mask].mean()"), inputs) == (2, 0)
