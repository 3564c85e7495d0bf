"""A loop of `mask[i, :n] = True` over lengths."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from fixes import proving
from torchtrim.fixes.padding_mask import FIX

HEAD = "import torch\ndef function(mask, lengths, value, rows):\n"


code_of = partial(proving.code_of, HEAD)


def make(rng: random.Random) -> Iterator[proving.Inputs]:
    """Lengths below zero and beyond the end; fewer than rows, now and then."""
    size = (rng.choice((1, 2, 5)), rng.choice((0, 1, 4)), *rng.choice(((), (2,))))
    dtype = rng.choice((torch.bool, torch.bool, torch.float32, torch.int64))
    kind = rng.choice((torch.int64, torch.int32))
    many = rng.randint(1, size[0])
    for _ in range(proving.DRAWS):
        rows = rng.choice((many, many, 0)) if many else 0
        yield {
            "mask": proving.integral(rng, size, dtype, 0, 2),
            "lengths": proving.integral(rng, (many,), kind, -7, 8),
            "value": True if dtype == torch.bool else rng.choice((0, 5)),
            "rows": rows,
        }


BODIES = [
    "view = mask[:1]\nfor i, n in enumerate(lengths):\n    mask[i, :n] = value\nreturn mask, view",
    "for row in range(len(lengths)):\n    mask[row, : lengths[row].item()] = True  # real\nreturn mask",
    "for i in range(lengths.size(0)):\n    mask[i, int(lengths[i]) :] = value\nreturn mask",
    "for i, n in enumerate(lengths + 1):\n    mask[i][:n] = value\nreturn mask",
    "self = [mask]\nout = self[0]\nfor b in range(lengths.shape[0]):\n    out[b, 0 : lengths[b]] = value\n"
    "return mask",
]


@pytest.mark.parametrize("body", BODIES)
def test_it_is_sound(body: str) -> None:
    assert proving.prove(FIX, code_of(body), make, structures=50).reaches(200)


def test_some_rows() -> None:
    def started(rng: random.Random) -> Iterator[proving.Inputs]:
        for draw in make(rng):
            yield {**draw, "rows": 1}
            yield {**draw, "rows": rng.choice((0, -1, len(draw["lengths"])))}

    body = "for i in range(rows):\n    mask[i, : lengths[i]] = value\nreturn mask"
    assert proving.prove(FIX, code_of(body), started, structures=30).reaches(240)


def inputs(**others: object) -> proving.Inputs:
    found = {"mask": torch.zeros(2, 4, dtype=torch.bool), "lengths": torch.tensor([1, 3])}
    return {**found, "value": True, "rows": 2, **others}


def test_what_is_written() -> None:
    rewrite = proving.fixed(FIX, code_of(BODIES[1]), inputs())
    assert proving.text_of(rewrite).removeprefix(HEAD) == (
        "    positions = torch.arange(mask.shape[1], device=mask.device)\n"
        "    ends = torch.where(lengths < 0, lengths + mask.shape[1], lengths)\n"
        "    mask[:len(lengths)].masked_fill_(positions < ends[:, None], True)  # real\n"
        "    return mask\n"
    )


LOOP = "for i, n in enumerate(lengths):\n    mask[i, :n] = "


@pytest.mark.parametrize(
    ("body", "others", "why"),
    [
        (f"{LOOP}value\nreturn n", {}, "read after the loop"),
        (f"{LOOP}n", {}, "decides more"),
        (f"{LOOP}value + 1", {}, "Assign it to a name first"),
        (f"{LOOP}value", {"value": torch.tensor(True)}, "Python number"),
        (f"{LOOP}value", {"lengths": [1, 3]}, "one-dimensional integer tensor"),
        (f"{LOOP}value", {"lengths": [torch.tensor(1)]}, "one-dimensional integer tensor"),
        (f"{LOOP}value", {"mask": torch.zeros(2, 4).long(), "value": 0.5}, "can hold"),
        ("for i, n in enumerate(print() or lengths):\n    mask[i, :n] = 1", {}, "a name first"),
        (
            "if value: \n    pass\nfor i, n in enumerate(lengths): mask[i, :n] = i",
            {},
            "decides more",
        ),
    ],
)
def test_refused(body: str, others: proving.Inputs, why: str) -> None:
    proving.refuses(FIX, code_of(body), inputs(**others), why)


@pytest.mark.parametrize(
    "body",
    [
        f"{LOOP}value\n    print(i)",
        f"{LOOP}value\nelse:\n    mask = None",
        "for n, i in enumerate(lengths):\n    mask[i, :n] = value",
        "for i in range(rows):\n    mask[i, : lengths[rows]] = value",
        "for i in range(rows):\n    mask[rows, : lengths[i]] = value",
    ],
)
def test_not_its_business(body: str) -> None:
    assert not proving.matches(FIX, code_of(body))


def test_a_loop_that_never_ran_is_not_safe() -> None:
    rewrite = proving.fixed(FIX, code_of(f"{LOOP}value"), inputs(lengths=torch.zeros(0).long()))
    assert not rewrite.safe


def test_without_evidence_it_is_not_safe() -> None:
    assert not proving.unseen(FIX, code_of(f"{LOOP}value")).safe


@pytest.mark.parametrize("body", [f"{LOOP}value\nreturn mask", BODIES[1]])
def test_it_waits_no_more(body: str) -> None:
    before, after = proving.syncs_go(FIX, code_of(body), inputs())
    assert before >= 2
    assert after == 0
