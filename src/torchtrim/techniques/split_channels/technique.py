"""Split channels: BatchNorm, and what follows it channel by channel, runs some channels at a time.

BatchNorm takes mean and variance of each channel by itself, and ReLU, pooling and upsampling treat each
channel by itself too. As PyTorch runs them, backward has the norm's input, the gradient that comes and the
one that it makes there together, each as large as the layer, beside what an activation or a pooling saved;
in networks of convolutions that often sets the peak. Here they keep the norm's input alone. Forward goes
through the channels in `parts`; backward runs a part again, takes its gradients, and goes on to the next.

With `overwrites` the gradient of a part is written over that part of the input, so two such tensors are
there instead of three. It is planned only where nothing but this backward was seen to look at the input
again, as at the result of a convolution. Where a later step saves that input for another backward too,
autograd raises, as it does for all that was overwritten.

On a CPU the result is the same bit for bit: every sum is of one channel, and running statistics are written
once. Kernels choose how they sum by the order in memory; so where a gradient has another than the result
does, backward goes through all channels at once. On other devices a kernel may depend on how many channels
there are, and it is ROUNDING. Calls without gradients, those in evaluation, and those with one place a
channel run as they are. `where` names a BatchNorm, or a range of a Sequential that begins with one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torchtrim.errors import ApplyFailed
from torchtrim.executor.places import part_at
from torchtrim.executor.registry import Handle, Option, Settings, all_or_none
from torchtrim.executor.row_edits import edit_of
from torchtrim.records.finding import Equivalence
from torchtrim.records.plan import Technique
from torchtrim.step.edits import Edit, joined
from torchtrim.step.step import Step
from torchtrim.techniques.split_channels.found import parts_of, places_of

if TYPE_CHECKING:
    from torch import nn

_PARTS = 8
_SETTINGS = ("overwrites", "parts")


class SplitChannels:
    """`where` names BatchNorms, and ranges that begin with one. `parts`: how many there are of the channels;
    `overwrites`: whether the gradient is written over the input."""

    name = "split_channels"
    takes = _SETTINGS
    equivalence: Equivalence = "BITWISE"

    def options(self, step: Step) -> Sequence[Option]:
        """The places at which channels are apart, and less would be kept or made."""
        equivalence = _equivalence(step)
        return [
            Option(self.name, where, spans, None, _settings(overwrites), equivalence)
            for where, spans, overwrites in places_of(step)
        ]

    def edits(self, step: Step, option: Option) -> Edit | None:
        """What is within a call is there for a part at a time; None where there is one part only."""
        settings = dict(option.settings)
        over, wanted = bool(settings["overwrites"]), int(settings["parts"])
        several = [(span, parts_of(step, span, wanted)) for span in option.spans]
        edits = [
            edit_of(step, span, parts, copies=True, over=over)
            for span, parts in several
            if parts > 1
        ]
        found = [edit for edit in edits if edit is not None]
        return joined(found) if len(found) == len(option.spans) and found else None

    def apply(self, roots: Mapping[str, nn.Module], technique: Technique) -> Handle:
        """Give the places a forward that runs in parts. Raises `ApplyFailed`, the model as it was."""
        from torchtrim.techniques.split_channels.running import split

        parts, over = (technique.options.get(name) for name in ("parts", "overwrites"))
        known = sorted(technique.options) == list(_SETTINGS)
        if not known or type(parts) is not int or parts < 2 or type(over) is not bool:
            raise ApplyFailed(
                "split_channels has the options `parts`, 2 or more, and `overwrites`, true or false, and the "
                f"plan has {technique.options!r}."
            )
        return all_or_none(
            technique.where,
            lambda where: split(where, part_at(roots, where), parts, overwrites=over),
        )


TECHNIQUE = SplitChannels()


def _equivalence(step: Step) -> Equivalence:
    on_cpu = step.profile is not None and step.profile.device.startswith("cpu")
    return "BITWISE" if on_cpu else "ROUNDING"


def _settings(overwrites: bool) -> Settings:
    return (("overwrites", overwrites), ("parts", _PARTS))
