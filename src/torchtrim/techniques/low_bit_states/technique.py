"""Low-bit states: the moments of Adam are kept in 8 bits or in bfloat16.

The two moments of Adam take twice as many bytes as the parameters. Here they are stored between steps in
fewer bits, with [torchao](https://github.com/pytorch/ao)'s arithmetic (`pip install "torchtrim[torchao]"`):

* `states = "8bit"`: one-byte codes of a map that is fine near zero, with a scale for each 256 elements
  (Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization"): a quarter and 1/64 of the bytes.
  They are the codes of `torchao.optim.AdamW8bit`. As there, a state of fewer than 4,096 elements, or of a
  number that is not divisible by 256, stays in full precision.
* `states = "bf16"`: bfloat16, half of the bytes, with stochastic rounding. With rounding to nearest, a second
  moment would stop moving, since a step changes it by less than the resolution of bfloat16. The noise is
  drawn from the number of the step and of the parameter, so the program's own random numbers do not change.

The optimizer stays the user's own object, and its own step computes in its usual type: one parameter at a
time, its state is widened, updated and narrowed again. So schedulers, groups, clipping, accumulation,
scalers, closures and `fused` work as before; torchao's own optimizers need a tensor as learning rate, and
compile a step for each shape. The technique costs time in each step, most on a CPU.

`state_dict` returns the states widened, on the host, together with the narrow ones: a plain optimizer loads
the former, and this one resumes bit for bit. A plain optimizer's `state_dict` is narrowed on load. Reverting
widens: a rounded value stays rounded.

The step computes a different function: the certificate says AS ASKED if everything else equals a run with
states narrowed by hand after each step, and shows the losses of both. torchao supports only Adam and AdamW;
its 4-bit and 8-bit float formats are not offered. `where` names optimizers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from torchtrim.errors import ApplyFailed
from torchtrim.executor.places import optimizer_at
from torchtrim.executor.registry import Handle, MeasuredTechnique, Option, Roots, all_or_none
from torchtrim.records.plan import Technique
from torchtrim.records.profile import Profile
from torchtrim.step.optimizers import OptimizerCall, optimizer_calls
from torchtrim.step.step import Step
from torchtrim.techniques.low_bit_states import narrow_bytes

COUNTERPARTS = ("torch.optim.adam.Adam", "torch.optim.adamw.AdamW")
_ALONE = ("plain_optimizer", "optimizer_in_backward", "offload_optimizer")


class LowBitStates(MeasuredTechnique):
    """`where` names optimizers (`AdamW`, a second one `AdamW#2`). `states`: `8bit` or `bf16`."""

    name = "low_bit_states"
    does = "keep Adam's moments in fewer bits"
    takes = ("states",)
    equivalence = "SEMANTIC"
    assumes = ("the optimizer has no step hooks",)
    ways = 2

    def options(self, step: Step) -> Sequence[Option]:
        """Return each Adam whose states would take fewer bytes, in both formats."""
        return [
            Option(self.name, name, tuple(seen.span for seen in calls), None, (("states", states),))
            for states in ("8bit", "bf16")
            for name, calls in optimizer_calls(step).items()
            if step.profile is not None and _saves(step.profile, calls, states)
        ]

    def apply(self, roots: Roots, technique: Technique) -> Handle:
        """Narrow the states, and give the optimizers a `step` that widens them. Raises `ApplyFailed`."""
        from torchtrim.techniques.low_bit_states.states import NarrowStates

        return self._changed(roots, technique, NarrowStates)

    def by_hand(self, roots: Roots, technique: Technique) -> Handle:
        """Register step hooks that widen all states before the step and narrow them after it."""
        from torchtrim.techniques.low_bit_states.states import NarrowedByHand

        return self._changed(roots, technique, NarrowedByHand)

    def bars(self, technique: Technique) -> Collection[str]:
        """Return the techniques that run the optimizer's step in another way."""
        return _ALONE

    def advice(self, technique: Technique) -> str:
        """Return what to check."""
        return "compare the losses of a longer run before you keep low-bit states"

    def _changed(self, roots: Roots, technique: Technique, change: Any) -> Handle:
        from torchtrim.techniques.low_bit_states.states import format_of

        form = format_of(technique.options)
        return all_or_none(
            technique.where, lambda where: change(where, _adam_at(roots, where), form)
        )


TECHNIQUE = LowBitStates()


def _saves(profile: Profile, calls: Sequence[OptimizerCall], states: str) -> bool:
    if any(seen.step.type not in COUNTERPARTS for seen in calls):
        return False
    numbers = {n for seen in calls for one in seen.step.updates for n in one.states}
    sizes = [profile.storages[number].bytes for number in numbers]
    return any(narrow_bytes(size // 4, 4, states) < size for size in sizes)


def _adam_at(roots: Roots, where: str) -> Any:
    optimizer = optimizer_at(roots, where)
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if kind not in COUNTERPARTS:
        raise ApplyFailed(
            f"`{where}` is a {kind}, but torchao has low-bit states only for Adam and AdamW. Use one of "
            "these, or remove low_bit_states from the plan."
        )
    return optimizer
