"""`torch.cat([x[mask], x[~mask]])`."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from fixes import proving
from torchtrim.fixes.partition import FIX

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool)
HEAD = "import torch\ndef function(x, y, mask, other):\n"


code_of = partial(proving.code_of, HEAD)


def make(rng: random.Random) -> Iterator[proving.Inputs]:
    size = proving.shape(rng)
    more = (rng.choice((0, 1, 6)), *size[1:])
    dtype = rng.choice(DTYPES)
    graded = dtype.is_floating_point and rng.random() < 0.7

    def filled(shape: tuple[int, ...]) -> torch.Tensor:
        if dtype.is_floating_point:
            return proving.floating(rng, shape, dtype, odd=0.3).requires_grad_(graded)
        return proving.integral(rng, shape, dtype, 0, 2)

    for _ in range(proving.DRAWS):
        yield {
            "x": filled(size),
            "y": [filled(size), filled(more)],
            "mask": proving.mask(rng, size[:1]),
            "other": proving.mask(rng, more[:1]),
        }


BODIES = [
    "return torch.cat([x[mask], x[~mask]])",
    "return torch.cat((x[~mask, ...], x[mask]), dim=0) + 1",
    "return torch.concat([x[mask], torch.zeros_like(x)[~mask]], 0)",
    "y, z = y\nreturn [torch.cat([y[mask.bool()], x.clone()[~mask.bool()]])]",
    "y, z = y\nreturn torch.cat(\n    [\n        x[mask],\n        z[other],\n        x[~mask],\n"
    "        z[~other],\n    ],\n    dim=0,\n)",
    "return [torch.cat([t[mask], t[~mask]]) for t in (x, y[0])]",
    "y, z = y\nreturn torch.cat([z[other], x[mask], torch.zeros_like(z)[~other], y[~mask]])",
]


@pytest.mark.parametrize("body", BODIES)
def test_it_is_sound(body: str) -> None:
    assert proving.prove(FIX, code_of(body), make, structures=45).reaches(180)


MASK = torch.tensor([True, False, True])


def inputs(**others: object) -> proving.Inputs:
    return {"x": torch.ones(3, 2), "y": torch.ones(3, 2), "mask": MASK, "other": MASK, **others}


def test_what_is_written() -> None:
    rewrite = proving.fixed(FIX, code_of(BODIES[0]), inputs())
    assert proving.text_of(rewrite).removeprefix(HEAD) == (
        "    return x[torch.argsort((~mask).byte(), stable=True)]\n"
    )


@pytest.mark.parametrize(
    ("body", "others", "why"),
    [
        (BODIES[0], {"mask": torch.tensor([0, 1, 2])}, "each mask is boolean"),
        (BODIES[0], {"mask": torch.ones(3, 2, dtype=torch.bool)}, "each mask is boolean"),
        ("return torch.cat([x[mask], y[~mask]])", {"y": torch.ones(3, 2).double()}, "one type"),
        ("return torch.cat([x[mask], (print() or y)[~mask]])", {}, "may have a side effect"),
    ],
)
def test_refused(body: str, others: proving.Inputs, why: str) -> None:
    proving.refuses(FIX, code_of(body), inputs(**others), why)


@pytest.mark.parametrize(
    "body",
    [
        "return torch.cat([x[mask], x[other]])",
        "return torch.cat([x[mask], x[~mask], x[mask]])",
        "return torch.cat([x[mask], x[~mask]], dim=1)",
        "return torch.cat([x[mask], x])",
        "return torch.stack([x[mask], x[~mask]])",
    ],
)
def test_not_its_business(body: str) -> None:
    assert not proving.matches(FIX, code_of(body))


def test_without_evidence_it_is_not_safe() -> None:
    assert not proving.unseen(FIX, code_of(BODIES[0])).safe


def test_it_waits_no_more() -> None:
    x = torch.ones(3, 2, requires_grad=True)
    before, after = proving.syncs_go(FIX, code_of(BODIES[0]), inputs(x=x))
    assert before == 4
    assert after == 0
