"""Optimizer in backward: each gradient is used and dropped once it is final.

A parameter's gradient is final after its last accumulation in backward, and is then kept for
`optimizer.step()`. Here the optimizer's own step runs for that parameter at once, on the same numbers, so the
result is identical, bit for bit, and the gradients never exist at the same time. `optimizer.step()` skips the
updated parameters, and updates the rest. If the script accumulates, the last backward updates.

Schedulers, parameter groups, `state_dict`, `load_state_dict` and `zero_grad` work as before. Code between
backward and step would see no gradients: clipping by their norm, a GradScaler, logging. If a recorded step
has such code, the technique is not planned, and a missed budget reports the reason and the cost of an
alternative: the norm of all gradients is known only when all of them are computed, so either they are kept,
or forward and backward run a second time. Clipping each parameter's gradient on its own, in a hook of
`register_post_accumulate_grad_hook`, is compatible. An error is raised if a later step reads gradients, if a
gradient is accumulated more often than recorded, dropped or replaced, if `step` is called twice, or if the
learning rate changes between backward and step. Several processes and optimizers other than torch's own are
refused.

A backward updates parameters only if `step` follows it on every path of the program, according to the source
of the line that calls `backward` and of the code after it. A step guarded by a test of the loss, a backward
for a saliency map or an attack, and an optimizer that has gained step hooks are left to `step`, as without
the plan, and the run reports that. If a loop guards its step this way, the technique is not planned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torchtrim.analysis.user_source import line_of
from torchtrim.core.units import format_bytes
from torchtrim.executor.places import optimizer_at, wrong_options
from torchtrim.executor.registry import Handle, Option, Roots, TechniqueUnit, all_or_none
from torchtrim.records.plan import Technique
from torchtrim.records.profile import Profile
from torchtrim.step.edits import Edit, Insert, Need, drops_of, joined
from torchtrim.step.optimizers import (
    OptimizerCall,
    launches_seconds,
    optimizer_calls,
    rise,
    without_temporaries,
)
from torchtrim.step.step import DEVICE, Span, Step

_SECONDS_A_HOOK = 1e-4
"""Cost of one parameter's hook and its own call of `step`.

On an AMD EPYC, 100 parameters of 16 KiB took 120 us each with SGD, 136 us with AdamW, and 195 us with AdamW
and `foreach`, including 130 us for its operators.
"""


class OptimizerInBackward(TechniqueUnit):
    """`where` names optimizers (`AdamW`, a second one `AdamW#2`). `backwards`: backwards in a step."""

    name = "optimizer_in_backward"
    does = "update each parameter once its gradient is final, and drop the gradient"
    takes = ("backwards",)
    equivalence = "BITWISE"
    assumes = (
        "`step` follows each backward",
        "nothing reads gradients in between",
    )
    unseen = ("no other thread reads gradients or weights between backward and `step`",)

    def options(self, step: Step) -> Sequence[Option]:
        """Return every optimizer whose final gradients were read only by its own step."""
        profile = step.profile
        if profile is None or profile.world > 1:
            return []
        touched = _operators_by_gradient(profile)
        options = []
        for name, calls in optimizer_calls(step).items():
            counts = {update.added for seen in calls for update in seen.step.updates}
            if len(counts) == 1 and all(_is_free(step, seen, touched) for seen in calls):
                spans = tuple(seen.span for seen in calls)
                settings = (("backwards", counts.pop()),)
                options.append(Option(self.name, name, spans, None, settings))
        return options

    def refusals(self, step: Step) -> Iterator[str]:
        """Yield why an optimizer cannot be used, and what the alternative would cost."""
        if (profile := step.profile) is None:
            return
        touched = _operators_by_gradient(profile)
        for name, calls in optimizer_calls(step).items():
            readers = sorted({i for seen in calls for i in _read_after(seen, touched)})
            skipped = next((seen.step.skipped for seen in calls if seen.step.skipped), "")
            if readers:
                yield _refusal(step, profile, name, calls[0], readers[0])
            elif skipped:
                yield f"optimizer_in_backward cannot be used for `{name}`: {skipped}"

    def edits(self, step: Step, option: Option) -> Edit:
        """Return the edit that runs each update when its gradient is final, and then drops the gradient."""
        return joined(
            edit
            for seen in optimizer_calls(step)[option.where]
            for edit in (without_temporaries(step, seen), *_early(step, seen))
        )

    def apply(self, roots: Roots, technique: Technique) -> Handle:
        """Hook the parameters of the named optimizers, and make `step` skip the updated ones."""
        from torchtrim.techniques.optimizer_in_backward.running import EarlyUpdates

        backwards = technique.options.get("backwards")
        if not isinstance(backwards, int) or backwards < 1:
            takes = "one option, `backwards`, the number of backwards in a step"
            raise wrong_options(technique, takes)
        return all_or_none(
            technique.where,
            lambda where: EarlyUpdates(where, optimizer_at(roots, where), backwards),
        )


TECHNIQUE = OptimizerInBackward()


def _operators_by_gradient(profile: Profile) -> dict[int, list[int]]:
    touched: dict[int, list[int]] = {
        number: [] for number, s in enumerate(profile.storages) if s.kind == "gradient"
    }
    for index, op in enumerate(profile.operators):
        for number in {*(use.storage for use in op.inputs), *op.mutates}:
            if number in touched:
                touched[number].append(index)
    return touched


def _is_free(step: Step, seen: OptimizerCall, touched: Mapping[int, Sequence[int]]) -> bool:
    """Return True if the step creates the gradients, and only the optimizer's step reads final ones."""
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
    return not any(touched[number] for number in _old_gradients(step, seen))


def _read_after(seen: OptimizerCall, touched: Mapping[int, Sequence[int]]) -> Iterator[int]:
    return (
        index
        for update in seen.step.updates
        for index in touched.get(update.gradient, ())
        if 0 <= update.ready <= index < seen.step.first
    )


def _refusal(step: Step, profile: Profile, name: str, seen: OptimizerCall, reader: int) -> str:
    size = sum(step.tensors[update.gradient].bytes for update in seen.step.updates)
    total = sum(task.seconds for task in step.tasks)
    again = sum(task.seconds for task in step.tasks if task.phase in ("forward", "backward"))
    line = line_of(profile, reader)
    at = f" at {line.path}:{line.line}" if line.path else ""
    return (
        f"optimizer_in_backward cannot be used for `{name}`: `{profile.operators[reader].name}`{at} reads "
        f"gradients between backward and `step`, so all {format_bytes(size)} of them are kept. Clipping by "
        f"norm without keeping them would run forward and backward twice, {1000 * again:.3g} ms more a step "
        f"(+{100 * again / total:.0f} %), which is not supported. "
        "If you clip each parameter on its own in a hook, the technique can be used"
    )


def _early(step: Step, seen: OptimizerCall) -> Iterator[Edit]:
    """Yield the edit of each update, which claims the last accumulation of its gradient."""
    updates = seen.step.updates
    seconds = launches_seconds(step, seen, len(updates)) / len(updates) + _SECONDS_A_HOOK
    for number, update in enumerate(updates):
        gradient = step.tensors[update.gradient]
        size = gradient.bytes if gradient.pool == DEVICE else 0
        yield Edit(
            drops=drops_of(step, (update.gradient,)),
            needs=(Need(update.gradient, update.ready),),
            inserts=(Insert(update.ready, seconds, size + rise(step, seen, (number,))),),
            claims=(Span(update.ready - 1, update.ready),),
        )
    yield Edit(drops=drops_of(step, _old_gradients(step, seen)))


def _old_gradients(step: Step, seen: OptimizerCall) -> list[int]:
    """Return gradients of the previous step that are still alive when this one begins."""
    assert step.profile is not None
    storages = step.profile.storages
    names = {storages[update.gradient].name for update in seen.step.updates}
    return [
        number
        for number, s in enumerate(storages)
        if s.kind == "gradient" and s.birth < 0 and s.name in names
    ]
