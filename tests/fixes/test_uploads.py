"""Fixes of tensors made on the host and uploaded."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import NamedTuple

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
from torchtrim.rewriter.fix import Fix

DEVICES = ("cpu", torch.device("cpu"))
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
NUMBERS = (0, 1, -7, 2**31 + 5, 0.1, -2.5, 1e300, -0.0, float("inf"), float("nan"), 70000.0)


def make_range(rng: random.Random) -> Iterator[proving.Inputs]:
    for _ in range(proving.DRAWS):
        yield {"n": rng.choice((-2, 0, 1, 7)), "d": rng.choice(DEVICES)}


def make_some(rng: random.Random) -> Iterator[proving.Inputs]:
    return ({**one, "n": abs(one["n"]) + 1} for one in make_range(rng))


def make_made(rng: random.Random) -> Iterator[proving.Inputs]:
    for _ in range(proving.DRAWS):
        yield {
            "n": rng.choice((0, 1, 5)),
            "m": rng.choice((1, 4)),
            "c": rng.choice((0.5, -1.0)),
            "d": rng.choice(DEVICES),
            "t": rng.choice((torch.float16, torch.int64, torch.bfloat16)),
        }


def make_new(rng: random.Random) -> Iterator[proving.Inputs]:
    size, dtype = proving.shape(rng), rng.choice(FLOATS)
    for _ in range(proving.DRAWS):
        yield {"x": proving.floating(rng, size, dtype)}


def make_pinned(rng: random.Random) -> Iterator[proving.Inputs]:
    numbers = rng.choice(((0, 1, 2), (0.5, -0.0, float("nan")), (True, False)))
    for _ in range(proving.DRAWS):
        found = [rng.choice(numbers) for _ in range(rng.choice((0, 1, 4)))]
        yield {"found": found, "d": rng.choice(DEVICES)}


def make_scalar(rng: random.Random) -> Iterator[proving.Inputs]:
    numbers = (*NUMBERS, True, False)
    kind = type(rng.choice(numbers))
    for _ in range(proving.DRAWS):
        c = rng.choice([one for one in numbers if type(one) is kind])
        yield {"c": c, "d": rng.choice(DEVICES), "n": rng.choice((0, 1, 3))}


class Sound(NamedTuple):
    """Calls of a fix that are sound for all inputs, and the number of structures to draw."""

    fix: Fix
    names: str
    make: proving.Make
    structures: int
    calls: tuple[str, ...]


SOUND = (
    Sound(
        LISTED_RANGE,
        "n, d",
        make_range,
        85,
        (
            "torch.tensor(list(range(n)), dtype=torch.long, device=d)",
            "torch.tensor(range(n * 2), device=d, dtype=torch.int32)",
            "torch.tensor([i for i in range(n)], dtype=torch.int64, device=d)",
        ),
    ),
    Sound(
        MADE_ON_DEVICE,
        "n, m, c, d, t",
        make_made,
        33,
        (
            "torch.zeros(n, m).to(d)",
            "torch.ones((n, m), dtype=t).bool().to(d, non_blocking=True)",
            "torch.arange(n).view(1, -1).to(device=d)",
            "torch.arange(0, (n), dtype=t).to(d)",
            "torch.full((n,), c).unsqueeze(0).half().to(d)",
            "torch.eye(\n        n,  # rows\n    ).to(d)",
            "torch.zeros(()).to(d) + n",
            "torch.zeros(*[n, m]).to(d)",
            "torch.ones(n, m).to(device=d, dtype=t)",
            "torch.zeros(n).view(-1, 1).to(d, t)",
        ),
    ),
    Sound(
        NEW_NUMBER,
        "x",
        make_new,
        65,
        (
            "x.new_tensor(0.5)",
            "x.new_tensor(-3)",
            "x.new_tensor(7, dtype=torch.int32)",
            "(x + 1).new_tensor(0.1, requires_grad=True) * x",
        ),
    ),
    Sound(
        PINNED_UPLOAD,
        "found, d",
        make_pinned,
        42,
        (
            "torch.tensor(found, device=d)",
            "torch.tensor(found).to(d)",
            "torch.tensor(found, dtype=torch.float16, device=d)",
            "torch.tensor([len(one) for one in [found, found]], device=d)",
            "torch.tensor([0.485, 0.456, 0.406]).to(device=d, non_blocking=True)",
            "torch.tensor([found, found], device=d)",
        ),
    ),
    Sound(
        REPEATED_NUMBER,
        "n, d",
        make_range,
        65,
        (
            "torch.tensor([0.5 for _ in range(n)], device=d)",
            "torch.tensor([1 for i in range(n + 1)], dtype=torch.long, device=d)",
            "torch.tensor([0.0 for i in range(n)]).to(d)",
            "torch.tensor(n * [3], device=d, dtype=torch.float32)",
        ),
    ),
    Sound(
        SCALAR_ON_DEVICE,
        "c, d, n",
        make_scalar,
        30,
        (
            "torch.tensor(c, device=d)",
            "torch.tensor(c).to(d)",
            "torch.tensor(c).to(device=d, non_blocking=True)",
            "torch.tensor(c, dtype=torch.float64, device=d)",
            "torch.tensor(c, dtype=torch.float16).to(d)",
            "torch.as_tensor(c, device=d)",
            "torch.tensor([c] * n, dtype=torch.float32, device=d)",
            "torch.tensor(\n        0.0,\n        requires_grad=True, device=d\n    )",
            "torch.tensor([-1] * n, dtype=torch.long).to(d)",
            "torch.tensor([1], dtype=torch.float16, device=d)",
            "torch.tensor([-0.0]).to(d)",
            "torch.FloatTensor([0.0]).to(d)",
            "torch.LongTensor([3]).to(d)",
        ),
    ),
)


def code_of(names: str, call: str) -> str:
    return f"import torch\ndef function({names}):\n    return {call}\n"


@pytest.mark.parametrize(
    ("sound", "call"), [(sound, call) for sound in SOUND for call in sound.calls]
)
def test_it_is_sound(sound: Sound, call: str) -> None:
    fix, names, make, structures, _ = sound
    proof = proving.prove(fix, code_of(names, call), make, structures=structures)
    assert proof.reaches(proving.DRAWS * structures)


def test_one_number_is_filled_by_its_name() -> None:
    code = code_of("d", "torch.tensor([0.0], device=d)")
    assert "torch.zeros(1, device=d)" in proving.as_written(SCALAR_ON_DEVICE, code, {"d": "cpu"})


@pytest.mark.parametrize(
    "call", ["torch.tensor(list(range(n)), device=d)", "torch.as_tensor(range(n), device=d)"]
)
def test_a_listed_range_without_a_type_is_never_safe(call: str) -> None:
    code = code_of("n, d", call)
    proof = proving.prove(LISTED_RANGE, code, make_some, structures=85, suggested=True)
    assert proof.reaches(340)
    assert not proving.prove(LISTED_RANGE, code, make_some, structures=2).agreed


@pytest.mark.parametrize(
    ("fix", "call", "reason"),
    [
        (LISTED_RANGE, "torch.tensor(range(x), device=d)", "is an integer"),
        (LISTED_RANGE, "torch.tensor(range(3)).to(x)", "is a device"),
        (MADE_ON_DEVICE, "torch.randn(n).to(d)", "random numbers"),
        (MADE_ON_DEVICE, "torch.linspace(0, 1, n).to(d)", "round its steps"),
        (MADE_ON_DEVICE, "torch.arange(0, c).to(d)", "is an integer"),
        (MADE_ON_DEVICE, "torch.zeros(n, requires_grad=True).to(d)", "gradient before the move"),
        (MADE_ON_DEVICE, "torch.ones(n).exp().to(d)", "host computes with it"),
        (MADE_ON_DEVICE, "torch.zeros(n).to(torch.float16)", "is a device"),
        (MADE_ON_DEVICE, "torch.arange(n).to(d, torch.float16)", "the move casts it"),
        (NEW_NUMBER, "x.new_tensor(c)", "small literal number"),
        (NEW_NUMBER, "x.new_tensor([1.0])", "small literal number"),
        (NEW_NUMBER, "x.new_tensor(1e30)", "small literal number"),
        (NEW_NUMBER, "x.new_tensor(True)", "small literal number"),
        (NEW_NUMBER, "x.long().new_tensor(3)", "tensor of floats"),
        (PINNED_UPLOAD, "torch.tensor(n, device=d)", "is a list"),
        (PINNED_UPLOAD, "torch.tensor([1.0, 2.0], requires_grad=True, device=d)", "gradient"),
        (PINNED_UPLOAD, "torch.tensor([1.0, 2.0]).to(torch.float16)", "is a device"),
        (PINNED_UPLOAD, "torch.tensor([c, x.item()], device=d)", "read from a device"),
        (REPEATED_NUMBER, "torch.tensor([1 for _ in range(n)], device=d)", "pass `dtype`"),
        (REPEATED_NUMBER, "torch.tensor([n for _ in range(n)], device=d)", "small literal number"),
        (REPEATED_NUMBER, "torch.tensor([0.5 for _ in range(n)]).to(x)", "is a device"),
        (SCALAR_ON_DEVICE, "torch.tensor(c, pin_memory=False).to(d)", "pin_memory"),
        (SCALAR_ON_DEVICE, "torch.tensor(c, requires_grad=True).to(d)", "before the move"),
        (SCALAR_ON_DEVICE, "torch.tensor(x).to(d)", "a Python number"),
        (SCALAR_ON_DEVICE, "torch.tensor(c).to(x)", "is a device"),
        (SCALAR_ON_DEVICE, "torch.tensor(c).to(torch.float16)", "is a device"),
        (SCALAR_ON_DEVICE, "torch.tensor([3] * n, device=d)", "an empty one has the same type"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_it_is_refused(fix: Fix, call: str, reason: str) -> None:
    inputs = {"c": 1.0, "d": "cpu", "n": 2, "x": torch.tensor(2.0)}
    proving.refuses(fix, code_of("c, d, n, x", call), inputs, reason)


@pytest.mark.parametrize(
    ("fix", "call"),
    [
        (LISTED_RANGE, "torch.tensor(list(range(3)), dtype=torch.long, device=d)"),
        (MADE_ON_DEVICE, "torch.arange(len(x)).to(x.device)"),
        (NEW_NUMBER, "x.new_tensor(0.5)"),
        (PINNED_UPLOAD, "torch.tensor([1, 2, 3], device=x.device)"),
        (REPEATED_NUMBER, "torch.tensor([0.5 for _ in range(3)], device=d)"),
        (SCALAR_ON_DEVICE, "torch.tensor(2.5).to(x.device)"),
    ],
)
def test_it_waits_no_more(fix: Fix, call: str) -> None:
    code = f"import torch\ndef function(x):\n    d = x.device\n    return x + {call}\n"
    assert proving.syncs_go(fix, code, {"x": torch.ones(3)}) == (1, 0)


def test_a_pinned_upload_that_no_run_has_shown_is_for_a_person_to_copy() -> None:
    code = (
        "import torch\ndef function(x):\n    return x + torch.tensor([1, 2, 3], device=x.device)\n"
    )
    assert "make it once" in proving.unseen(PINNED_UPLOAD, code).advice
    assert not proving.fixed(PINNED_UPLOAD, code, {"x": torch.ones(3)}).advice


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
