"""Precision: forward computes in half precision, or keeps its saved tensors in half precision.

* `of = "compute"`: the forward of a root runs under `torch.autocast`, as with `with torch.autocast(...)`
  around the call: matrix products, convolutions and attention in `bfloat16`, operators that need the range in
  float32. Parameters, gradients and optimizer state stay float32, and so do results, which are cast back. A
  loss outside of the module is computed in float32. It saves most of the activations, adds a copy of the
  weights for as long as backward needs them, and is fast on devices with units for it: every NVIDIA GPU since
  Ampere, and CPUs with AMX or AVX512-BF16. Other CPUs are slower with it.
* `of = "saved"`: forward computes the same results as before, but autograd's saved tensors of float32
  activations are kept as bfloat16, so gradients are those of rounded activations. It halves the saved bytes,
  unless the original is kept for another reason, and costs two copies of each. Parameters and the inputs of
  the root are saved unchanged. A plan with it can change optimizers, but nothing else that saves activations.

With `dtype = "float16"`, for GPUs before Ampere, a script must scale its loss (`torch.amp.GradScaler`), or
small gradients vanish. It is never planned, but may be written into a plan or pinned if the script scales.
Calls without gradients, such as evaluation, run unchanged. The step computes a different function: the
certificate says AS ASKED if everything else equals the program with this change made by hand, and shows the
losses of both. Copies of a root compute as it does, and so does what `torch.compile` makes of it; pickles
and exports of it have the original's precision, as evaluation has, so that they run anywhere. `where` names
roots.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torchtrim.errors import ApplyFailed
from torchtrim.executor.places import module_at, root_of, wrong_options
from torchtrim.executor.registry import Handle, MeasuredTechnique, Option, Roots, all_or_none, names
from torchtrim.records.plan import Technique
from torchtrim.step.index import graded_roots
from torchtrim.step.step import Span, Step

_HALVES = ("bfloat16", "float16")
_WITH_SAVED = ("plain_optimizer", "optimizer_in_backward", "offload_optimizer", "low_bit_states")
_LEAST_BYTES = (
    2**12
)  # Smaller float32 tensors, such as a loss, do not show what a root computes in.


class Precision(MeasuredTechnique):
    """`where` names roots. `of`: `compute` or `saved`; `dtype`: `bfloat16` or `float16`."""

    name = "precision"
    does = "compute in half precision"
    takes = ("of", "dtype")
    equivalence = "SEMANTIC"
    ways = 2

    def options(self, step: Step) -> Sequence[Option]:
        """Return each root that computes in float32, with both settings of `of`."""
        return [
            Option(self.name, where, spans, None, (("of", of), ("dtype", "bfloat16")))
            for of in ("compute", "saved")
            for where, spans in _roots(step).items()
        ]

    def apply(self, roots: Roots, technique: Technique) -> Handle:
        """Replace the forward of the roots. Raises `ApplyFailed` and leaves the model unchanged."""
        from torchtrim.executor.half_precision import AutocastForward, NarrowSaved, lowered

        chosen = AutocastForward if _scope(technique) == "compute" else NarrowSaved
        return _changed(roots, technique, lambda module, dtype: lowered(module, chosen, dtype))

    def by_hand(self, roots: Roots, technique: Technique) -> Handle:
        """Write `with torch.autocast(...)` around the call, or plain hooks on saved tensors."""
        from torchtrim.executor.half_precision import autocast_by_hand, narrow_by_hand

        written = autocast_by_hand if _scope(technique) == "compute" else narrow_by_hand
        return _changed(roots, technique, written)

    def bars(self, technique: Technique) -> Collection[str]:
        """Return, for `saved`, the techniques that keep, drop or recompute saved tensors."""
        if _scope(technique) == "compute":
            return ()
        return [name for name in names() if name not in (*_WITH_SAVED, self.name)]

    def advice(self, technique: Technique) -> str:
        """Return a note on loss scaling for float16."""
        half = technique.options.get("dtype") == "float16"
        return "float16 needs a GradScaler in the script" if half else ""


TECHNIQUE = Precision()


def _changed(roots: Roots, technique: Technique, change: Any) -> Handle:
    dtype = technique.options.get("dtype")
    if dtype not in _HALVES or not {*technique.options} <= {"of", "dtype"}:
        takes = f"the options `of` and `dtype`, one of {', '.join(_HALVES)}"
        raise wrong_options(technique, takes)
    return all_or_none(technique.where, lambda where: change(module_at(roots, where), dtype))


def _scope(technique: Technique) -> str:
    scope = technique.options.get("of")
    if scope not in ("compute", "saved"):
        raise ApplyFailed(
            f"`of` must be `compute` or `saved`, but the plan has {scope!r}. Change it in the plan."
        )
    return str(scope)


def _roots(step: Step) -> dict[str, tuple[Span, ...]]:
    """Return the roots with parameters whose calls with gradients compute in float32, with their spans."""
    modules = step.profile.modules if step.profile is not None else ()
    with_parameters = {root_of(module.path) for module in modules if module.parameter_bytes}
    roots = graded_roots(step, lambda span: _computes_in_float32(step, span))
    return {path: spans for path, spans in roots.items() if path in with_parameters}


def _computes_in_float32(step: Step, span: Span) -> bool:
    uses = [use for i in range(*span) for use in step.operators[i].outputs]
    if any(use.dtype in _HALVES for use in uses):
        return False
    large = (use.storage for use in uses if use.dtype == "float32")
    return any(step.tensors[n].bytes >= _LEAST_BYTES for n in large)
