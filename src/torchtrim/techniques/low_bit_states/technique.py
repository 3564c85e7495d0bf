"""Low-bit states: the moments of Adam are kept in 8 bits or in bfloat16.

The two moments of Adam take twice what the parameters take. Here they lie between steps in fewer bits, by
[torchao](https://github.com/pytorch/ao)'s arithmetic (`pip install "torchtrim[torchao]"`):

* `states = "8bit"`: codes of one byte of a map that is fine near zero, with a scale for each 256 elements
  (Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization"): a quarter and 1/64. These are the
  codes that `torchao.optim.AdamW8bit` keeps. As there, a state of fewer than 4,096 elements, or of a
  number that 256 does not divide, stays as it is.
* `states = "bf16"`: bfloat16, a half. It is rounded at random, up or down by how near each is: rounded to
  the nearest, a second moment would not move any more, since a step changes it by less than bfloat16 can
  tell. torchao has that rounding, and no optimizer that keeps bfloat16 states for float32 parameters.
  The noise is drawn from the number of the step and of the parameter, so the program's own random numbers
  stay as they are.

The optimizer stays the user's own object and its own step computes, in the type that it has: one parameter
at a time its state is widened, updated and narrowed again. So schedulers, groups, clipping, accumulation,
scalers, closures and `fused` are as before. torchao's own optimizers are other objects, whose learning
rate has to be a tensor and whose step is compiled for each shape. It costs time in each step, most on a CPU.

`state_dict` gives the states widened, on the host, and beside them the narrow ones: a plain optimizer
loads that, and this one goes on to the bit. One of a plain optimizer is narrowed when it is loaded.
Reverting widens: a rounded value stays rounded.

It is another function: the certificate says AS ASKED where all else is as with the states narrowed by hand
after each step, with the losses of both. Adam and AdamW alone: others have no counterpart in torchao. 4 bits
and 8-bit floats, which torchao has too, are not offered. `where` names optimizers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torchtrim.errors import ApplyFailed
from torchtrim.executor.places import optimizer_at
from torchtrim.executor.registry import Handle, Option, all_or_none
from torchtrim.records.finding import Equivalence
from torchtrim.records.plan import Technique
from torchtrim.records.profile import Profile
from torchtrim.step.optimizers import Seen, seen_of
from torchtrim.step.step import Step
from torchtrim.techniques.low_bit_states.sizes import narrow_bytes

COUNTERPARTS = ("torch.optim.adam.Adam", "torch.optim.adamw.AdamW")
_ALONE = ("plain_optimizer", "optimizer_in_backward", "offload_optimizer")


class LowBitStates:
    """`where` names optimizers (`AdamW`, a second one `AdamW#2`). `states`: `8bit` or `bf16`."""

    name = "low_bit_states"
    takes = ("states",)
    equivalence: Equivalence = "SEMANTIC"
    helps: tuple[str, ...] = ()
    ways = 2

    def options(self, step: Step) -> Sequence[Option]:
        """Each Adam with states that would take fewer bytes, both ways."""
        return [
            Option(self.name, name, tuple(seen.span for seen in calls), None, (("states", states),))
            for states in ("8bit", "bf16")
            for name, calls in seen_of(step).items()
            if step.profile is not None and _saves(step.profile, calls, states)
        ]

    def edits(self, step: Step, option: Option) -> None:
        """None: what it saves is measured."""

    def apply(self, roots: Mapping[str, Any], technique: Technique) -> Handle:
        """Narrow the states, and give the optimizers a `step` that widens them. Raises `ApplyFailed`."""
        from torchtrim.techniques.low_bit_states.states import NarrowStates

        return self._changed(roots, technique, NarrowStates)

    def by_hand(self, roots: Mapping[str, Any], technique: Technique) -> Handle:
        """Step hooks that widen all states before the step and narrow them after it."""
        from torchtrim.techniques.low_bit_states.states import NarrowedByHand

        return self._changed(roots, technique, NarrowedByHand)

    def bars(self, technique: Technique) -> Collection[str]:
        """What runs the optimizer's step otherwise."""
        return _ALONE

    def advice(self, technique: Technique) -> str:
        """What to look at."""
        return "compare the losses of a longer run before you keep low-bit states"

    def _changed(self, roots: Mapping[str, Any], technique: Technique, change: Any) -> Handle:
        from torchtrim.techniques.low_bit_states.states import form_of

        form = form_of(technique.options)
        return all_or_none(
            technique.where, lambda where: change(where, _adam_at(roots, where), form)
        )


TECHNIQUE = LowBitStates()


def _saves(profile: Profile, calls: Sequence[Seen], states: str) -> bool:
    if any(seen.step.type not in COUNTERPARTS for seen in calls):
        return False
    numbers = {n for seen in calls for one in seen.step.updates for n in one.states}
    sizes = [profile.storages[number].bytes for number in numbers]
    return any(narrow_bytes(size // 4, 4, states) < size for size in sizes)


def _adam_at(roots: Mapping[str, Any], where: str) -> Any:
    optimizer = optimizer_at(roots, where)
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if kind not in COUNTERPARTS:
        raise ApplyFailed(
            f"`{where}` is a {kind}, and torchao has low-bit states for Adam and AdamW alone. Use one of "
            "these, or take low_bit_states out of the plan."
        )
    return optimizer
