"""Offload of the optimizer: its state is on the host, and comes over in parts while it steps.

The moments of Adam take twice what the parameters take, and nothing but `step` needs them. Here they lie in
pinned memory of the host. A step takes `chunk_bytes` of parameters at a time: the state of the next ones is
fetched and that of the last ones is written back while these are updated, by the optimizer's own step on
the device. Every element goes through the same arithmetic, so every bit stays. State of two parts is on the
device at most, and none of it between steps.

The optimizer stays the user's own object: schedulers, clipping, accumulation, scalers, `zero_grad`,
parameter groups that are added later and closures are as before. `state_dict` gives the state as it is, on
the host; a plain optimizer loads it, and this one loads a plain one's. Whoever reads `optimizer.state`
between steps waits until it has been written back. Optimizers that are not torch's own, and step hooks, are
refused.

Where `--host-memory` leaves no room, or on a CPU, the state may be in memory-mapped files (`file`),
which the kernel writes to a disk as it needs memory. They are scratch: what has to outlive the process is
saved with `state_dict`, as without them. On a CPU the optimizer updates the files' pages themselves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torchtrim.analysis.prices import device_of
from torchtrim.errors import ApplyFailed
from torchtrim.executor.places import optimizer_at
from torchtrim.executor.registry import Handle, Option, Settings, all_or_none
from torchtrim.records.finding import Equivalence
from torchtrim.records.plan import Technique
from torchtrim.step.edits import Block, Drop, Edit, Insert, joined
from torchtrim.step.host import DISK, FILE, PINNED
from torchtrim.step.links import stall_in_parts
from torchtrim.step.optimizers import Seen, chunked, launches_seconds, rise, seen_of, without
from torchtrim.step.step import DEVICE, Step

_PARTS = (4, 16, 64)
_LEAST_BYTES = 1024
"""Below that a tensor of the state is a count of steps, which stays."""


class OffloadOptimizer:
    """`where` names optimizers (`AdamW`, a second one `AdamW#2`). `chunk_bytes`: of parameters, at a time.

    `file`: in memory-mapped files.
    """

    name = "offload_optimizer"
    takes = ("chunk_bytes", "file")
    equivalence: Equivalence = "BITWISE"

    def options(self, step: Step) -> Sequence[Option]:
        """Parts of several sizes, for every optimizer that has state on a device."""
        if step.profile is None or step.profile.device.startswith("cpu"):
            return []
        return self._options(step, ())

    def to_files(self, step: Step) -> Sequence[Option]:
        """The same in memory-mapped files, also where the device is a CPU."""
        return self._options(step, (("file", True),))

    def _options(self, step: Step, more: Settings) -> Sequence[Option]:
        found = []
        for name, calls in seen_of(step).items():
            if any(_states(step, seen) for seen in calls):
                total = max(sum(_sizes(step, seen)) for seen in calls)
                spans = tuple(seen.span for seen in calls)
                for most in dict.fromkeys(max(total // parts, 1) for parts in _PARTS):
                    settings = (("chunk_bytes", most), *more)
                    found.append(Option(self.name, name, spans, None, settings))
        return found

    def edits(self, step: Step, option: Option) -> Edit | None:
        """State is gone but for two parts of it, while the optimizer steps."""
        settings = dict(option.settings)
        most, in_file = int(settings["chunk_bytes"]), bool(settings.get("file"))
        calls = seen_of(step).get(option.where, [])
        return joined(_edit(step, seen, most, in_file) for seen in calls) if calls else None

    def apply(self, roots: Mapping[str, Any], technique: Technique) -> Handle:
        """Move the state, and give the optimizers a `step` that fetches it. Raises `ApplyFailed`."""
        from torchtrim.techniques.offload_optimizer.host_state import HostState

        most = technique.options.get("chunk_bytes")
        in_file = bool(technique.options.get("file"))

        def moved(where: str) -> HostState:
            if not isinstance(most, int) or most < 1:
                raise ApplyFailed(
                    f"`{where}`: offload_optimizer needs `chunk_bytes`, how many bytes of parameters are "
                    f"updated at a time, and the plan has {most!r}. Plan again."
                )
            return HostState(where, optimizer_at(roots, where), most, in_file=in_file)

        return all_or_none(technique.where, moved)


TECHNIQUE = OffloadOptimizer()


def _edit(step: Step, seen: Seen, most: int, in_file: bool) -> Edit:
    assert step.profile is not None
    on_cpu = step.profile.device.startswith("cpu")
    sizes = _sizes(step, seen)
    chunks = chunked(seen.step.updates, sizes, most)
    parts = [sum(step.tensors[n].bytes for n in _of(step, seen, chunk)) for chunk in chunks]
    states = _states(step, seen)
    total = sum(step.tensors[number].bytes for number in states)
    highest = max((rise(step, seen, chunk) for chunk in chunks), default=0)
    two = max((a + b for a, b in zip(parts, [*parts[1:], 0], strict=True)), default=0)
    link = min(device_of(step.profile).link, DISK if in_file else math.inf)
    own = sum(step.tasks[task].seconds for task in range(*seen.span))
    shares = (sum(sizes[update] for update in chunk) / max(sum(sizes), 1) for chunk in chunks)
    seconds = stall_in_parts([part / link for part in parts], [own * share for share in shares])
    seconds += launches_seconds(step, seen, len(chunks))
    if on_cpu:
        two, seconds = 0, 2 * total / link + launches_seconds(step, seen, len(chunks))
    edit = without(step, seen)
    return edit._replace(
        drops=(*edit.drops, *(d for number in states for d in _drops(step, number))),
        blocks=(Block(total, 0, len(step.tasks), FILE if in_file else PINNED),),
        inserts=(Insert(seen.span.first, seconds, highest + two),),
    )


def _states(step: Step, seen: Seen) -> list[int]:
    """The tensors of the state that are worth it."""
    return _of(step, seen, range(len(seen.step.updates)))


def _of(step: Step, seen: Seen, chunk: Sequence[int]) -> list[int]:
    states = (number for update in chunk for number in seen.step.updates[update].states)
    found = dict.fromkeys(states)
    return [
        number
        for number in found
        if step.tensors[number].pool == DEVICE and step.tensors[number].bytes >= _LEAST_BYTES
    ]


def _drops(step: Step, number: int) -> list[Drop]:
    return [Drop(number, hold) for hold in range(len(step.tensors[number].holds))]


def _sizes(step: Step, seen: Seen) -> list[int]:
    return [step.tensors[update.parameter].bytes for update in seen.step.updates]
