"""Precision: forward computes in half precision, or what it saves for backward is kept so.

* `of = "compute"`: the forward of a root runs under `torch.autocast`, as with `with torch.autocast(...)`
  around the call: matrix products, convolutions and attention in `bfloat16`, what needs the range in
  float32. Parameters, gradients and optimizer state stay float32, and so do results, which are cast back. A
  loss outside of the module is computed in float32. It saves most of the activations, adds a copy of the
  weights for as long as backward needs them, and is quick where the device has units for it: every NVIDIA
  GPU since Ampere, CPUs with AMX or AVX512-BF16; other CPUs are slower with it than without.
* `of = "saved"`: forward computes as before and gives the same, but what autograd saves of float32
  activations is kept as bfloat16, so gradients are those of rounded activations. It halves the saved bytes,
  where the original is not kept for another reason, and costs two copies of each. Parameters and the inputs
  of the root are saved as they are. A plan with it can change optimizers, and nothing else that saves
  activations.

With `dtype = "float16"`, for GPUs before Ampere, a script has to scale its loss (`torch.amp.GradScaler`),
else small gradients vanish; it is never planned, but may be written into a plan or pinned where the script
scales. Calls without gradients, such as those of evaluation, run as they are. It is another function: the
certificate says AS ASKED where all else is as in the program with that written by hand, with the losses of
both.

`where` names roots.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchtrim.errors import ApplyFailed
from torchtrim.executor.places import module_at, root_of
from torchtrim.executor.registry import Handle, Option, all_or_none
from torchtrim.records.finding import Equivalence
from torchtrim.records.plan import Technique
from torchtrim.step.step import Span, Step

if TYPE_CHECKING:
    from torch import nn

_HALVES = ("bfloat16", "float16")
_WITH_SAVED = ("plain_optimizer", "optimizer_in_backward", "offload_optimizer", "low_bit_states")
_LEAST_BYTES = 2**12


class Precision:
    """`where` names roots. `of`: `compute` or `saved`; `dtype`: `bfloat16` or `float16`."""

    name = "precision"
    takes = ("of", "dtype")
    equivalence: Equivalence = "SEMANTIC"
    helps: tuple[str, ...] = ()
    ways = 2

    def options(self, step: Step) -> Sequence[Option]:
        """Each root that computes in float32, both ways."""
        return [
            Option(self.name, where, spans, None, (("of", of), ("dtype", "bfloat16")))
            for of in ("compute", "saved")
            for where, spans in _roots(step).items()
        ]

    def edits(self, step: Step, option: Option) -> None:
        """None: what it saves is measured."""

    def apply(self, roots: Mapping[str, nn.Module], technique: Technique) -> Handle:
        """Give the roots another forward. Raises `ApplyFailed`, the model as it was."""
        from torchtrim.executor.half_precision import Autocast, NarrowSaved, lowered

        chosen = Autocast if _of(technique) == "compute" else NarrowSaved
        return _changed(
            roots, technique, lambda module, dtype: lowered(module, chosen(module, dtype))
        )

    def by_hand(self, roots: Mapping[str, Any], technique: Technique) -> Handle:
        """`with torch.autocast(...)` around the call, or hooks on saved tensors, without more ado."""
        from torchtrim.executor.half_precision import autocast_by_hand, narrow_by_hand

        written = autocast_by_hand if _of(technique) == "compute" else narrow_by_hand
        return _changed(roots, technique, written)

    def bars(self, technique: Technique) -> Collection[str]:
        """With `saved` whatever keeps, drops or makes again what autograd saves."""
        from torchtrim.executor.registry import names

        if _of(technique) == "compute":
            return ()
        return [name for name in names() if name not in (*_WITH_SAVED, self.name)]

    def advice(self, technique: Technique) -> str:
        """A scaler, where gradients would vanish."""
        half = technique.options.get("dtype") == "float16"
        return "float16 needs a GradScaler in the script" if half else ""


TECHNIQUE = Precision()


def _changed(roots: Mapping[str, Any], technique: Technique, change: Any) -> Handle:
    dtype = technique.options.get("dtype")
    if dtype not in _HALVES or not {*technique.options} <= {"of", "dtype"}:
        raise ApplyFailed(
            f"precision has the options `of` and `dtype`, one of {', '.join(_HALVES)}, and the plan has "
            f'{technique.options!r}. Write `dtype = "bfloat16"`, or plan again.'
        )
    return all_or_none(technique.where, lambda where: change(module_at(roots, where), dtype))


def _of(technique: Technique) -> str:
    found = technique.options.get("of")
    if found not in ("compute", "saved"):
        raise ApplyFailed(
            f"precision is of `compute` or of `saved`, and the plan has {found!r}. Write one of them."
        )
    return str(found)


def _roots(step: Step) -> dict[str, tuple[Span, ...]]:
    """The roots with parameters that are called with gradients and compute in float32, with the spans of
    their calls. A loss that is called by itself has none."""
    found: dict[str, tuple[Span, ...]] = {}
    owning = _owning(step)
    for call in step.calls:
        module = step.modules[call.module]
        is_root = module.parent < 0 and module.path in owning
        if is_root and call.graded and _is_wide(step, call.span):
            found[module.path] = (*found.get(module.path, ()), call.span)
    return found


def _owning(step: Step) -> set[str]:
    """The roots in which there are parameters."""
    modules = step.profile.modules if step.profile is not None else ()
    return {root_of(module.path) for module in modules if module.parameter_bytes}


def _is_wide(step: Step, span: Span) -> bool:
    """Whether it makes float32 for backward, and nothing in half precision: then someone lowers it
    already."""
    if step.profile is None:
        return False
    uses = [use for i in range(*span) for use in step.profile.operators[i].outputs]
    if any(use.dtype in _HALVES for use in uses):
        return False
    large = (use.storage for use in uses if use.dtype == "float32")
    return any(step.tensors[n].bytes >= _LEAST_BYTES for n in large)
