"""Optimizer in backward: each gradient is used as soon as it is final, and dropped.

A parameter's gradient is final when backward has added to it for the last time, and then it is kept for
`optimizer.step()`. Here the optimizer's own step runs for that parameter at once, on the same numbers, so the
result is the same bit for bit and gradients are never there together. `optimizer.step()` passes over what was
updated, and updates the rest. Where the script accumulates, parameters are updated in the last backward.

Schedulers, parameter groups, `state_dict`, `load_state_dict` and `zero_grad` are as before. What comes
between backward and step would see no gradients: clipping by their norm, a GradScaler, logging. Where a step
was seen to do that it is not planned, and a budget that is missed says why and what it would cost: the norm
of all gradients is known when all have been made, so they are kept, or forward and backward run a second
time. Clipping
each parameter's gradient by itself, in a hook of `register_post_accumulate_grad_hook`, goes with it. Where a
later step reads gradients, whatever reads the gradient raises. Likewise where a gradient is added to more
often than it was, is dropped or replaced, where `step` is called twice, or where the learning rate is changed
between backward and step. Several processes and optimizers that are not torch's own are refused.

A backward updates parameters only where `step` follows it, whatever way the program takes: that is read from
the source of the line that calls `backward` and of what comes after. A step that a test of the loss guards,
a backward for a saliency map or an attack, and an optimizer that has come to have step hooks are left to
`step`, as without the plan, and the run says so. Where a loop guards its step so, this is not planned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torchtrim.analysis.places import line_of
from torchtrim.core.units import format_bytes
from torchtrim.errors import ApplyFailed
from torchtrim.executor.places import optimizer_at
from torchtrim.executor.registry import Handle, Option, all_or_none
from torchtrim.records.finding import Equivalence
from torchtrim.records.plan import Technique
from torchtrim.records.profile import Profile, Update
from torchtrim.step.edits import Drop, Edit, Insert, Need, joined
from torchtrim.step.optimizers import (
    Seen,
    launches_seconds,
    rise,
    seen_of,
    without,
)
from torchtrim.step.step import DEVICE, Span, Step

_SECONDS_A_HOOK = 1e-4
"""Of one parameter's hook and its own call of `step`: 100 parameters of 16 KiB on an AMD EPYC took 120 us
each with SGD, 136 us with AdamW, 195 us with AdamW and `foreach`, of which 130 us were its operators."""


class OptimizerInBackward:
    """`where` names optimizers (`AdamW`, a second one `AdamW#2`). `backwards`: how many there are a step."""

    name = "optimizer_in_backward"
    takes = ("backwards",)
    equivalence: Equivalence = "BITWISE"

    def options(self, step: Step) -> Sequence[Option]:
        """Every optimizer of whose gradients nothing but its step was seen to use the final value."""
        profile = step.profile
        if profile is None or profile.world > 1:
            return []
        touched = _touched(profile)
        found = []
        for name, calls in seen_of(step).items():
            counts = {update.added for seen in calls for update in seen.step.updates}
            if len(counts) == 1 and all(_is_free(step, seen, touched) for seen in calls):
                spans = tuple(seen.span for seen in calls)
                found.append(Option(self.name, name, spans, None, (("backwards", counts.pop()),)))
        return found

    def refusals(self, step: Step) -> Iterator[str]:
        """The optimizers that may not step after a backward, and those whose gradients are read before they
        step, with the price of not keeping them."""
        profile = step.profile
        if profile is None:
            return
        touched = _touched(profile)
        for name, calls in seen_of(step).items():
            readers = sorted({i for seen in calls for i in _read_after(seen, touched)})
            skipped = next((seen.step.skipped for seen in calls if seen.step.skipped), "")
            if readers:
                yield _refusal(step, profile, name, calls[0], readers[0])
            elif skipped:
                yield f"optimizer_in_backward is not for `{name}`: {skipped}"

    def edits(self, step: Step, option: Option) -> Edit:
        """Gradients end where they are final, and the update runs there."""
        return joined(
            edit
            for seen in seen_of(step)[option.where]
            for edit in (without(step, seen), *_early(step, seen))
        )

    def apply(self, roots: Mapping[str, Any], technique: Technique) -> Handle:
        """Hook the parameters of the named optimizers, and have `step` pass over those updated."""
        from torchtrim.techniques.optimizer_in_backward.running import EarlyUpdates

        backwards = technique.options.get("backwards")

        def hooked(where: str) -> EarlyUpdates:
            if not isinstance(backwards, int) or backwards < 1:
                raise ApplyFailed(
                    f"`{where}`: optimizer_in_backward needs `backwards`, the number of backwards "
                    f"a step has, and the plan has {backwards!r}. Plan again."
                )
            return EarlyUpdates(where, optimizer_at(roots, where), backwards)

        return all_or_none(technique.where, hooked)


TECHNIQUE = OptimizerInBackward()


def _touched(profile: Profile) -> dict[int, list[int]]:
    """The operators that read or write each gradient."""
    touched: dict[int, list[int]] = {
        number: [] for number, s in enumerate(profile.storages) if s.kind == "gradient"
    }
    for index, op in enumerate(profile.operators):
        for number in {*(use.storage for use in op.inputs), *op.mutates}:
            if number in touched:
                touched[number].append(index)
    return touched


def _is_free(step: Step, seen: Seen, touched: Mapping[int, Sequence[int]]) -> bool:
    """Whether the gradients are made in this step, and final ones are read in the optimizer's step alone."""
    if seen.step.skipped:
        return False
    span = range(*seen.span)
    for update in seen.step.updates:
        gradient = step.tensors[update.gradient]
        made = 0 <= gradient.birth < update.ready <= span.start and update.added
        after = [i for i in touched.get(update.gradient, ()) if i >= update.ready and i not in span]
        saved = any(hold.saver >= 0 for hold in gradient.holds)
        if not made or after or saved:
            return False
    return not any(touched[number] for number in _old(step, seen))


def _read_after(seen: Seen, touched: Mapping[int, Sequence[int]]) -> Iterator[int]:
    """The operators between backward and the optimizer's step that read a final gradient."""
    for update in seen.step.updates:
        for index in touched.get(update.gradient, ()):
            if 0 <= update.ready <= index < seen.step.first:
                yield index


def _refusal(step: Step, profile: Profile, name: str, seen: Seen, reader: int) -> str:
    size = sum(step.tensors[update.gradient].bytes for update in seen.step.updates)
    total = sum(task.seconds for task in step.tasks)
    again = sum(task.seconds for task in step.tasks if task.phase in ("forward", "backward"))
    line = line_of(profile, reader)
    at = f" at {line.path}:{line.line}" if line.path else ""
    return (
        f"optimizer_in_backward is not for `{name}`: `{profile.operators[reader].name}`{at} reads gradients "
        f"between backward and `step`, so all {format_bytes(size)} of them are kept; to clip by their norm "
        f"without keeping them, forward and backward would run twice: {1000 * again:.3g} ms more a step "
        f"(+{100 * again / total:.0f} %), which it does not do. "
        "Clip each parameter by itself in a hook, and it can be used"
    )


def _early(step: Step, seen: Seen) -> Iterator[Edit]:
    updates = seen.step.updates
    seconds = launches_seconds(step, seen, len(updates)) / len(updates) + _SECONDS_A_HOOK
    for number, update in enumerate(updates):
        yield _of(step, update, rise(step, seen, (number,)), seconds)
    yield Edit(drops=tuple(drop for number in _old(step, seen) for drop in _drops(step, number)))


def _of(step: Step, update: Update, temporaries: int, seconds: float) -> Edit:
    """While the update runs the gradient is there, and after it is not; what adds to it last is claimed."""
    gradient = step.tensors[update.gradient]
    size = gradient.bytes if gradient.pool == DEVICE else 0
    return Edit(
        drops=_drops(step, update.gradient),
        needs=(Need(update.gradient, update.ready),),
        inserts=(Insert(update.ready, seconds, size + temporaries),),
        claims=(Span(update.ready - 1, update.ready),),
    )


def _drops(step: Step, number: int) -> tuple[Drop, ...]:
    return tuple(Drop(number, hold) for hold in range(len(step.tensors[number].holds)))


def _old(step: Step, seen: Seen) -> list[int]:
    """Gradients of the step before that are still there when this one begins."""
    assert step.profile is not None
    storages = step.profile.storages
    names = {storages[update.gradient].name for update in seen.step.updates}
    return [
        number
        for number, s in enumerate(storages)
        if s.kind == "gradient" and s.birth < 0 and s.name in names
    ]
