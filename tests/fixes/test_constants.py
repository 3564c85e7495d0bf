"""Fixes of constants made in a loop or moved in each call."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fixes import proving
from torchtrim.fixes.constants import HOISTED_CONSTANT, MOVED_CONSTANT

HOISTED_BODIES = (
    """
    out = []
    for row in x:
        w = torch.tensor([0.1, 0.7, 0.2], device=d)
        out.append((row * w).sum())
    return out
""",
    """
    total, n = 0.0, 0
    while n < len(x):
        scale = torch.tensor(2.5).to(d)
        total = total + x[n].sum() * scale
        n += 1
    return total
""",
    """
    found = x
    for a in range(2):
        for b in range(a):
            w = torch.as_tensor([[1.0], [2.0], [0.5]], device=d)
            found = found @ w
    return found
""",
)


def make_hoisted(rng: random.Random) -> Iterator[proving.Inputs]:
    rows, graded = rng.choice((0, 1, 3)), rng.random() < 0.5
    for _ in range(proving.DRAWS):
        x = proving.floating(rng, (max(1, rows), 3), torch.float32)[:rows]
        yield {
            "x": x.detach().requires_grad_(graded),
            "d": rng.choice(("cpu", torch.device("cpu"))),
        }


@pytest.mark.parametrize("body", HOISTED_BODIES)
def test_hoisted_constant_is_sound(body: str) -> None:
    assert proving.prove(
        HOISTED_CONSTANT, f"import torch\ndef function(x, d):{body}", make_hoisted, structures=115
    ).reaches(280)


def test_hoisted_constant_what_is_written() -> None:
    code = f"import torch\ndef function(x, d):{HOISTED_BODIES[0]}"
    first, second = proving.fixed(HOISTED_CONSTANT, code, {"x": torch.ones(2, 3), "d": "cpu"}).edits
    assert first.text == "    w = torch.tensor([0.1, 0.7, 0.2], device=d)\n"
    assert second.text == ""


REFUSED = [
    ("w = torch.tensor([1.0], device=d)\n        out.append(w)", "written to, or kept"),
    (
        "w = torch.tensor([1.0], device=d)\n        w += 1\n        out.append(w + 1)",
        "another value|written",
    ),
    (
        "w = torch.tensor([1.0], device=d)\n        d = row.device\n        out.append(w + 1)",
        "differ between",
    ),
    (
        "w = torch.tensor([1.0], device=row.device)\n        out.append(w + 1)",
        "differ between iterations",
    ),
    ("w = torch.tensor([1.0], device=d)", "all of the loop's body"),
    ("w = torch.tensor([1.0], device=d)  # why\n        out.append(w + 1)", "follows in its line"),
]


@pytest.mark.parametrize(("body", "reason"), REFUSED)
def test_hoisted_constant_is_refused(body: str, reason: str) -> None:
    loop = f"for row in x:\n        {body}"
    code = f"import torch\ndef function(x, d):\n    out = []\n    {loop}\n    return out\n"
    proving.refuses(HOISTED_CONSTANT, code, {"x": torch.ones(2, 1), "d": "cpu"}, reason)


def test_what_is_read_behind_the_loop_is_refused() -> None:
    loop = "for row in x:\n        w = torch.tensor([1.0], device=d)\n        y = row * w"
    code = f"import torch\ndef function(x, d):\n    {loop}\n    return y + w\n"
    proving.refuses(HOISTED_CONSTANT, code, {"x": torch.ones(2, 1), "d": "cpu"}, "after the loop")


def test_hoisted_constant_waits_once() -> None:
    code = f"import torch\ndef function(x):\n    d = x.device{HOISTED_BODIES[0]}"
    assert proving.syncs_go(HOISTED_CONSTANT, code, {"x": torch.ones(4, 3)}) == (4, 1)


HEAD = """
import torch

class Encoding(torch.nn.Module):
    def __init__(self, n):
        super().__init__()
        self.freqs = torch.arange(n).float() + 0.5

    def forward(self, x):
"""
TAIL = """
def function(x, n):
    module = Encoding(n)
    first = module(x)
    return first + 0, module(x), list(module.state_dict())
"""


def make_moved(rng: random.Random) -> Iterator[proving.Inputs]:
    n = rng.randint(0, 4)
    for _ in range(proving.DRAWS):
        x = proving.floating(rng, (2, n), torch.float32, odd=0.2)
        yield {"x": x.requires_grad_(rng.random() < 0.5), "n": n}


MOVED_BODIES = {
    "used at once": "        return x * self.freqs.to(x.device)\n",
    "named": """
        freqs = self.freqs.to(device=x.device)  # not a buffer
        return x * freqs[None] + freqs.cos()
""",
    "in a call": "        return torch.mul(x, self.freqs.to(x.device))\n",
    "not waiting": "        return x - self.freqs.to(x.device, non_blocking=True)\n",
}


@pytest.mark.parametrize("body", MOVED_BODIES.values(), ids=MOVED_BODIES)
def test_moved_constant_is_sound(body: str) -> None:
    assert proving.prove(MOVED_CONSTANT, HEAD + body + TAIL, make_moved, structures=64).reaches(256)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("    return self.freqs.to(x.device)", "keep the copy or write to it"),
        ("    freqs = self.freqs.to(x.device)\n    freqs += 1\n    return x", "keep the copy"),
        ("    return x * self.freqs.to(x.device) + len(self.freqs)", "in another way"),
        (
            "    self.freqs = torch.ones(3)\n    return x * self.freqs.to(x.device)",
            "in another way",
        ),
        ("    return x * self.freqs.to(x.dtype)", "is a device"),
        ("    import copy\n    return x * self.freqs.to(x.device)", "include the moved constant"),
    ],
)
def test_moved_constant_is_refused(body: str, reason: str) -> None:
    proving.refuses(
        MOVED_CONSTANT, proving.code_of(HEAD, body) + TAIL, {"x": torch.ones(2, 3), "n": 3}, reason
    )


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ('self.register_buffer("freqs", torch.ones(3))', "occurs in a string"),
        ("self.freqs = torch.nn.Parameter(torch.ones(3))", "not a parameter"),
    ],
)
def test_what_the_module_moves_is_refused(made: str, reason: str) -> None:
    code = (HEAD + MOVED_BODIES["used at once"] + TAIL).replace(
        "self.freqs = torch.arange(n).float() + 0.5", made
    )
    proving.refuses(MOVED_CONSTANT, code, {"x": torch.ones(2, 3), "n": 3}, reason)


def test_moved_constant_waits_once() -> None:
    code = HEAD + MOVED_BODIES["used at once"] + TAIL
    assert proving.syncs_go(MOVED_CONSTANT, code, {"x": torch.ones(2, 3), "n": 3}) == (2, 1)
