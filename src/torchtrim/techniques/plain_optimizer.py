"""Plain optimizer: an optimizer's step allocates as little as possible.

With `foreach`, torch's default on a GPU, one operator takes all parameters at once, and its temporaries are
as large as all of them together. Two styles avoid that:

* `chunks`: the same operators take a part of the parameters at a time, as if each part were a parameter group
  of its own. Every element goes through the same arithmetic, so the result is identical, bit for bit. It
  costs the launches of the additional parts.
* `fused`: torch's fused kernel allocates nothing and is the quickest, but rounds differently, so it is
  planned only with `--allow rounding`. It exists for Adam, AdamW, SGD and, on CPU, Adagrad.

Groups, schedulers, `state_dict` and `zero_grad` are unchanged: parameter groups are split only while `step`
runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchtrim.errors import ApplyFailed
from torchtrim.executor.places import optimizer_at
from torchtrim.executor.registry import Handle, Option, all_or_none
from torchtrim.records.finding import Equivalence
from torchtrim.records.plan import Technique
from torchtrim.step.edits import Edit, joined_if_all
from torchtrim.step.optimizers import (
    FOREACH,
    Chunks,
    OptimizerCall,
    chunked,
    in_chunks,
    optimizer_calls,
)
from torchtrim.step.step import Step

_PARTS = (2, 4, 8, 16, 64)
"""Arbitrary; numbers of chunks to offer."""
_FUSED = ("Adam", "AdamW", "SGD", "Adagrad")
_ONLY_ON_CPU = ("Adagrad",)


class PlainOptimizer:
    """`where` names optimizers (`AdamW`, a second one `AdamW#2`).

    `style` is `chunks`, with `chunk_bytes` of parameters each, or `fused`.
    """

    name = "plain_optimizer"
    takes = ("style", "chunk_bytes")
    equivalence: Equivalence = "BITWISE"

    def options(self, step: Step) -> Sequence[Option]:
        """Return chunks of several sizes, and the fused kernel, for every optimizer whose step allocates."""
        found = []
        for name, calls in optimizer_calls(step).items():
            spans = tuple(seen.span for seen in calls)
            for most in _chunk_sizes(step, calls):
                settings = ("style", "chunks"), ("chunk_bytes", most)
                found.append(Option(self.name, name, spans, None, settings))
            if all(map(_may_fuse, calls)) and not _is_only_for_cpu(step, calls):
                fused = (("style", "fused"),)
                found.append(Option(self.name, name, spans, None, fused, "ROUNDING"))
        return found

    def edits(self, step: Step, option: Option) -> Edit | None:
        """Return the edit without temporaries, except for those of one chunk; None if that does not reduce
        them."""
        settings = dict(option.settings)
        calls = optimizer_calls(step)[option.where]
        return joined_if_all(in_chunks(step, seen, _chunks(step, seen, settings)) for seen in calls)

    def apply(self, roots: Mapping[str, Any], technique: Technique) -> Handle:
        """Give the optimizers a `step` in this style."""
        from torchtrim.executor.stepping import Stepping, run_fused, run_in_chunks

        style = technique.options.get("style")
        most = int(technique.options.get("chunk_bytes", 1))

        def plain(where: str) -> Stepping:
            optimizer = optimizer_at(roots, where)
            if style == "chunks":
                return Stepping(where, optimizer, run_in_chunks(most))
            if style == "fused":
                return Stepping(where, optimizer, run_fused(where, optimizer))
            raise ApplyFailed(
                f"`{where}`: the plan has the style {style!r}, but plain_optimizer supports only "
                "`chunks` and `fused`. Plan again, or use one of these."
            )

        return all_or_none(technique.where, plain)


TECHNIQUE = PlainOptimizer()


def _chunk_sizes(step: Step, calls: Sequence[OptimizerCall]) -> list[int]:
    """Return chunk sizes that split the parameters differently, the largest first; only `foreach` is
    split."""
    if any(seen.style != FOREACH for seen in calls):
        return []
    total = max(sum(_sizes(step, seen)) for seen in calls)
    found: dict[tuple[Chunks, ...], int] = {}
    for most in (*(total // parts for parts in _PARTS), 1):
        cut = tuple(chunked(seen.step.updates, _sizes(step, seen), most) for seen in calls)
        found.setdefault(cut, max(most, 1))
    return list(found.values())


def _chunks(step: Step, seen: OptimizerCall, settings: Mapping[str, Any]) -> Chunks:
    """Return the updates that run together; the fused kernel allocates for none."""
    if settings["style"] == "fused":
        return ()
    return chunked(seen.step.updates, _sizes(step, seen), int(settings["chunk_bytes"]))


def _sizes(step: Step, seen: OptimizerCall) -> list[int]:
    return [step.tensors[update.parameter].bytes for update in seen.step.updates]


def _may_fuse(seen: OptimizerCall) -> bool:
    return seen.style != "fused" and seen.step.type.rpartition(".")[2] in _FUSED


def _is_only_for_cpu(step: Step, calls: Sequence[OptimizerCall]) -> bool:
    assert step.profile is not None
    on_cpu = step.profile.device.startswith("cpu")
    return not on_cpu and calls[0].step.type.rpartition(".")[2] in _ONLY_ON_CPU
