"""Fixes of numbers that are read and given back to the device."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fixes import proving
from torchtrim.fixes.given_back import DEVICE_ALPHA, DEVICE_ARGUMENT, REMADE_TENSOR, ROUND_TRIP
from torchtrim.source.facts import FixRefused

ALPHA_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def make_alpha(rng: random.Random) -> Iterator[proving.Inputs]:
    size, dtype = proving.shape(rng), rng.choice(ALPHA_TYPES)
    for _ in range(proving.DRAWS):
        odd = rng.choice((0, 0.2))
        g = proving.floating(rng, size, dtype, odd=odd).abs() + 1
        w = proving.floating(rng, size, dtype, odd=odd).abs()
        yield {
            "g": g.requires_grad_(rng.random() < 0.5),
            "w": w,
            "p": proving.floating(rng, (), dtype).abs(),
        }


ALPHA_CALLS = (
    "(-g).sub(w, alpha=scale)",
    "torch.add(g, w, alpha=scale)",
    "g.add(w.exp() * 0 + w, alpha=scale.item())",
    "(g * 1).add_(w, alpha=float(scale))",
    "torch.sub(-g, w, alpha=(scale * 2).item())",
)


@pytest.mark.parametrize("call", ALPHA_CALLS)
def test_device_alpha_is_sound(call: str) -> None:
    code = f"import torch\ndef function(g, w, p):\n    scale = p * 1\n    return {call}\n"
    proof = proving.prove(DEVICE_ALPHA, code, make_alpha, structures=52)
    assert proof.reaches(190), proof


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("    return g.sub(w, alpha=2)\n", "tensor of zero dimensions"),
        ("    return g.sub(w, alpha=p)\n", "may be written to afterwards"),
        (
            "    p = p.double() * 1\n    return g.sum().sub(w.sum(), alpha=p)\n",
            "the type and device of both",
        ),
    ],
)
def test_device_alpha_is_refused(body: str, reason: str) -> None:
    inputs = {"g": torch.randn(3), "w": torch.randn(3), "p": torch.tensor(2.0)}
    with pytest.raises(FixRefused, match=reason):
        proving.fixed(DEVICE_ALPHA, f"def function(g, w, p):\n{body}", inputs)


def test_device_alpha_waits_no_more() -> None:
    code = "def function(g, w):\n    p = (g * w).sum()\n    return g.sub(w, alpha=p)\n"
    assert proving.syncs_go(DEVICE_ALPHA, code, {"g": torch.randn(4), "w": torch.randn(4)}) == (
        1,
        0,
    )


pytestmark = pytest.mark.filterwarnings("ignore:Converting a tensor")
ARGUMENT_TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def make_argument(rng: random.Random) -> Iterator[proving.Inputs]:
    size, dtype, graded = proving.shape(rng), rng.choice(ARGUMENT_TYPES), rng.random() < 0.5
    for _ in range(proving.DRAWS):
        x = proving.floating(rng, size, dtype, odd=rng.choice((0, 0.3))).requires_grad_(graded)
        t = proving.floating(rng, (), dtype, odd=rng.choice((0, 0, 0.5)))
        yield {"x": x, "t": t, "mask": proving.mask(rng, size)}


ARGUMENT_CALLS = (
    "torch.clamp(x, max=top.item())",
    "x.clamp(min=float(top))",
    "x.masked_fill(mask, top.item())",
    "torch.where(mask, x, top.detach().item())",
    "torch.mul(x, top.item())",
    "x.div(top.item())",
    "(x * 2).clamp_(max=(top * 2).item())",
    "x.add((x * 2).sum().item())",
)


@pytest.mark.parametrize("call", ARGUMENT_CALLS)
def test_device_argument_is_sound(call: str) -> None:
    code = f"import torch\ndef function(x, t, mask):\n    top = t * 1\n    return {call}\n"
    proof = proving.prove(DEVICE_ARGUMENT, code, make_argument, structures=34)
    assert proof.reaches(130), proof


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("    return x.clamp(max=t.item())\n", "may be written to afterwards"),
        ("    t = t.double() * 2\n    return x.clamp(max=t.item())\n", "with the type and device"),
        (
            "    t = t * 2\n    y = x.clamp(max=t.item())\n    t.add_(1)\n    return y\n",
            "written to",
        ),
    ],
)
def test_device_argument_is_refused(body: str, reason: str) -> None:
    with pytest.raises(FixRefused, match=reason):
        proving.fixed(
            DEVICE_ARGUMENT,
            f"def function(x, t):\n{body}",
            {"x": torch.randn(3), "t": torch.tensor(1.0)},
        )


def test_device_argument_waits_no_more() -> None:
    code = "def function(x):\n    return x.clamp(max=x.abs().mean().item())\n"
    assert proving.syncs_go(DEVICE_ARGUMENT, code, {"x": torch.randn(4)}) == (1, 0)


REMADE_CALLS = (
    "torch.tensor(x.sum().item(), device=d)",
    "torch.tensor(float(x.mean()), device=d)",
    "torch.tensor(x.max().detach().item()).to(d)",
    "torch.tensor(x.sum().cpu().item(), dtype=torch.float64, device=d)",
)


def make_remade(rng: random.Random) -> Iterator[proving.Inputs]:
    size = tuple(max(1, one) for one in proving.shape(rng))
    dtype = rng.choice((torch.float32, torch.float64, torch.bfloat16, torch.float16))
    graded = rng.random() < 0.5
    for _ in range(proving.DRAWS):
        x = proving.floating(rng, size, dtype, odd=rng.choice((0, 0.2)))
        yield {"x": x.requires_grad_(graded), "d": rng.choice(("cpu", torch.device("cpu")))}


@pytest.mark.parametrize("call", REMADE_CALLS)
@pytest.mark.filterwarnings("ignore:Converting a tensor")
def test_remade_tensor_is_sound(call: str) -> None:
    code = f"import torch\ndef function(x, d):\n    return {call}\n"
    proof = proving.prove(REMADE_TENSOR, code, make_remade, structures=65)
    assert proof.reaches(260), proof


def test_integers_keep_their_type() -> None:
    code = "import torch\ndef function(x, d):\n    return torch.tensor(x.item(), device=d)\n"
    (edit,) = proving.fixed(REMADE_TENSOR, code, {"x": torch.tensor(3), "d": "cpu"}).edits
    assert "x.detach().to(device=d, dtype=torch.int64, copy=True)" in edit.text
    assert "if x.dim() == 0 and x.dtype == torch.int64" in edit.text


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("torch.tensor(x.item(), device=d)", "zero dimensions"),
        ("torch.tensor(float(n), device=d)", "through another type"),
        ("torch.tensor(n.item(), device=x)", "is a device"),
        ("torch.tensor(x[0].item(), dtype=torch.float16, device=d)", "not float32 or float64"),
    ],
)
def test_remade_tensor_is_refused(call: str, reason: str) -> None:
    inputs = {"x": torch.ones(1), "d": "cpu", "n": torch.tensor(2)}
    with pytest.raises(FixRefused, match=reason):
        proving.fixed(
            REMADE_TENSOR, f"import torch\ndef function(x, d, n):\n    return {call}\n", inputs
        )


def test_remade_tensor_waits_no_more() -> None:
    code = (
        "import torch\ndef function(x):\n    return torch.tensor(x.sum().item(), device=x.device)\n"
    )
    assert proving.syncs_go(REMADE_TENSOR, code, {"x": torch.ones(3)}) == (2, 0)


ROUND_TRIP_TYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.bool,
)
ROUND_TRIP_CALLS = (
    "torch.from_numpy(x.detach().cpu().numpy()).to(d) + 1",
    "torch.tensor(x.detach().cpu().numpy(), device=d)",
    "torch.as_tensor((x * 1).cpu().detach().numpy(), device=d)",
)


def make_round_trip(rng: random.Random) -> Iterator[proving.Inputs]:
    size, dtype, graded = (
        proving.shape(rng, least=0),
        rng.choice(ROUND_TRIP_TYPES),
        rng.random() < 0.5,
    )
    for _ in range(proving.DRAWS):
        odd = rng.choice((0, 0.3)) if dtype.is_floating_point else 0
        x = proving.floating(rng, size, torch.float32, odd=odd).to(dtype)
        yield {"x": x.requires_grad_(graded and dtype.is_floating_point), "d": "cpu"}


@pytest.mark.parametrize("call", ROUND_TRIP_CALLS)
def test_round_trip_is_sound(call: str) -> None:
    code = f"import torch\ndef function(x, d):\n    return {call}\n"
    proof = proving.prove(ROUND_TRIP, code, make_round_trip, structures=85)
    assert proof.reaches(340), proof


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("torch.tensor(n.cpu().numpy(), device=d)", "NumPy can represent"),
        ("torch.from_numpy(x.cpu().numpy()).to(torch.float64)", "is a device"),
    ],
)
def test_round_trip_is_refused(call: str, reason: str) -> None:
    code = (
        "import torch\nclass N:\n    cpu = lambda self: self\n    numpy = lambda self: [1.0]\n"
        f"def function(x, d):\n    n = N()\n    return {call}\n"
    )
    with pytest.raises(FixRefused, match=reason):
        proving.fixed(ROUND_TRIP, code, {"x": torch.ones(2), "d": "cpu"})


def test_round_trip_waits_no_more() -> None:
    call = "torch.tensor(x.cpu().numpy(), device=x.device)"
    code = f"import torch\ndef function(x):\n    return {call}\n"
    before, after = proving.syncs_go(ROUND_TRIP, code, {"x": torch.ones(3)})
    assert before == 2
    assert after == 0
