"""`x[mask.nonzero(as_tuple=True)] = c`."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from fixes import proving
from torchtrim.fixes.masked_fill import FIX

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool)


def make(rng: random.Random) -> Iterator[proving.Inputs]:
    size = proving.shape(rng)
    dtype = rng.choice(DTYPES)
    of_mask = size[: rng.randint(1, len(size))]
    kind = rng.choice((torch.bool, torch.bool, torch.int64))
    value = rng.choice((0, 1, True, 2.5, -1, float("nan"))) if dtype.is_floating_point else 1
    for _ in range(proving.DRAWS):
        if dtype.is_floating_point:
            x = proving.floating(rng, size, dtype, odd=0.3)
        else:
            x = proving.integral(rng, size, dtype, 0, 4)
        yield {"x": x, "mask": proving.mask(rng, of_mask).to(kind), "value": value}


@pytest.mark.parametrize(
    "line",
    [
        "x[mask.nonzero(as_tuple=True)] = value",
        "x[torch.nonzero(mask, as_tuple=True)] = value",
        "x[torch.where(mask)] = value",
    ],
)
def test_it_is_sound(line: str) -> None:
    code = f"import torch\ndef function(x, mask, value):\n    view = x\n    {line}\n    return x, view\n"
    proof = proving.prove(FIX, code, make)
    assert proof.reaches(990)
    assert not proof.unsafe


def test_gradients_pass_where_nothing_was_written() -> None:
    def make_graded(rng: random.Random) -> Iterator[proving.Inputs]:
        size = proving.shape(rng)
        for _ in range(proving.DRAWS):
            x = proving.floating(rng, size, torch.float32, odd=0.3).requires_grad_()
            yield {"x": x, "mask": proving.mask(rng, size)}

    code = "def function(x, mask):\n    y = x * 2\n    y[mask.nonzero(as_tuple=True)] = 0\n    return y\n"
    assert proving.prove(FIX, code, make_graded).reaches(1000)


def test_a_mask_of_another_shape_is_refused() -> None:
    code = "def function(x, mask):\n    x[mask.nonzero(as_tuple=True)] = 0\n    return x\n"

    def make_larger(rng: random.Random) -> Iterator[proving.Inputs]:
        yield {"x": torch.ones(5, 5), "mask": torch.ones(3, 3, dtype=torch.bool)}

    proof = proving.prove(FIX, code, make_larger, structures=1)
    assert list(proof.refused) == [
        "it needs that `mask` is a tensor of the shape that `x` begins with, "
        "and in a run that was watched it was not so"
    ]


def test_it_waits_no_more() -> None:
    code = "def function(x, mask):\n    x[mask.nonzero(as_tuple=True)] = 0\n    return x\n"
    inputs = {"x": torch.ones(4, 5), "mask": torch.ones(4, 5, dtype=torch.bool)}
    assert proving.syncs_go(FIX, code, inputs) == (2, 0)
