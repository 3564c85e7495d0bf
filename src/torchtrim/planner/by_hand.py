"""Manual ways to reduce memory: checkpointed blocks, and the batch in two halves."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from torchtrim.executor.registry import Option, edit_of, options_of
from torchtrim.planner.pins import length
from torchtrim.step.edits import Edit
from torchtrim.step.index import index_of
from torchtrim.step.rerun import rerun
from torchtrim.step.step import Step

# Results that selective checkpointing keeps since they are costly to recompute: torchtitan's policy.
PRODUCTS = frozenset(
    f"aten::{name}"
    for name in (
        *("mm", "addmm", "bmm", "baddbmm", "convolution"),
        *("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu"),
        *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
    )
)
_EACH, _SECOND = "each block checkpointed", "every second block checkpointed"
# Share of the model's tasks to split. The rest is mainly the loss, which a person would split too.
_NEARLY_ALL = 0.9
_NUMBERED = re.compile(r"(.+)\.(\d+)")


class HandmadePlan(NamedTuple):
    """A manual plan: its name, its places, and its edits of the step."""

    name: str
    options: tuple[Option, ...]
    edits: list[Edit]


def by_hand(step: Step) -> Iterator[HandmadePlan]:
    """Yield the manual plans: checkpoint each block, or all but its products, or every second; two halves.

    Checkpoints need consecutive blocks that may run twice, and halves a model that does not mix samples.
    """
    once = {step.modules[number].path for number in index_of(step).runs_once}
    twice = [option for option in options_of("recompute", step) if option.where not in once]
    for name, options in checkpointed(twice).items():
        yield HandmadePlan(name, options, _again(step, options))
        if name == _EACH:
            kept = _again(step, options, PRODUCTS)
            yield HandmadePlan("each block, its products kept", options, kept)
    yield from _halves(step)


def checkpointed(options: Iterable[Option]) -> dict[str, tuple[Option, ...]]:
    """Return options of recompute by the name of the manual plan, if the model has consecutive blocks."""
    blocks = _blocks(options)
    return {_EACH: blocks, _SECOND: blocks[::2]} if len(blocks) > 1 else {}


def _again(step: Step, options: Iterable[Option], kept: frozenset[str] = frozenset()) -> list[Edit]:
    every = (rerun(step, option.spans, kept, early_stop=True) for option in options)
    return [edit for edit in every if edit is not None]


def _halves(step: Step) -> Iterator[HandmadePlan]:
    """Yield the plan that runs nearly the whole model in two parts of its batch."""
    halves = [o for o in options_of("micro_batch", step) if dict(o.settings) == {"parts": 2}]
    longest_call = max((length([call.span]) for call in step.calls), default=0)
    widest = max(halves, key=lambda option: length(option.spans), default=None)
    if widest is None or length(widest.spans) < _NEARLY_ALL * longest_call:
        return
    if (edit := edit_of(step, widest)) is not None:
        yield HandmadePlan("the batch in two halves", (widest,), [edit])


def _blocks(options: Iterable[Option]) -> tuple[Option, ...]:
    """Return the largest family of numbered modules, by the tasks of their calls, in order."""
    families: defaultdict[str, list[tuple[int, Option]]] = defaultdict(list)
    for option in options:
        if match := _NUMBERED.fullmatch(option.where):
            families[match[1]].append((int(match[2]), option))
    largest = max(
        families.values(), key=lambda family: sum(length(o.spans) for _, o in family), default=[]
    )
    return tuple(option for _, option in sorted(largest, key=lambda numbered: numbered[0]))
