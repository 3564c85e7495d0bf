"""Split channels: BatchNorm, and channelwise modules after it, run some channels at a time.

BatchNorm computes mean and variance of each channel independently, and ReLU, pooling and upsampling treat
each channel independently too. In PyTorch, backward has the norm's input, the incoming gradient and the
outgoing one alive together, each as large as the layer, in addition to the saved tensors of an activation or
a pooling; in convolutional networks that often sets the peak. Here only the norm's input is kept. Forward
runs over the channels in `parts`; backward recomputes each part and computes its gradients.

With `overwrites` the gradient of a part overwrites that part of the input, so two such tensors are alive
instead of three. It is planned only if nothing but this backward was seen to read the input again, as with
the output of a convolution. If a later step saves that input for another backward too, autograd raises.

On a CPU the result is identical, bit for bit: every sum is over one channel, and running statistics are
updated once. Kernels choose the order of their sums by the memory layout; so if a gradient has another layout
than the result, backward runs over all channels at once. On other devices a kernel may depend on the number
of channels, and the technique is ROUNDING. Calls without gradients, in evaluation, or with one position per
channel run unchanged. `where` names a BatchNorm, or a range of a Sequential that begins with one.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchtrim.executor.places import part_at, wrong_options
from torchtrim.executor.registry import Handle, Option, Roots, TechniqueUnit, all_or_none
from torchtrim.executor.row_edits import edit_of
from torchtrim.records.finding import Equivalence
from torchtrim.records.plan import Technique
from torchtrim.step.edits import Edit, joined_if_all
from torchtrim.step.step import Step
from torchtrim.techniques.split_channels.places import parts_of, places_of

_PARTS = 8  # Arbitrary; then parts take little memory beside the layer itself.
_SETTINGS = ("overwrites", "parts")


class SplitChannels(TechniqueUnit):
    """`where` names BatchNorms, and ranges that begin with one. `parts`: the parts of the channels."""

    name = "split_channels"
    does = "run some channels at a time"
    takes = _SETTINGS
    equivalence = "BITWISE"
    assumes = (
        "no hooks in a range that runs some channels at a time",
        "nothing else holds overwritten inputs",
    )
    unseen = ("nothing writes through `.data` between forward and backward",)

    def options(self, step: Step) -> Sequence[Option]:
        """Return the places with independent channels that would keep or allocate less."""
        on_cpu = step.profile is not None and step.profile.device.startswith("cpu")
        equivalence: Equivalence = "BITWISE" if on_cpu else "ROUNDING"
        return [
            Option(
                *(self.name, place.where, place.spans, None),
                (("overwrites", place.overwrites), ("parts", _PARTS)),
                equivalence,
            )
            for place in places_of(step)
        ]

    def edits(self, step: Step, option: Option) -> Edit | None:
        """Return the edit that keeps tensors within a call for one of several parts at a time."""
        settings = dict(option.settings)
        over, wanted = bool(settings["overwrites"]), int(settings["parts"])
        several = [(span, parts_of(step, span, wanted)) for span in option.spans]
        return joined_if_all(
            edit_of(step, span, parts, copies=True, over=over) if parts > 1 else None
            for span, parts in several
        )

    def apply(self, roots: Roots, technique: Technique) -> Handle:
        """Give the places a forward that runs in parts. Raises `ApplyFailed`."""
        from torchtrim.techniques.split_channels.running import split

        parts, over = (technique.options.get(name) for name in ("parts", "overwrites"))
        known = sorted(technique.options) == list(_SETTINGS)
        if not known or type(parts) is not int or parts < 2 or type(over) is not bool:
            takes = "the options `parts`, 2 or more, and `overwrites`, true or false"
            raise wrong_options(technique, takes)
        return all_or_none(
            technique.where,
            lambda where: split(where, part_at(roots, where), parts, overwrites=over),
        )


TECHNIQUE = SplitChannels()
