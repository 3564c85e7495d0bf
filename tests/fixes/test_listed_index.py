"""`x[:, [1, 0]]`."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fixes import proving
from torchtrim.fixes.listed_index import FIX
from torchtrim.fixes.reading.facts import Refused
from torchtrim.fixes.reading.source import Source

TYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
READS = ("x[[0, 2]]", "x[:, [1, 0]]", "(x * 1)[..., [2]]", "x[:, :, [-1, -2, -3]]", "x.mT[[1]]")


def make(rng: random.Random) -> Iterator[proving.Inputs]:
    size = tuple(rng.choice((3, 4)) for _ in range(rng.choice((3, 4))))
    dtype, graded = rng.choice(TYPES), rng.random() < 0.5
    for _ in range(proving.DRAWS):
        x = proving.floating(rng, size, torch.float32).to(dtype)
        yield {"x": x.requires_grad_(graded and dtype.is_floating_point)}


@pytest.mark.parametrize("read", READS)
def test_it_is_the_same_and_never_safe(read: str) -> None:
    code = f"import torch\ndef function(x):\n    return {read}\n"
    proof = proving.prove(FIX, code, make, structures=52, suggested=True)
    assert proof.reaches(200), proof
    assert not proving.prove(FIX, code, make, structures=2).agreed


def test_what_is_written() -> None:
    code = "import torch\ndef function(x):\n    return x[:, [1, 0]] + 1\n"
    (edit, *_) = proving.fixed(FIX, code, {"x": torch.ones(2, 2)}).edits
    assert edit.text == "torch.stack((x[:, 1], x[:, 0]), 1)"


@pytest.mark.parametrize(
    ("read", "reason"),
    [
        ("x[[0, 0]]", "comes twice"),
        ("x[[0, -1]]", "from both ends"),
        ("x[[0, 1, 2, 3, 4, 5, 6, 7, 8]]", "more than 8"),
        ("n[[0]]", "is a tensor"),
    ],
)
def test_it_is_refused(read: str, reason: str) -> None:
    inputs = {"x": torch.ones(9, 2), "n": torch.ones(2).numpy()}
    with pytest.raises(Refused, match=reason):
        proving.fixed(FIX, f"def function(x, n):\n    return {read}\n", inputs)


@pytest.mark.parametrize(
    "read", ["x[[i]]", "x[[0], [1]]", "x[1:, [0]]", "x[[True, False]]", "x[[]]"]
)
def test_what_is_no_match(read: str) -> None:
    assert not list(FIX.find(Source("case.py", f"def f(x, i):\n    return {read}\n")))


def test_it_waits_no_more() -> None:
    code = "import torch\ndef function(x):\n    return x[:, [1, 0]]\n"
    assert proving.syncs_go(FIX, code, {"x": torch.ones(3, 3)}) == (1, 0)
