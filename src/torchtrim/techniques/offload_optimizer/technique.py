"""Optimizer offload: the optimizer state is on the host, and is fetched in chunks during the step.

Adam's moments take twice the memory of the parameters, and only `step` reads them. They move to pinned host
memory. A step updates `chunk_bytes` of parameters at a time with the optimizer's own step on the device,
while the next chunk's state is fetched and the previous chunk's is written back. The arithmetic of each
element is unchanged: bitwise equal. The device holds the state of two chunks at most, none between steps.

The optimizer remains the user's own object: schedulers, clipping, accumulation, scalers, `zero_grad`,
closures and parameter groups added later work as before. `state_dict` returns the state on the host; a plain
optimizer can load it, and this one can load a plain one's. Code that reads `optimizer.state` between steps
waits for pending copies. Third-party optimizers and step hooks are refused.

If `--host-memory` leaves no room, or on a CPU, the state may be in memory-mapped files (`file`), which the
kernel writes to disk under memory pressure. They are scratch files: save the state with `state_dict`, as
usual. On a CPU the optimizer updates the mapped pages directly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from torchtrim.analysis.prices import device_of
from torchtrim.executor.places import optimizer_at, wrong_options
from torchtrim.executor.registry import Handle, Option, Roots, Settings, TechniqueUnit, all_or_none
from torchtrim.records.plan import Technique
from torchtrim.step.edits import DISK, FILE, PINNED, Block, Edit, Insert, drops_of, joined
from torchtrim.step.links import stall_in_parts
from torchtrim.step.optimizers import (
    OptimizerCall,
    chunked,
    launches_seconds,
    optimizer_calls,
    parameter_sizes,
    rise,
    without_temporaries,
)
from torchtrim.step.step import DEVICE, Step

_PARTS = (4, 16, 64)  # Arbitrary: numbers of chunks to offer, from few launches to little memory.
_LEAST_BYTES = 1024  # Smaller state tensors are step counts, which stay on the device.


class OffloadOptimizer(TechniqueUnit):
    """`where` names optimizers. `chunk_bytes`: bytes of parameters a chunk. `file`: state in mapped files."""

    name = "offload_optimizer"
    does = "keep optimizer state on the host, and fetch it in chunks"
    takes = ("chunk_bytes", "file")
    equivalence = "BITWISE"
    assumes = ("the optimizer has no step hooks",)

    def options(self, step: Step) -> Sequence[Option]:
        """Return several chunk sizes for every optimizer with state on a device."""
        if step.profile is None or step.profile.device.startswith("cpu"):
            return []
        return self._options(step, ())

    def to_files(self, step: Step) -> Sequence[Option]:
        """Return the same options with memory-mapped files, on a CPU too."""
        return self._options(step, (("file", True),))

    def _options(self, step: Step, more: Settings) -> Sequence[Option]:
        options = []
        for name, calls in optimizer_calls(step).items():
            if any(_states(step, seen) for seen in calls):
                total = max(sum(parameter_sizes(step, seen)) for seen in calls)
                spans = tuple(seen.span for seen in calls)
                for most in dict.fromkeys(max(total // parts, 1) for parts in _PARTS):
                    settings = (("chunk_bytes", most), *more)
                    options.append(Option(self.name, name, spans, None, settings))
        return options

    def edits(self, step: Step, option: Option) -> Edit | None:
        """Drop the state, except for two chunks during the optimizer's step."""
        settings = dict(option.settings)
        most, in_file = int(settings["chunk_bytes"]), bool(settings.get("file"))
        calls = optimizer_calls(step).get(option.where, [])
        return joined(_edit(step, seen, most, in_file) for seen in calls) if calls else None

    def apply(self, roots: Roots, technique: Technique) -> Handle:
        """Move the state to the host and replace the optimizers' `step`. Raises `ApplyFailed`."""
        from torchtrim.techniques.offload_optimizer.host_state import HostState

        most = technique.options.get("chunk_bytes")
        in_file = bool(technique.options.get("file"))

        if not isinstance(most, int) or most < 1:
            takes = "the options `chunk_bytes`, of parameters to update at a time, and `file`, true"
            raise wrong_options(technique, takes)
        return all_or_none(
            technique.where,
            lambda where: HostState(where, optimizer_at(roots, where), most, in_file=in_file),
        )


TECHNIQUE = OffloadOptimizer()


def _edit(step: Step, seen: OptimizerCall, most: int, in_file: bool) -> Edit:
    assert step.profile is not None
    on_cpu = step.profile.device.startswith("cpu")
    sizes = parameter_sizes(step, seen)
    chunks = chunked(seen.step.updates, sizes, most)
    parts = [sum(step.tensors[n].bytes for n in _of(step, seen, chunk)) for chunk in chunks]
    states = _states(step, seen)
    total = sum(step.tensors[number].bytes for number in states)
    # A chunk is updated while the state of the next one arrives.
    present = [0] * len(parts) if on_cpu else [*map(sum, pairwise([*parts, 0]))]
    highest = max(
        (rise(step, seen, c) + more for c, more in zip(chunks, present, strict=True)), default=0
    )
    link = min(device_of(step.profile).link, DISK if in_file else math.inf)
    own = sum(step.tasks[task].seconds for task in range(*seen.span))
    shares = (sum(sizes[update] for update in chunk) / max(sum(sizes), 1) for chunk in chunks)
    seconds = stall_in_parts([part / link for part in parts], [own * share for share in shares])
    seconds += launches_seconds(step, seen, len(chunks))
    if on_cpu:
        seconds = 2 * total / link + launches_seconds(step, seen, len(chunks))
    edit = without_temporaries(step, seen)
    return edit._replace(
        drops=(*edit.drops, *drops_of(step, states)),
        blocks=(Block(total, 0, len(step.tasks), FILE if in_file else PINNED),),
        inserts=(Insert(seen.span.first, seconds, highest),),
    )


def _states(step: Step, seen: OptimizerCall) -> list[int]:
    return _of(step, seen, range(len(seen.step.updates)))


def _of(step: Step, seen: OptimizerCall, chunk: Sequence[int]) -> list[int]:
    states = dict.fromkeys(n for update in chunk for n in seen.step.updates[update].states)
    tensors = step.tensors
    return [n for n in states if tensors[n].pool == DEVICE and tensors[n].bytes >= _LEAST_BYTES]
