"""A profile -> the step that it recorded, with its recorded times or its times on a named device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from torchtrim.costs.devices import DeviceSpec
from torchtrim.costs.roofline import estimate
from torchtrim.costs.syncs import price_syncs
from torchtrim.records.profile import ALWAYS, Operator, Profile, SavedTensor, Storage
from torchtrim.records.remembered import remembered
from torchtrim.step.step import OVERHEAD, Hold, Span, Step, StepCall, StepModule, Task, Tensor

_BACKWARD = ("backward", "recompute")


@remembered
def step_of(profile: Profile, seconds: float | None = None) -> Step:
    """Return the recorded step. `seconds`: its time without a recorder, if measured."""
    state = OVERHEAD.random_state if profile.device.startswith("cpu") else 0
    overhead = OVERHEAD._replace(random_state=state)
    if (own := profile.overheads) is not None:
        overhead = overhead._replace(
            task=own.operator, span=own.part, recipe=own.tensor, watched=own.watched
        )
    return Step(
        tasks=tuple(map(_task, profile.operators)),
        tensors=_Tensors(profile).all(),
        modules=tuple(
            StepModule(
                *(m.path, m.type, m.parent, m.chain, m.hooked, m.writes, m.hooked_with_all),
                *(m.rereads, m.appends),
            )
            for m in profile.modules
        ),
        calls=tuple(
            StepCall(c.module, Span(c.first, c.last), c.inputs, c.outputs, c.graded, c.held)
            for c in profile.calls
        ),
        seconds=profile.step_seconds if seconds is None else seconds,
        overhead=overhead,
        profile=profile,
    )


def _task(op: Operator) -> Task:
    return Task(
        name=op.name,
        phase=op.phase,
        of=op.forward if op.phase in _BACKWARD else -1,
        reads=tuple(dict.fromkeys(use.storage for use in op.inputs)),
        makes=tuple(dict.fromkeys(use.storage for use in op.outputs)),
        writes=op.mutates,
        transient=op.transient_bytes,
        seconds=op.seconds,
    )


class _Tensors:
    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._operators = profile.operators
        self._readers: defaultdict[int, list[int]] = defaultdict(list)
        self._last: dict[int, int] = {}
        for index, op in enumerate(profile.operators):
            for number in {use.storage for use in op.inputs}:
                self._readers[number].append(index)
            if op.phase in _BACKWARD and op.forward >= 0:
                self._last[op.forward] = index
        self._called: defaultdict[int, int] = defaultdict(int)
        for call in profile.calls:
            for number in call.inputs:
                self._called[number] = max(self._called[number], call.last)
        self._recorded: defaultdict[int, dict[int, SavedTensor]] = defaultdict(dict)
        for save in profile.saved:
            self._recorded[save.storage].setdefault(save.saver, save)

    def all(self) -> tuple[Tensor, ...]:
        return tuple(
            Tensor(s.bytes, s.kind, s.pool, s.birth, self._holds(number, s))
            for number, s in enumerate(self._profile.storages)
        )

    def _holds(self, number: int, storage: Storage) -> tuple[Hold, ...]:
        if storage.kind in ALWAYS:
            return (Hold(storage.death),)
        readers = self._holders(number, storage)
        if self._profile.saved_known:
            saved = dict(self._saved(number, storage))
        else:
            saved = self._inferred(readers, storage)
        others = [i + 1 for i in readers if self._operators[i].forward not in saved]
        called = self._called[number] if saved else 0
        # What hooks of the script packed, they keep.
        packed = any(one.hooked and 0 <= one.asked <= storage.kept for one in saved.values())
        kept = -1 if packed else storage.kept
        rest = min(max((storage.birth + 1, kept, called, *others)), storage.death)
        return (Hold(rest), *saved.values())

    def _saved(self, number: int, storage: Storage) -> Iterator[tuple[int, Hold]]:
        """Yield the saves of autograd, which last until backward has left the node of the saver."""
        for saver, save in self._recorded[number].items():
            if saver >= 0:
                leaves = self._last.get(saver, -1) + 1 if save.unpacked >= 0 else storage.death
                until = min(max(leaves, save.unpacked + 1), storage.death)
                yield saver, Hold(until, saver, save.packed, save.unpacked, save.hooked)

    def _inferred(self, readers: list[int], storage: Storage) -> dict[int, Hold]:
        """Infer saves from backward: the forward operator saved the tensors that its gradient reads."""
        saves: dict[int, Hold] = {}
        for index in readers:
            op = self._operators[index]
            if op.phase in _BACKWARD and op.forward >= max(storage.birth, 0):
                first = saves[op.forward].asked if op.forward in saves else index
                packed = max(op.forward - 1, storage.birth)
                saves[op.forward] = Hold(index + 1, op.forward, packed, first)
        return saves

    def _holders(self, number: int, storage: Storage) -> list[int]:
        """Return the readers of a storage, and the operator after which it died as its last holder.

        The latter is omitted if Python dropped the storage earlier, and an unused graph kept it.
        """
        last = storage.death - 1
        unused = any(s.saver >= 0 and s.unpacked < 0 for s in self._recorded[number].values())
        if last <= storage.birth or (unused and 0 <= storage.kept <= last):
            return self._readers[number]
        return [*self._readers[number], last]


_BOUND_BY_DEVICE = (
    0.9  # Arbitrary; a device this busy sets the pace, apart from gaps between steps.
)
# Overhead on a device-bound step: 20 us to enter a span. Launches are hidden behind kernels.
_NO_OVERHEAD = OVERHEAD._replace(task=0.0, span=2e-5, random_state=0, recipe=0.0, watched=0.0)


def on_device(step: Step, device: DeviceSpec) -> Step:
    """Return the step with the times of its tasks on a device, by the roofline.

    Recomputation costs kernel time if the step is device-bound, else launch time. Steps need a profile.
    """
    if step.profile is None:
        return step
    times = estimate(step.profile, device)
    replay = price_syncs(step.profile, device, ()).cost
    by_device = replay.device_busy_ms >= _BOUND_BY_DEVICE * replay.step_ms
    seconds = times.device_seconds if by_device else times.host_seconds
    tasks = (t._replace(seconds=s) for t, s in zip(step.tasks, seconds, strict=True))
    overhead = _NO_OVERHEAD if by_device else step.overhead
    return replace(step, tasks=tuple(tasks), seconds=replay.step_ms / 1e3, overhead=overhead)
