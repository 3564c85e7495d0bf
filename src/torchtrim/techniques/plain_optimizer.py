"""Plain optimizer: an optimizer's step allocates as little as possible.

With `foreach`, torch's default on a GPU, one operator takes all parameters at once, and its temporaries are
as large as all of them together. Two styles avoid that:

* `chunks`: the same operators take a part of the parameters at a time, as if each part were a separate
  parameter group. Every element goes through the same arithmetic, so the result is identical, bit for bit.
  It costs the launches of the additional parts.
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
from torchtrim.executor.registry import Handle, Option, Roots, TechniqueUnit, all_or_none
from torchtrim.records.plan import Technique
from torchtrim.step.edits import Edit, joined_if_all
from torchtrim.step.optimizers import (
    FOREACH,
    Chunks,
    OptimizerCall,
    chunked,
    in_chunks,
    optimizer_calls,
    parameter_sizes,
)
from torchtrim.step.step import Step

_PARTS = (2, 4, 8, 16, 64)
"""Arbitrary; numbers of chunks to offer."""
_FUSED = ("Adam", "AdamW", "SGD")
_FUSED_ON_CPU = (*_FUSED, "Adagrad")


class PlainOptimizer(TechniqueUnit):
    """`where` names optimizers. `style`: `chunks`, with `chunk_bytes` of parameters each, or `fused`."""

    name = "plain_optimizer"
    does = "update parameters with fewer temporaries"
    takes = ("style", "chunk_bytes")
    equivalence = "BITWISE"
    assumes = ("the optimizer has no step hooks",)

    def options(self, step: Step) -> Sequence[Option]:
        """Return chunks of several sizes, and the fused kernel, for every optimizer whose step allocates."""
        options = []
        for name, calls in optimizer_calls(step).items():
            spans = tuple(seen.span for seen in calls)
            for most in _chunk_sizes(step, calls):
                settings = ("style", "chunks"), ("chunk_bytes", most)
                options.append(Option(self.name, name, spans, None, settings))
            if _may_fuse(step, calls):
                fused = (("style", "fused"),)
                options.append(Option(self.name, name, spans, None, fused, "ROUNDING"))
        return options

    def edits(self, step: Step, option: Option) -> Edit | None:
        """Return the edit without temporaries except for those of one chunk, if that reduces them."""
        settings = dict(option.settings)
        calls = optimizer_calls(step)[option.where]
        return joined_if_all(in_chunks(step, seen, _chunks(step, seen, settings)) for seen in calls)

    def apply(self, roots: Roots, technique: Technique) -> Handle:
        """Give the optimizers a `step` in this style."""
        from torchtrim.executor.stepping import Stepping, run_fused, run_in_chunks

        style = technique.options.get("style")
        most = int(technique.options.get("chunk_bytes", 1))

        def plain(where: str) -> Stepping:
            optimizer = optimizer_at(roots, where)
            if style == "chunks":
                return Stepping(where, optimizer, run_in_chunks(most), whole=True)
            if style == "fused":
                return Stepping(where, optimizer, run_fused(where, optimizer), whole=True)
            raise ApplyFailed(
                f"`{where}`: the plan has the style {style!r}, but plain_optimizer supports only "
                "`chunks` and `fused`. Plan again, or use one of these."
            )

        return all_or_none(technique.where, plain)


TECHNIQUE = PlainOptimizer()


def _chunk_sizes(step: Step, calls: Sequence[OptimizerCall]) -> list[int]:
    """Return the chunk sizes that split the parameters of `foreach` differently, the largest first."""
    if any(seen.style != FOREACH for seen in calls):
        return []
    total = max(sum(parameter_sizes(step, seen)) for seen in calls)
    found: dict[tuple[Chunks, ...], int] = {}
    for most in (*(total // parts for parts in _PARTS), 1):
        cut = tuple(chunked(seen.step.updates, parameter_sizes(step, seen), most) for seen in calls)
        found.setdefault(cut, max(most, 1))
    return list(found.values())


def _chunks(step: Step, seen: OptimizerCall, settings: Mapping[str, Any]) -> Chunks:
    """Return the updates that run together; the fused kernel allocates for none."""
    if settings["style"] == "fused":
        return ()
    return chunked(seen.step.updates, parameter_sizes(step, seen), int(settings["chunk_bytes"]))


def _may_fuse(step: Step, calls: Sequence[OptimizerCall]) -> bool:
    assert step.profile is not None
    known = _FUSED_ON_CPU if step.profile.device.startswith("cpu") else _FUSED
    return all(
        seen.style != "fused" and seen.step.type.rpartition(".")[2] in known for seen in calls
    )
