"""`torch.cuda.synchronize()`."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fixes import proving
from torchtrim.fixes.explicit_synchronize import FIX
from torchtrim.rewriter.edits import patch
from torchtrim.source.facts import Facts, FixRefused


def make(rng: random.Random) -> Iterator[proving.Inputs]:
    size = proving.shape(rng)
    for _ in range(proving.DRAWS):
        yield {"x": proving.floating(rng, size, torch.float32, odd=0.2).requires_grad_()}


BODIES = {
    "between": """
    y = x * 2
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    y += 1
    return y
""",
    "alone": "    if torch.cuda.is_available(): torch.cuda.synchronize()\n    return x.exp()\n",
    "in a loop": """
    for _ in range(3):
        x = x * 1.5
        if x.is_cuda:
            # wait for it
            torch.cuda.synchronize(x.device)
            x = x + 1
    return x
""",
    "renamed": "    if x.is_cuda:\n        y = x\n        sync()\n    return x.sin()\n",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_it_is_sound(body: str) -> None:
    head = "import torch\nfrom torch.cuda import synchronize as sync\ndef function(x):\n"
    assert proving.prove(FIX, head + body, make, structures=64).reaches(256)


CODE = "import torch\nfrom u import device_synchronize\ndef f(x, s, dist):\n    {}\n    {}\n"


def test_it_is_refused_beside_a_clock() -> None:
    with pytest.raises(FixRefused, match="reads a clock"):
        proving.unseen(FIX, CODE.format("torch.cuda.synchronize()", "t = time.perf_counter()"))


@pytest.mark.parametrize(
    ("call", "line"),
    [
        ("torch.cuda.synchronize()", "peak = torch.cuda.max_memory_allocated()"),
        ("torch.cuda.synchronize()", "y = x.to('cpu', non_blocking=True)"),
        ("torch.cuda.synchronize()", "with torch.cuda.stream(s): x += 1"),
        ("torch.cuda.synchronize()", "dist.barrier()"),
        ("device_synchronize()", "x += 1"),
        ("get_accelerator().synchronize()", "x += 1"),
    ],
)
def test_what_may_rely_on_it_leaves_the_choice_to_a_person(call: str, line: str) -> None:
    rewrite = proving.unseen(FIX, CODE.format(call, line))
    assert "leave it out" in rewrite.advice
    assert not rewrite.safe


def test_the_line_goes_and_the_wait_with_it() -> None:
    code = "import torch\ndef function(x):\n    y = x * 2\n    torch.cuda.synchronize()\n    return y\n"
    (match,) = proving.matches(FIX, code)
    rewrite = FIX.rewrite(match, Facts())
    patched = patch(match.source, [rewrite])
    assert patched.text == "import torch\ndef function(x):\n    y = x * 2\n    return y\n"
    inputs = {"x": torch.ones(3)}
    assert (proving.waits(code, inputs), proving.waits(patched.text, inputs)) == (1, 0)
