"""Fixes of tensors made on the host and uploaded."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fixes import proving
from torchtrim.fixes.uploads import (
    LISTED_RANGE,
    MADE_ON_DEVICE,
    NEW_NUMBER,
    PINNED_UPLOAD,
    REPEATED_NUMBER,
    SCALAR_ON_DEVICE,
)
from torchtrim.linter.text import fixed_text
from torchtrim.source.facts import FixRefused

SAFE = (
    "torch.tensor(list(range(n)), dtype=torch.long, device=d)",
    "torch.tensor(range(n * 2), device=d, dtype=torch.int32)",
    "torch.tensor([i for i in range(n)], dtype=torch.int64, device=d)",
)
ASKED = ("torch.tensor(list(range(n)), device=d)", "torch.as_tensor(range(n), device=d)")


def make_range(rng: random.Random) -> Iterator[proving.Inputs]:
    for _ in range(proving.DRAWS):
        yield {"n": rng.choice((-2, 0, 1, 7)), "d": rng.choice(("cpu", torch.device("cpu")))}


def make_some(rng: random.Random) -> Iterator[proving.Inputs]:
    return ({**one, "n": abs(one["n"]) + 1} for one in make_range(rng))


@pytest.mark.parametrize("call", SAFE)
def test_listed_range_is_sound(call: str) -> None:
    code = f"import torch\ndef function(n, d):\n    return {call}\n"
    proof = proving.prove(LISTED_RANGE, code, make_range, structures=85)
    assert proof.reaches(340), proof


@pytest.mark.parametrize("call", ASKED)
def test_listed_range_without_a_type_it_is_the_same_where_there_is_one_and_never_safe(
    call: str,
) -> None:
    code = f"import torch\ndef function(n, d):\n    return {call}\n"
    proof = proving.prove(LISTED_RANGE, code, make_some, structures=85, suggested=True)
    assert proof.reaches(340), proof
    assert not proving.prove(LISTED_RANGE, code, make_some, structures=2).agreed


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("torch.tensor(range(x), device=d)", "is an integer"),
        ("torch.tensor(range(3)).to(x)", "is a device"),
    ],
)
def test_listed_range_is_refused(call: str, reason: str) -> None:
    code = f"import torch\ndef function(d, x):\n    return {call}\n"
    with pytest.raises(FixRefused, match=reason):
        proving.fixed(LISTED_RANGE, code, {"d": "cpu", "x": torch.tensor(2)})


def test_listed_range_waits_no_more() -> None:
    call = "torch.tensor(list(range(3)), dtype=torch.long, device=d)"
    code = f"import torch\ndef function(x):\n    d = x.device\n    return x + {call}\n"
    assert proving.syncs_go(LISTED_RANGE, code, {"x": torch.ones(3)}) == (1, 0)


def make_made(rng: random.Random) -> Iterator[proving.Inputs]:
    for _ in range(proving.DRAWS):
        yield {
            "n": rng.choice((0, 1, 5)),
            "m": rng.choice((1, 4)),
            "c": rng.choice((0.5, -1.0)),
            "d": rng.choice(("cpu", torch.device("cpu"))),
            "t": rng.choice((torch.float16, torch.int64, torch.bfloat16)),
        }


MADE_CALLS = (
    "torch.zeros(n, m).to(d)",
    "torch.ones((n, m), dtype=t).bool().to(d, non_blocking=True)",
    "torch.arange(n).view(1, -1).to(device=d)",
    "torch.arange(0, (n), dtype=t).to(d)",
    "torch.full((n,), c).unsqueeze(0).half().to(d)",
    "torch.eye(\n        n,  # rows\n    ).to(d)",
    "torch.zeros(()).to(d) + n",
    "torch.zeros(*[n, m]).to(d)",
)


@pytest.mark.parametrize("call", MADE_CALLS)
def test_made_on_device_is_sound(call: str) -> None:
    code = f"import torch\ndef function(n, m, c, d, t):\n    return {call}\n"
    proof = proving.prove(MADE_ON_DEVICE, code, make_made, structures=33)
    assert proof.reaches(132), proof


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("torch.randn(n).to(d)", "random numbers"),
        ("torch.linspace(0, 1, n).to(d)", "round its steps"),
        ("torch.arange(0, c).to(d)", "is an integer"),
        ("torch.zeros(n, requires_grad=True).to(d)", "gradient before the move"),
        ("torch.ones(n).exp().to(d)", "host computes with it"),
        ("torch.zeros(n).to(torch.float16)", "is a device"),
    ],
)
def test_made_on_device_is_refused(call: str, reason: str) -> None:
    inputs = next(make_made(random.Random(0)))
    with pytest.raises(FixRefused, match=reason):
        proving.fixed(
            MADE_ON_DEVICE,
            f"import torch\ndef function(n, m, c, d, t):\n    return {call}\n",
            inputs,
        )


def test_made_on_device_waits_no_more() -> None:
    code = "import torch\ndef function(x):\n    return x + torch.arange(len(x)).to(x.device)\n"
    assert proving.syncs_go(MADE_ON_DEVICE, code, {"x": torch.randn(4)}) == (1, 0)


NEW_CALLS = (
    "x.new_tensor(0.5)",
    "x.new_tensor(-3)",
    "x.new_tensor(7, dtype=torch.int32)",
    "(x + 1).new_tensor(0.1, requires_grad=True) * x",
)


def make_new(rng: random.Random) -> Iterator[proving.Inputs]:
    size = proving.shape(rng)
    dtype = rng.choice((torch.float32, torch.float64, torch.bfloat16, torch.float16))
    for _ in range(proving.DRAWS):
        yield {"x": proving.floating(rng, size, dtype)}


@pytest.mark.parametrize("call", NEW_CALLS)
def test_new_number_is_sound(call: str) -> None:
    code = f"import torch\ndef function(x):\n    return {call}\n"
    proof = proving.prove(NEW_NUMBER, code, make_new, structures=65)
    assert proof.reaches(260), proof


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("x.new_tensor(n)", "small literal number"),
        ("x.new_tensor([1.0])", "small literal number"),
        ("x.new_tensor(1e30)", "small literal number"),
        ("x.new_tensor(True)", "small literal number"),
        ("x.long().new_tensor(3)", "tensor of floats"),
    ],
)
def test_new_number_is_refused(call: str, reason: str) -> None:
    with pytest.raises(FixRefused, match=reason):
        proving.fixed(
            NEW_NUMBER, f"def function(x, n):\n    return {call}\n", {"x": torch.ones(2), "n": 1.0}
        )


def test_new_number_waits_no_more() -> None:
    code = "def function(x):\n    return x + x.new_tensor(0.5)\n"
    assert proving.syncs_go(NEW_NUMBER, code, {"x": torch.ones(2)}) == (1, 0)


def make_pinned(rng: random.Random) -> Iterator[proving.Inputs]:
    numbers = rng.choice(((0, 1, 2), (0.5, -0.0, float("nan")), (True, False)))
    for _ in range(proving.DRAWS):
        found = [rng.choice(numbers) for _ in range(rng.choice((0, 1, 4)))]
        yield {"found": found, "d": rng.choice(("cpu", torch.device("cpu")))}


PINNED_CALLS = (
    "torch.tensor(found, device=d)",
    "torch.tensor(found).to(d)",
    "torch.tensor(found, dtype=torch.float16, device=d)",
    "torch.tensor([len(one) for one in [found, found]], device=d)",
    "torch.tensor([0.485, 0.456, 0.406]).to(device=d, non_blocking=True)",
    "torch.tensor([found, found], device=d)",
)


@pytest.mark.parametrize("call", PINNED_CALLS)
def test_pinned_upload_is_sound(call: str) -> None:
    code = f"import torch\ndef function(found, d):\n    return {call}\n"
    proof = proving.prove(PINNED_UPLOAD, code, make_pinned, structures=42)
    assert proof.reaches(168), proof


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("torch.tensor(x, device=d)", "is a list"),
        ("torch.tensor([1.0], requires_grad=True, device=d)", "gradient"),
        ("torch.tensor([1.0]).to(torch.float16)", "is a device"),
    ],
)
def test_pinned_upload_is_refused(call: str, reason: str) -> None:
    inputs = {"x": 3, "d": "cpu"}
    with pytest.raises(FixRefused, match=reason):
        proving.fixed(
            PINNED_UPLOAD, f"import torch\ndef function(x, d):\n    return {call}\n", inputs
        )


def test_pinned_upload_waits_no_more() -> None:
    code = "import torch\ndef function(x):\n    return x[0] + torch.tensor([1, 2, 3], device=x.device)\n"
    assert proving.syncs_go(PINNED_UPLOAD, code, {"x": torch.randn(4, 3)}) == (1, 0)


REPEATED_CALLS = (
    "torch.tensor([0.5 for _ in range(n)], device=d)",
    "torch.tensor([1 for i in range(n + 1)], dtype=torch.long, device=d)",
    "torch.tensor([0.0 for i in range(n)]).to(d)",
    "torch.tensor(n * [3], device=d, dtype=torch.float32)",
)


def make_repeated(rng: random.Random) -> Iterator[proving.Inputs]:
    for _ in range(proving.DRAWS):
        yield {"n": rng.choice((-2, 0, 1, 5)), "d": rng.choice(("cpu", torch.device("cpu")))}


@pytest.mark.parametrize("call", REPEATED_CALLS)
def test_repeated_number_is_sound(call: str) -> None:
    code = f"import torch\ndef function(n, d):\n    return {call}\n"
    proof = proving.prove(REPEATED_NUMBER, code, make_repeated, structures=65)
    assert proof.reaches(260), proof


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("torch.tensor([1 for _ in range(n)], device=d)", "pass `dtype`"),
        ("torch.tensor([n for _ in range(n)], device=d)", "small literal number"),
        ("torch.tensor([0.5 for _ in range(n)]).to(x)", "is a device"),
    ],
)
def test_repeated_number_is_refused(call: str, reason: str) -> None:
    code = f"import torch\ndef function(n, d, x):\n    return {call}\n"
    with pytest.raises(FixRefused, match=reason):
        proving.fixed(REPEATED_NUMBER, code, {"n": 2, "d": "cpu", "x": torch.ones(2)})


def test_repeated_number_waits_no_more() -> None:
    call = "torch.tensor([0.5 for _ in range(3)], device=d)"
    code = f"import torch\ndef function(x):\n    d = x.device\n    return x + {call}\n"
    assert proving.syncs_go(REPEATED_NUMBER, code, {"x": torch.ones(3)}) == (1, 0)


NUMBERS = (
    0,
    1,
    -7,
    2**31 + 5,
    0.1,
    -2.5,
    1e300,
    -0.0,
    float("inf"),
    float("nan"),
    True,
    False,
    70000.0,
)


def make_scalar(rng: random.Random) -> Iterator[proving.Inputs]:
    kind = type(rng.choice(NUMBERS))
    for _ in range(proving.DRAWS):
        c = rng.choice([one for one in NUMBERS if type(one) is kind])
        yield {"c": c, "d": rng.choice(("cpu", torch.device("cpu"))), "n": rng.choice((0, 1, 3))}


SCALAR_CALLS = (
    "torch.tensor(c, device=d)",
    "torch.tensor(c).to(d)",
    "torch.tensor(c).to(device=d, non_blocking=True)",
    "torch.tensor(c, dtype=torch.float64, device=d)",
    "torch.tensor(c, dtype=torch.float16).to(d)",
    "torch.as_tensor(c, device=d)",
    "torch.tensor([c] * n, dtype=torch.float32, device=d)",
    "torch.tensor(\n        0.0,\n        requires_grad=True, device=d\n    )",
    "torch.tensor([-1] * n, dtype=torch.long).to(d)",
)


@pytest.mark.parametrize("call", SCALAR_CALLS)
def test_scalar_on_device_is_sound(call: str) -> None:
    code = f"import torch\ndef function(c, d, n):\n    return {call}\n"
    proof = proving.prove(SCALAR_ON_DEVICE, code, make_scalar, structures=30)
    assert proof.reaches(120), proof


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("torch.tensor(c, pin_memory=False).to(d)", "pin_memory"),
        ("torch.tensor(c, requires_grad=True).to(d)", "before the move"),
        ("torch.tensor(x).to(d)", "a Python number"),
        ("torch.tensor(c).to(x)", "is a device"),
        ("torch.tensor(c).to(torch.float16)", "is a device"),
        ("torch.tensor([3] * n, device=d)", "an empty one has the same type"),
    ],
)
def test_scalar_on_device_is_refused(call: str, reason: str) -> None:
    inputs = {"c": 1.0, "d": "cpu", "n": 2, "x": torch.ones(())}
    head = "import torch\nimport warnings\nwarnings.simplefilter('ignore')\n"
    with pytest.raises(FixRefused, match=reason):
        proving.fixed(
            SCALAR_ON_DEVICE, f"{head}def function(c, d, n, x):\n    return {call}\n", inputs
        )


def test_scalar_on_device_waits_no_more() -> None:
    code = "import torch\ndef function(x):\n    return x * torch.tensor(2.5).to(x.device)\n"
    assert proving.syncs_go(SCALAR_ON_DEVICE, code, {"x": torch.randn(4)}) == (1, 0)


OTHERS = {
    "a pair": "if isinstance(c, (tuple, list)):\n        return torch.as_tensor(c, device=x.device)",
    "no tensor": "if not torch.is_tensor(c):\n        return torch.tensor(c, device=x.device)",
    "of either kind": "if isinstance(c, (float, list)):\n        return torch.tensor(c).to(x.device)",
    "an attribute": "return torch.tensor(x.c).to(x.device)",
    "repeated": "return torch.tensor([c] * 3, device=x.device)",
}


@pytest.mark.parametrize("body", OTHERS.values(), ids=OTHERS)
def test_without_a_run_the_source_has_to_say_that_it_is_a_number(body: str) -> None:
    code = f"import torch\ndef function(x: torch.Tensor, c):\n    {body}\n"
    assert "torch.full(" not in fixed_text("model.py", code, unsafe=True)[0]


@pytest.mark.parametrize("test", ["isinstance(c, float)", "isinstance(c, (int, float)) and c > 0"])
def test_without_a_run_a_tested_number_is_made_on_the_device(test: str) -> None:
    body = f"if {test}:\n        c = torch.as_tensor(c, device=x.device)\n    return x * c"
    code = f"import torch\ndef function(x: torch.Tensor, c):\n    {body}\n"
    assert "torch.full((), c, device=x.device)" in fixed_text("model.py", code, unsafe=True)[0]
