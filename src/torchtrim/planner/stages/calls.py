"""The calls of one forward pass of a model as a tree, and the places where the model may be cut."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from torchtrim.errors import Unsupported
from torchtrim.memory.packing.buffers import bytes_over_time
from torchtrim.records.operator_names import item_bytes
from torchtrim.records.profile import Call, Profile


class ForwardPass(NamedTuple):
    """A forward pass of a model, operators `first <= i < returned`, and its loss, before `last`."""

    root: str
    call: Call
    first: int
    returned: int
    last: int


class CallCut(NamedTuple):
    """A place where a stage may begin: before this call of a module. `bytes` cross it, in one tensor."""

    where: str
    operator: int
    storage: int
    bytes: int


def pass_of(profile: Profile) -> ForwardPass:
    """Return the forward pass of the largest model. Raises `Unsupported` if no model trains."""
    roots = [call for call in profile.calls if call.depth == 0 and call.graded]
    roots = [call for call in roots if call.first < call.last and _backward_after(profile, call)]
    if not roots:
        raise Unsupported(
            "no model of the recorded step runs forward with gradients and then backward, so there is "
            "nothing to cut into stages. A pipeline needs a step of the form loss_fn(model(x), y)."
        )
    call = max(roots, key=lambda root: (_weight(profile, root), -root.first))
    return ForwardPass(
        profile.modules[call.module].path,
        call,
        call.first,
        call.last,
        _backward_after(profile, call),
    )


def passes_in(profile: Profile, root: str) -> int:
    """Return how often a step runs the root forward and then backward: more than once if it accumulates."""
    return sum(
        profile.modules[call.module].path == root and _backward_after(profile, call) > 0
        for call in profile.calls
        if call.depth == 0 and call.graded and call.first < call.last
    )


def _weight(profile: Profile, call: Call) -> int:
    path = profile.modules[call.module].path
    return sum(
        module.parameter_bytes
        for module in profile.modules
        if module.path == path or module.path.startswith(f"{path}.")
    )


def _backward_after(profile: Profile, call: Call) -> int:
    """Return the first operator of the backward that follows the call, or 0."""
    rest = range(call.last, len(profile.operators))
    return next((index for index in rest if profile.operators[index].phase == "backward"), 0)


def cuts_of(profile: Profile, forward: ForwardPass) -> tuple[tuple[CallCut, ...], tuple[str, ...]]:
    """Return the places where a single tensor connects the operators before and after, in order.

    Also return the reasons against other places, the most frequent first.
    """
    finder = _CallFinder(profile, forward)
    cuts, reasons = [], Counter[str]()
    for call in finder.candidates():
        reason, size = finder.judged(call)
        if reason:
            reasons[reason] += 1
        else:
            cuts.append(CallCut(finder.below(call), call.first, call.inputs[0], size))
    return tuple(cuts), tuple(reason for reason, _ in reasons.most_common())


class _CallFinder:
    def __init__(self, profile: Profile, forward: ForwardPass) -> None:
        self._profile = profile
        self._pass = forward
        self._reads: defaultdict[int, list[int]] = defaultdict(list)
        self._made: dict[int, int] = {}
        # Tensors that depend on parameters. Each stage recomputes the others itself.
        self._trained: set[int] = set()
        self._names = {n: s.name for n, s in enumerate(profile.storages) if s.kind == "parameter"}
        for index in range(forward.first, forward.last):
            op = profile.operators[index]
            inputs = {use.storage for use in op.inputs}
            for number in inputs:
                self._reads[number].append(index)
            for use in op.outputs:
                if use.storage not in inputs:
                    self._made.setdefault(use.storage, index)
                if not (inputs.isdisjoint(self._trained) and inputs.isdisjoint(self._names)):
                    self._trained.add(use.storage)
        self._trained -= set(self._names)
        for number in forward.call.outputs:
            self._reads[number].append(forward.last)
        read = [number for number in self._names if number in self._reads]
        self._tied = [n for n in read if self._reads[n][0] < self._reads[n][-1]]
        # The number of tensors that cross each operator of the pass, as a sum of one byte each.
        lives = [
            (1, made + 1 - forward.first, self._reads[n][-1] + 1 - forward.first)
            for n, made in self._made.items()
            if n in self._trained and self._reads.get(n)
        ]
        self._crossing = bytes_over_time(forward.last + 1 - forward.first, lives)

    def below(self, call: Call) -> str:
        return self._profile.modules[call.module].path.removeprefix(f"{self._pass.root}.")

    def candidates(self) -> Iterator[Call]:
        """Yield the calls inside the model that begin after its first operator, the outermost at each."""
        inside = [
            call
            for call in self._profile.calls
            if call.depth > 0
            and self._pass.first < call.first < call.last <= self._pass.returned
            and self._profile.modules[call.module].path.startswith(f"{self._pass.root}.")
        ]
        times = Counter(call.module for call in inside)
        begun: set[int] = set()
        for call in sorted(inside, key=lambda inner: (inner.first, inner.depth)):
            if call.first not in begun and times[call.module] == 1:
                begun.add(call.first)
                yield call

    def judged(self, call: Call) -> tuple[str, int]:
        at, where = call.first, self.below(call)
        for number in self._tied:
            if self._reads[number][0] < at <= self._reads[number][-1]:
                return f"{self._names[number]} is used before it and after it (tied weights)", 0
        source = call.inputs[0] if call.inputs else -1
        crosses = (
            source in self._trained
            and source in self._made
            and self._made[source] < at <= max(self._reads[source], default=-1)
        )
        if self._crossing[at - self._pass.first] > crosses:
            return "more than one tensor crosses it, such as a skip connection", 0
        if not crosses:
            return f"the input of {where} is not its first argument", 0
        if any(read >= call.last for read in self._reads[source]):
            return f"the input of {where} is used again after it, as in a residual block", 0
        size = self._bytes_if_all_read(source, at)
        return ("only a part of a tensor crosses it", 0) if size is None else ("", size)

    def _bytes_if_all_read(self, number: int, at: int) -> int | None:
        """Return the bytes of a storage if its first read after the cut covers all of it."""
        size = self._profile.storages[number].bytes
        reads = (index for index in self._reads[number] if at <= index < self._pass.last)
        uses = (use for index in reads for use in self._profile.operators[index].inputs)
        first = next((use for use in uses if use.storage == number), None)
        if first is None or prod(first.shape) * item_bytes(first.dtype) != size:
            return None
        return size
