"""Fixes of numbers that are read and given back to the device."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fixes import proving
from torchtrim.fixes.given_back import DEVICE_ALPHA, DEVICE_ARGUMENT, REMADE_TENSOR, ROUND_TRIP
from torchtrim.rewriter.fix import Fix

pytestmark = pytest.mark.filterwarnings("ignore:Converting a tensor")
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
NUMPY = (torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.bool)


def make_alpha(rng: random.Random) -> Iterator[proving.Inputs]:
    size, dtype = proving.shape(rng), rng.choice(FLOATS)
    for _ in range(proving.DRAWS):
        odd = rng.choice((0, 0.2))
        g = proving.floating(rng, size, dtype, odd=odd).abs() + 1
        w = proving.floating(rng, size, dtype, odd=odd).abs()
        g.requires_grad_(rng.random() < 0.5)
        yield {"g": g, "w": w, "p": proving.floating(rng, (), dtype).abs()}


def make_argument(rng: random.Random) -> Iterator[proving.Inputs]:
    size, dtype, graded = proving.shape(rng), rng.choice(FLOATS), rng.random() < 0.5
    for _ in range(proving.DRAWS):
        x = proving.floating(rng, size, dtype, odd=rng.choice((0, 0.3))).requires_grad_(graded)
        t = proving.floating(rng, (), dtype, odd=rng.choice((0, 0, 0.5)))
        yield {"x": x, "t": t, "mask": proving.mask(rng, size)}


def make_remade(rng: random.Random) -> Iterator[proving.Inputs]:
    size = tuple(max(1, one) for one in proving.shape(rng))
    dtype, graded = rng.choice(FLOATS), rng.random() < 0.5
    for _ in range(proving.DRAWS):
        x = proving.floating(rng, size, dtype, odd=rng.choice((0, 0.2)))
        yield {"x": x.requires_grad_(graded), "d": rng.choice(("cpu", torch.device("cpu")))}


def make_round_trip(rng: random.Random) -> Iterator[proving.Inputs]:
    size, dtype, graded = proving.shape(rng, least=0), rng.choice(NUMPY), rng.random() < 0.5
    for _ in range(proving.DRAWS):
        odd = rng.choice((0, 0.3)) if dtype.is_floating_point else 0
        x = proving.floating(rng, size, torch.float32, odd=odd).to(dtype)
        yield {"x": x.requires_grad_(graded and dtype.is_floating_point), "d": "cpu"}


CALLS = {
    (DEVICE_ALPHA, make_alpha, 52, 190, "g, w, p):\n    scale = p * 1"): (
        "(-g).sub(w, alpha=scale)",
        "torch.add(g, w, alpha=scale)",
        "g.add(w.exp() * 0 + w, alpha=scale.item())",
        "(g * 1).add_(w, alpha=float(scale))",
        "torch.sub(-g, w, alpha=(scale * 2).item())",
    ),
    (DEVICE_ARGUMENT, make_argument, 34, 130, "x, t, mask):\n    top = t * 1"): (
        "torch.clamp(x, max=top.item())",
        "x.clamp(min=float(top))",
        "x.masked_fill(mask, top.item())",
        "torch.where(mask, x, top.detach().item())",
        "torch.mul(x, top.item())",
        "x.div(top.item())",
        "(x * 2).clamp_(max=(top * 2).item())",
        "x.add((x * 2).sum().item())",
    ),
    (REMADE_TENSOR, make_remade, 65, 260, "x, d):"): (
        "torch.tensor(x.sum().item(), device=d)",
        "torch.tensor(float(x.mean()), device=d)",
        "torch.tensor(x.max().detach().item()).to(d)",
        "torch.tensor(x.sum().cpu().item(), dtype=torch.float64, device=d)",
    ),
    (ROUND_TRIP, make_round_trip, 85, 340, "x, d):"): (
        "torch.from_numpy(x.detach().cpu().numpy()).to(d) + 1",
        "torch.tensor(x.detach().cpu().numpy(), device=d)",
        "torch.as_tensor((x * 1).cpu().detach().numpy(), device=d)",
    ),
}


@pytest.mark.parametrize(
    ("fix", "make", "structures", "least", "head", "call"),
    [(*case, call) for case, calls in CALLS.items() for call in calls],
)
def test_it_is_sound(
    fix: Fix, make: proving.Make, structures: int, least: int, head: str, call: str
) -> None:
    code = f"import torch\ndef function({head}\n    return {call}\n"
    assert proving.prove(fix, code, make, structures=structures).reaches(least)


@pytest.mark.parametrize(
    ("fix", "body", "reason"),
    [
        (DEVICE_ALPHA, "return g.sub(g, alpha=2)", "tensor of zero dimensions"),
        (DEVICE_ALPHA, "return g.sub(g, alpha=t)", "may be written to afterwards"),
        (
            DEVICE_ALPHA,
            "t = t.double() * 1\nreturn g.sum().sub(g.sum(), alpha=t)",
            "the type and device of both",
        ),
        (DEVICE_ARGUMENT, "return g.clamp(max=t.item())", "may be written to afterwards"),
        (
            DEVICE_ARGUMENT,
            "t = t.double() * 2\nreturn g.clamp(max=t.item())",
            "with the type and device",
        ),
        (
            DEVICE_ARGUMENT,
            "t = t * 2\ny = g.clamp(max=t.item())\nt.add_(1)\nreturn y",
            "written to",
        ),
        (REMADE_TENSOR, "return torch.tensor(x.item(), device=d)", "zero dimensions"),
        (REMADE_TENSOR, "return torch.tensor(float(n), device=d)", "through another type"),
        (REMADE_TENSOR, "return torch.tensor(n.item(), device=x)", "is a device"),
        (
            REMADE_TENSOR,
            "return torch.tensor(x[0].item(), dtype=torch.float16, device=d)",
            "not float32 or float64",
        ),
        (ROUND_TRIP, "x = N()\nreturn torch.tensor(x.cpu().numpy(), device=d)", "NumPy can"),
        (ROUND_TRIP, "return torch.from_numpy(x.cpu().numpy()).to(torch.float64)", "is a device"),
    ],
)
def test_it_is_refused(fix: Fix, body: str, reason: str) -> None:
    head = (
        "import torch\nclass N:\n    cpu = lambda self: self\n    numpy = lambda self: [1.0]\n"
        "def function(g, t, x, d, n):\n"
    )
    inputs = {"g": torch.randn(3), "t": torch.tensor(2.0), "x": torch.ones(1), "d": "cpu"}
    proving.refuses(fix, proving.code_of(head, body), {**inputs, "n": torch.tensor(2)}, reason)


def test_integers_keep_their_type() -> None:
    code = "import torch\ndef function(x, d):\n    return torch.tensor(x.item(), device=d)\n"
    (edit,) = proving.fixed(REMADE_TENSOR, code, {"x": torch.tensor(3), "d": "cpu"}).edits
    assert edit.text == "x.detach().to(device=d, dtype=torch.int64, copy=True)"


@pytest.mark.parametrize(
    ("fix", "body", "before"),
    [
        (DEVICE_ALPHA, "p = (x * x).sum()\nreturn x.sub(x, alpha=p)", 1),
        (DEVICE_ARGUMENT, "return x.clamp(max=x.abs().mean().item())", 1),
        (REMADE_TENSOR, "return torch.tensor(x.sum().item(), device=x.device)", 2),
        (ROUND_TRIP, "return torch.tensor(x.cpu().numpy(), device=x.device)", 2),
    ],
)
def test_it_waits_no_more(fix: Fix, body: str, before: int) -> None:
    code = proving.code_of("import torch\ndef function(x):\n", body)
    assert proving.syncs_go(fix, code, {"x": torch.ones(4)}) == (before, 0)
