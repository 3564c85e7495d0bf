"""The validator says which buffers clash, where and when."""

from __future__ import annotations

import random

import pytest

from memory.packing.instances import any_instance
from torchtrim.memory.packing import Buffer, pack, why_invalid

A, B = Buffer("a", 0, 10, 100), Buffer("b", 5, 15, 50)


def test_a_clash_names_both_the_time_and_the_bytes() -> None:
    reason = why_invalid([A, B], {"a": 0, "b": 60})
    assert reason is not None
    assert all(w in reason for w in ("'a'", "'b'", "live from 5 to 10", "bytes 60 to 100"))


@pytest.mark.parametrize(
    ("offsets", "word"),
    [
        ({"a": 0}, "'b' has no offset"),
        ({"a": 0, "b": 100, "c": 0}, "'c', but no such buffer"),
        ({"a": 0, "b": -50}, "not a valid address"),
        ({"a": 0, "b": 100.0}, "not a valid address"),
        ({"a": 0, "b": 102}, "not a multiple of 4"),
        ({"a": 0, "b": 152}, "above the capacity of 200"),
    ],
)
def test_what_is_misplaced_is_named(offsets: dict[str, int], word: str) -> None:
    reason = why_invalid([A, B], offsets, capacity=200, alignment=4)  # type: ignore[arg-type]
    assert reason is not None
    assert word in reason


def test_touching_is_allowed() -> None:
    assert why_invalid([A, B], {"a": 0, "b": 100}, capacity=150) is None
    assert why_invalid([A, Buffer("c", 10, 12, 100)], {"a": 0, "c": 0}) is None
    assert why_invalid([A, Buffer("c", 5, 5, 100)], {"a": 0, "c": 0}) is None
    assert why_invalid([A, Buffer("c", 0, 5, 0)], {"a": 0, "c": 50}) is None


def test_it_agrees_with_looking_at_every_pair() -> None:
    clashing = 0
    for number in range(2000):
        chance = random.Random(number)
        buffers = any_instance(number, most=8)
        offsets = dict(pack(buffers, seconds=0).offsets)
        for name in offsets:
            if chance.random() < 0.3:
                offsets[name] = max(0, offsets[name] + chance.randrange(-3, 4))
        pairs = [
            (a, b)
            for i, a in enumerate(buffers)
            for b in buffers[:i]
            if max(a.lower, b.lower) < min(a.upper, b.upper)
            and max(offsets[a.id], offsets[b.id])
            < min(offsets[a.id] + a.size, offsets[b.id] + b.size)
        ]
        clashing += bool(pairs)
        reason = why_invalid(buffers, offsets)
        assert (reason is not None) == bool(pairs), number
        named = [repr(a.id) in reason and repr(b.id) in reason for a, b in pairs if reason]
        assert any(named) or not pairs
    assert clashing > 300
