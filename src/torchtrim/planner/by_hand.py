"""What a person checkpoints by hand: the blocks of a model, all of them or every second, beside plans."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from torchtrim.techniques.base import Option

_NUMBERED = re.compile(r"(.+)\.(\d+)")


def by_hand(options: Iterable[Option]) -> dict[str, tuple[Option, ...]]:
    """Options of recompute by what a person calls them; empty where a model has no blocks in a row."""
    blocks = _blocks(options)
    found = {"each block checkpointed": blocks, "every second block checkpointed": blocks[::2]}
    return found if len(blocks) > 1 else {}


def _blocks(options: Iterable[Option]) -> tuple[Option, ...]:
    """The largest family of numbered modules, by the tasks of their calls, in its order."""
    families: defaultdict[str, list[tuple[int, Option]]] = defaultdict(list)
    for option in options:
        if found := _NUMBERED.fullmatch(option.where):
            families[found[1]].append((int(found[2]), option))
    largest = max(
        families.values(), key=lambda family: sum(_tasks(one) for _, one in family), default=[]
    )
    return tuple(option for _, option in sorted(largest, key=lambda one: one[0]))


def _tasks(option: Option) -> int:
    return sum(span.last - span.first for span in option.spans)
