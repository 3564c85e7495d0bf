"""`torch.repeat_interleave(x, counts)`."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fixes import proving
from torchtrim.fixes.known_repeats import FIX
from torchtrim.source.facts import Refused


def make(rng: random.Random) -> Iterator[proving.Inputs]:
    rows, dtype = rng.randint(0, 4), rng.choice((torch.float32, torch.bfloat16, torch.int64))
    for _ in range(proving.DRAWS):
        x = proving.integral(rng, (rows, 2), torch.int64).to(dtype)
        yield {"x": x, "n": [rng.choice((0, 1, 3)) for _ in range(rows)]}


CALLS = (
    "torch.repeat_interleave(x, repeats, dim=0)",
    "x.repeat_interleave(\n        repeats,\n        dim=0,\n    )",
    "torch.repeat_interleave(x * 2, repeats, dim=-2)",
    "torch.repeat_interleave(torch.arange(len(x)), repeats)",
)
HEAD = """
import torch
def function(x, n):
    counts = [one + 1 for one in n]
    repeats = torch.tensor(counts, dtype=torch.long).to(x.device)
"""


@pytest.mark.parametrize("call", CALLS)
def test_it_is_sound(call: str) -> None:
    proof = proving.prove(FIX, f"{HEAD}    return {call}, sum(counts)\n", make, structures=64)
    assert proof.reaches(256), proof


@pytest.mark.parametrize(
    "line",
    [
        "counts.append(1)",
        "counts[0] += 1",
        "repeats += 1",
        "counts = [2 for _ in n]",
        "work(counts)",
        "repeats = repeats * 2",
    ],
)
def test_counts_that_may_have_changed_are_refused(line: str) -> None:
    code = f"def work(n):\n    pass\n{HEAD}    {line}\n    return x.repeat_interleave(repeats, dim=0)\n"
    with pytest.raises(Refused, match="write `output_size=n`"):
        proving.fixed(FIX, code, {"x": torch.ones(2, 2), "n": [1, 2]})


def test_an_argument_is_refused() -> None:
    code = "import torch\ndef function(x, counts):\n    return torch.repeat_interleave(x, counts)\n"
    with pytest.raises(Refused, match="with n the sum of `counts`"):
        proving.fixed(FIX, code, {"x": torch.ones(2), "counts": torch.tensor([1, 2])})


def test_it_waits_no_more() -> None:
    code = f"{HEAD}    return {CALLS[0]}\n"
    before, after = proving.syncs_go(FIX, code, {"x": torch.ones(2, 2), "n": [1, 2]})
    assert before - after == 2
