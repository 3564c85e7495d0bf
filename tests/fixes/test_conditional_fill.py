"""`if mask.any(): x = x.masked_fill(mask, v)`."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fixes import proving
from torchtrim.fixes.conditional_fill import FIX

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def make(rng: random.Random) -> Iterator[proving.Inputs]:
    size, dtype = proving.shape(rng), rng.choice(TYPES)
    graded = rng.random() < 0.5
    for draw in range(proving.DRAWS):
        x = proving.floating(rng, (*size, 3), dtype, odd=rng.choice((0, 0.3))).requires_grad_(
            graded
        )
        yield {"x": x, "m": proving.mask(rng, size), "on": rng.choice((None, 1)) if draw else 1}


def make_plain(rng: random.Random) -> Iterator[proving.Inputs]:
    for draw in make(rng):
        yield {**draw, "x": draw["x"].detach()}


BODIES = {
    "masked_fill": """
    out = torch.exp(x)
    # rows without anything
    if m.any():
        out = out.masked_fill(m[..., None], 0.)  # zero them
    return out
""",
    "and": """
    out = x * 2
    if on is not None and torch.any(m):
        out = out.masked_fill(m.unsqueeze(-1), float("-inf"))
    return out
""",
    "where": """
    out = x * 2
    if bool(m.any()):
        out = torch.where(m[..., None], -1.5, out)
    return out.sum(), out
""",
    "nan": """
    loss = x.square().sum()
    if not torch.isfinite(loss).all():
        loss = torch.nan_to_num(loss, nan=0.0)
    return loss
""",
    "infinite": """
    y = x * 2
    if (~torch.isfinite(y)).any():
        y = y.nan_to_num(nan=1.0, posinf=2.0, neginf=-2.0)
    return y
""",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_it_is_sound(body: str) -> None:
    assert proving.prove(
        FIX, f"import torch\ndef function(x, m, on):\n{body}", make, structures=42
    ).reaches(165)


@pytest.mark.parametrize("fill", ["x[m] = 0", "x.masked_fill_(m.unsqueeze(-1), 7)"])
def test_in_place_is_sound(fill: str) -> None:
    code = f"def function(x, m, on):\n    y = x.view(-1)\n    if m.any():\n        {fill}\n    return y, x\n"
    code = code.replace("x.view(-1)", "x.detach()")
    assert proving.prove(FIX, code, make_plain, structures=42).reaches(165)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("if m.any():\n    x = x.masked_fill(m, 0)\nreturn x", "would be lost"),
        ("y = x * 2\nif m.any():\n    y[m] = 0\nreturn y", "autograd records it"),
        ("y = x * 2\nif m.any():\n    y = y.masked_fill(m, work(y))\nreturn y", "run each"),
    ],
)
def test_it_is_refused(body: str, reason: str) -> None:
    inputs = {"x": torch.ones(3, requires_grad=True), "m": torch.tensor([True, False, True])}
    proving.refuses(
        FIX,
        proving.code_of("def work(y):\n    return 1.0\ndef function(x, m):\n", body),
        inputs,
        reason,
    )


@pytest.mark.parametrize(
    "body",
    [
        "if m.any():\n    x = x.masked_fill(n, 0)",
        "if m.all():\n    x = x.masked_fill(m, 0)",
        "if m.any():\n    x = x.masked_fill(~m, 0)",
        "if torch.isnan(x).any():\n    x = torch.nan_to_num(x)",
        "if m.any():\n    x = x.masked_fill(m, 0)\n    log()",
        "if m.any():\n    x = x.masked_fill(m, 0)\nelse:\n    log()",
        "if k or m.any():\n    x = x.masked_fill(m, 0)",
    ],
)
def test_what_asks_for_something_else_is_no_match(body: str) -> None:
    assert not proving.matches(FIX, proving.code_of("import torch\ndef f(x, m, n, k):\n", body))


def test_an_array_is_refused() -> None:
    code = "def function(x, m):\n    if m.any():\n        x[m] = 0\n    return x\n"
    inputs = {"x": torch.ones(2).numpy(), "m": (torch.ones(2) > 0).numpy()}
    proving.refuses(FIX, code, inputs, "`x` is not a tensor")


def test_without_evidence_it_is_open() -> None:
    code = f"import torch\ndef function(x, m, on):\n{BODIES['masked_fill']}"
    assert not proving.unseen(FIX, code).safe


def test_it_keeps_comments_and_waits_no_more() -> None:
    code = f"import torch\ndef function(x, m, on):\n{BODIES['masked_fill']}"
    inputs = {"x": torch.ones(4, 3), "m": torch.ones(4, dtype=torch.bool), "on": 1}
    rewrite = proving.fixed(FIX, code, inputs)
    assert "# zero them" in proving.text_of(rewrite)
    assert proving.syncs_go(FIX, code, inputs) == (1, 0)
