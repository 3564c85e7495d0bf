"""`torch.tensor(0.0).to(d)`."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fixes import proving
from torchtrim.fixes.uploads import SCALAR_ON_DEVICE as FIX
from torchtrim.linter.text import fixed_text
from torchtrim.source.facts import Refused

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


def make(rng: random.Random) -> Iterator[proving.Inputs]:
    kind = type(rng.choice(NUMBERS))
    for _ in range(proving.DRAWS):
        c = rng.choice([one for one in NUMBERS if type(one) is kind])
        yield {"c": c, "d": rng.choice(("cpu", torch.device("cpu"))), "n": rng.choice((0, 1, 3))}


CALLS = (
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


@pytest.mark.parametrize("call", CALLS)
def test_it_is_sound(call: str) -> None:
    code = f"import torch\ndef function(c, d, n):\n    return {call}\n"
    proof = proving.prove(FIX, code, make, structures=30)
    assert proof.reaches(120), proof


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("torch.tensor(c, pin_memory=False).to(d)", "pin_memory"),
        ("torch.tensor(c, requires_grad=True).to(d)", "before it is moved"),
        ("torch.tensor(x).to(d)", "a number of Python's"),
        ("torch.tensor(c).to(x)", "is a device"),
        ("torch.tensor(c).to(torch.float16)", "is a device"),
        ("torch.tensor([3] * n, device=d)", "an empty one has the type"),
    ],
)
def test_it_is_refused(call: str, reason: str) -> None:
    inputs = {"c": 1.0, "d": "cpu", "n": 2, "x": torch.ones(())}
    head = "import torch\nimport warnings\nwarnings.simplefilter('ignore')\n"
    with pytest.raises(Refused, match=reason):
        proving.fixed(FIX, f"{head}def function(c, d, n, x):\n    return {call}\n", inputs)


def test_it_waits_no_more() -> None:
    code = "import torch\ndef function(x):\n    return x * torch.tensor(2.5).to(x.device)\n"
    assert proving.syncs_go(FIX, code, {"x": torch.randn(4)}) == (1, 0)


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
