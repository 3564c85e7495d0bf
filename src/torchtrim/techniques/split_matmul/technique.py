"""Split matmul: a module that treats each row independently runs some rows at a time.

An MLP computes hidden states four times as wide as its input and output, keeps them and their activation for
backward, and computes the gradients of both there: if a block is recomputed in backward, that sets the peak,
however many blocks there are. Here the module keeps only its input. Forward runs over the rows in `parts` and
writes each part's result into the whole; backward recomputes a part, computes its gradients, and accumulates
those of parameters, so hidden states exist for one part at a time. It costs the forward a second time, as
`recompute` does, and a few calls for each part.

Each row of the result is computed from the same row as before, but a product of fewer rows may add in another
order, and gradients of parameters are sums over parts. So it is planned only with `--allow rounding`.

It supports modules that were seen to take one tensor and return one, with only products with their own
parameters, pointwise operators and norms of rows in between: no random numbers, no BatchNorm, no hooks, and
no attention, whose rows interact. Calls without gradients run unchanged. `where` names modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torchtrim.executor.places import module_at, wrong_options
from torchtrim.executor.registry import Handle, Option, Roots, TechniqueUnit, all_or_none
from torchtrim.executor.row_edits import edit_of
from torchtrim.records.operator_names import base_name
from torchtrim.records.plan import Technique
from torchtrim.records.profile import Operator, Profile, TensorUse, is_contiguous
from torchtrim.records.remembered import remembered
from torchtrim.step.edits import Edit, joined_if_all
from torchtrim.step.index import recorded_index
from torchtrim.step.step import Span, Step, StepCall

_PARTS = 8  # Arbitrary; then hidden states take less than the input and output of an MLP.


class SplitMatmul(TechniqueUnit):
    """`where` names modules that treat each row independently. `parts`: the number of parts of the rows."""

    name = "split_matmul"
    does = "run some rows at a time"
    takes = ("parts",)
    equivalence = "ROUNDING"
    assumes = (
        "rerun rows have no hooks, draw no numbers and write no state",
        "each call runs the operators of the first, so that rows stay independent",
    )
    unseen = (
        "code that reruns writes no file, environment variable or extension state out of its source's sight",
        "nothing writes through `.data` between forward and backward",
    )

    def options(self, step: Step) -> Sequence[Option]:
        """Return the modules with independent rows that are wider inside than outside."""
        return [
            Option(self.name, where, spans, None, (("parts", _PARTS),))
            for where, spans in modules_of(step).items()
        ]

    def edits(self, step: Step, option: Option) -> Edit | None:
        """Return the edit that keeps tensors within a call for one part at a time."""
        parts = int(dict(option.settings)["parts"])
        return joined_if_all(edit_of(step, span, parts) for span in option.spans)

    def apply(self, roots: Roots, technique: Technique) -> Handle:
        """Give the modules a forward that runs in parts. Raises `ApplyFailed`."""
        from torchtrim.techniques.split_matmul.running import split

        parts = technique.options.get("parts")
        if type(parts) is not int or parts < 2 or len(technique.options) != 1:
            raise wrong_options(technique, "one option, `parts`, 2 or more")
        return all_or_none(
            technique.where, lambda where: split(where, module_at(roots, where), parts)
        )


TECHNIQUE = SplitMatmul()


Places = dict[str, tuple[Span, ...]]

_PRODUCTS = ("aten::mm", "aten::addmm")
_OF_ROWS = frozenset(
    f"aten::{name}"
    for name in (
        *("mm", "addmm", "linear", "view", "_unsafe_view", "reshape", "detach", "alias", "clone"),
        *("gelu", "relu", "silu", "tanh", "sigmoid", "mish", "elu", "leaky_relu", "hardswish"),
        *("hardtanh", "softplus", "mul", "add", "sub", "div", "pow", "neg", "exp", "square"),
        *("relu_", "silu_", "mul_", "add_", "hardtanh_", "hardswish_", "leaky_relu_", "sqrt"),
        *("rsqrt", "clamp", "clamp_min", "native_layer_norm", "_to_copy", "unsqueeze", "squeeze"),
    )
)
_TURNS = ("aten::t", "aten::transpose", "aten::permute")


def modules_of(step: Step) -> Places:
    """Return such modules with the tasks of each call; the outermost of several with the same calls."""
    return _modules_of(step.profile) if step.profile is not None else {}


@remembered
def _modules_of(profile: Profile) -> Places:
    calls = recorded_index(profile).graded_calls
    reader = _RowReader(profile)
    found: Places = {}
    for number, module in enumerate(profile.modules):
        spans = tuple(call.span for call in calls[number])
        if spans and spans not in found.values() and all(map(reader.by_rows, calls[number])):
            found[module.path] = spans
    return found


class _RowReader:
    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._once = [m.path for m in profile.modules if m.hooked or m.writes]
        # The program's own checkpoints: a reentrant one cannot run under `torch.autograd.grad`.
        rerun = {op.module for op in profile.operators if op.phase == "recompute"}
        self._once += [profile.modules[number].path for number in rerun if number >= 0]

    def by_rows(self, call: StepCall) -> bool:
        """Return True if a call has one input and one output, a wider product, and independent rows."""
        path = self._profile.modules[call.module].path
        ops = self._profile.operators[call.span.first : call.span.last]
        outer = {*call.inputs, *call.outputs}
        if len(call.inputs) != 1 or len(call.outputs) != 1 or len(outer) != 2:
            return False
        if any(f"{one}.".startswith(f"{path}.") for one in self._once):
            return False
        given = _first_use(ops, call.inputs[0])
        made = _first_use(ops, call.outputs[0])
        if given is None or made is None or not made.shape:
            return False
        if len(given.shape) < 2 or not is_contiguous(given.shape, given.strides):
            return False
        products = [op for op in ops if base_name(op.name) in _PRODUCTS]
        wide = max((use.shape[-1] for op in products for use in op.outputs), default=0)
        return wide > max(given.shape[-1], made.shape[-1]) and all(
            self._keeps_apart(op, _rows(given), call) for op in ops
        )

    def _keeps_apart(self, op: Operator, rows: int, call: StepCall) -> bool:
        name = base_name(op.name)
        if op.random or op.phase != "forward":
            return False
        own = [use for use in (*op.inputs, *op.outputs) if not self._is_state(use)]
        if name in _TURNS:
            return not own
        if name not in _OF_ROWS or any(self._is_outside(use, call) for use in own):
            return False
        if any(self._profile.storages[n].birth < call.span.first for n in op.mutates):
            return False
        if any(_rows(use) != rows for use in own):
            return False
        return name in _PRODUCTS or all(_rows(use) == 1 for use in op.inputs if self._is_state(use))

    def _is_state(self, use: TensorUse) -> bool:
        return self._profile.storages[use.storage].kind == "parameter"

    def _is_outside(self, use: TensorUse, call: StepCall) -> bool:
        """Return True for a tensor that is neither the input nor created within the call."""
        birth = self._profile.storages[use.storage].birth
        return use.storage not in call.inputs and not call.span.first <= birth < call.span.last


def _rows(use: TensorUse) -> int:
    return prod(use.shape[:-1])


def _first_use(ops: tuple[Operator, ...] | list[Operator], storage: int) -> TensorUse | None:
    uses = (use for op in ops for use in (*op.inputs, *op.outputs))
    return next((use for use in uses if use.storage == storage), None)
