"""Objects that come, go and change their numbers in sessions of transformers: masks of the unbounded run."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import draws
from torchtrim.stream import bound_session

pytest.importorskip("transformers")

from stream import sequences, tiny

_tracker = functools.cache(tiny.tracker)


def bind(session: Any, model: Any) -> Any:
    return bound_session(session, model, corrections=sequences.FRAMES)


LAST = [("reset",), ("click", 0, 99, (20, 24)), ("propagate", [0, 1, 2], False)]


@functools.cache
def held_after_nothing() -> int:
    return sequences.run(_tracker("Sam2Video"), LAST, bind).bytes[-1]


@pytest.mark.parametrize("block", range(4))
def test_any_sequence_gives_the_masks_of_the_unbounded_session(block: int) -> None:
    model = _tracker("Sam2Video")
    for number in draws.some(range(250 * block, 250 * (block + 1))):
        sequence = sequences.steps(number) + LAST
        want, got = sequences.run(model, sequence), sequences.run(model, sequence, bind)
        assert len(want.masks) == len(got.masks)
        pairs = zip(want.masks, got.masks, strict=True)
        assert all(torch.equal(one, other) for one, other in pairs), (number, sequence)
        assert got.bytes[-1] == held_after_nothing(), (number, sequence)


def test_what_came_and_went_leaves_nothing() -> None:
    """The same round again and again: an object comes, is tracked, changes its number, and goes."""
    model = _tracker("Sam2Video")
    begin = [("click", 0, 1, (20, 24)), ("propagate", [0, 1, 2], False)]
    turn = [
        ("click", 2, 2, (40, 12)),
        ("propagate", [2, 3, 4], False),
        ("renumber", [2, 1]),
        ("propagate", [4, 3, 2], True),
        ("remove", 2),
        ("propagate", [2, 3], False),
    ]
    sequence = begin + turn * 6
    want, got = sequences.run(model, sequence), sequences.run(model, sequence, bind)
    assert all(torch.equal(one, other) for one, other in zip(want.masks, got.masks, strict=True))
    after = got.bytes[3::3]
    assert len(after) == 6
    assert len(set(after[1:])) == 1
