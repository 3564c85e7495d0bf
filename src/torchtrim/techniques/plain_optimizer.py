"""Plain optimizer: an optimizer's step allocates no more than it has to.

With `foreach`, torch's default on a GPU, one operator takes all parameters at once, and what it computes on
the way is as large as all of them together. Two ways avoid that:

* `chunks`: the same operators take a part of the parameters at a time, as if each part were a parameter group
  of its own. Every element goes through the same arithmetic, so the result is the same bit for bit. It costs
  the launches of the further parts.
* `fused`: torch's fused kernel allocates nothing and is the quickest, but rounds otherwise, so it is planned
  where `--allow rounding` is given. It is there for Adam, AdamW, SGD and, on CPU, Adagrad.

Groups, schedulers, `state_dict` and `zero_grad` are as they were: the parameter groups are cut while `step`
runs, and are whole again when it returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchtrim.errors import ApplyFailed
from torchtrim.executor.places import optimizer_at
from torchtrim.executor.registry import Handle, Option, all_or_none
from torchtrim.records.finding import Equivalence
from torchtrim.records.plan import Technique
from torchtrim.step.edits import Edit, joined
from torchtrim.step.optimizers import (
    FOREACH,
    Chunks,
    Seen,
    chunked,
    in_chunks,
    seen_of,
)
from torchtrim.step.step import Step

_PARTS = (2, 4, 8, 16, 64)
_FUSED = ("Adam", "AdamW", "SGD", "Adagrad")
_ONLY_ON_CPU = ("Adagrad",)


class PlainOptimizer:
    """`where` names optimizers (`AdamW`, a second one `AdamW#2`). `style` is `chunks`, with `chunk_bytes` of
    parameters each, or `fused`."""

    name = "plain_optimizer"
    takes = ("style", "chunk_bytes")
    equivalence: Equivalence = "BITWISE"

    def options(self, step: Step) -> Sequence[Option]:
        """Chunks of several sizes, and the fused kernel, for every optimizer whose step allocates."""
        found = []
        for name, calls in seen_of(step).items():
            spans = tuple(seen.span for seen in calls)
            for most in _chunk_sizes(step, calls):
                settings = ("style", "chunks"), ("chunk_bytes", most)
                found.append(Option(self.name, name, spans, None, settings))
            if all(map(_may_fuse, calls)) and not _is_only_for_cpu(step, calls):
                fused = (("style", "fused"),)
                found.append(Option(self.name, name, spans, None, fused, "ROUNDING"))
        return found

    def edits(self, step: Step, option: Option) -> Edit | None:
        """The temporaries go, but for those of one chunk; None if they are no fewer."""
        settings = dict(option.settings)
        calls = seen_of(step)[option.where]
        edits = [in_chunks(step, seen, _chunks(step, seen, settings)) for seen in calls]
        found = [edit for edit in edits if edit is not None]
        return joined(found) if len(found) == len(edits) else None

    def apply(self, roots: Mapping[str, Any], technique: Technique) -> Handle:
        """Give the optimizers a `step` that runs so."""
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
                f"`{where}`: the plan has the style {style!r}, and plain_optimizer knows "
                "`chunks` and `fused`. Plan again, or write one of these."
            )

        return all_or_none(technique.where, plain)


TECHNIQUE = PlainOptimizer()


def _chunk_sizes(step: Step, calls: Sequence[Seen]) -> list[int]:
    """Sizes of chunks, the largest first, that cut the parameters differently; `foreach` alone is cut."""
    if any(seen.style != FOREACH for seen in calls):
        return []
    total = max(sum(_sizes(step, seen)) for seen in calls)
    found: dict[tuple[Chunks, ...], int] = {}
    for most in (*(total // parts for parts in _PARTS), 1):
        cut = tuple(chunked(seen.step.updates, _sizes(step, seen), most) for seen in calls)
        found.setdefault(cut, max(most, 1))
    return list(found.values())


def _chunks(step: Step, seen: Seen, settings: Mapping[str, Any]) -> Chunks:
    """What runs together; the fused kernel allocates for none of it."""
    if settings["style"] == "fused":
        return ()
    return chunked(seen.step.updates, _sizes(step, seen), int(settings["chunk_bytes"]))


def _sizes(step: Step, seen: Seen) -> list[int]:
    return [step.tensors[update.parameter].bytes for update in seen.step.updates]


def _may_fuse(seen: Seen) -> bool:
    return seen.style != "fused" and seen.step.type.rpartition(".")[2] in _FUSED


def _is_only_for_cpu(step: Step, calls: Sequence[Seen]) -> bool:
    assert step.profile is not None
    on_cpu = step.profile.device.startswith("cpu")
    return not on_cpu and calls[0].step.type.rpartition(".")[2] in _ONLY_ON_CPU
