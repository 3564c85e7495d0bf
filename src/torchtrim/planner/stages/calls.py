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
    """One forward pass of a model and its loss: operators `first <= i < last`; the model itself ends at
    `returned`."""

    root: str
    call: Call
    first: int
    returned: int
    last: int


class CallCut(NamedTuple):
    """A place where a stage may begin: before this call of a module. `bytes`: size of the tensor that crosses
    it."""

    where: str
    operator: int
    storage: int
    bytes: int


class CutPlaces(NamedTuple):
    """The places where a model may be cut, in order, and the reasons against others, the most frequent
    first."""

    cuts: tuple[CallCut, ...]
    reasons: tuple[str, ...]


def pass_of(profile: Profile) -> ForwardPass:
    """Return the forward pass of the model with the most parameters. Raises `Unsupported` if no model
    trains."""
    roots = [call for call in profile.calls if call.depth == 0 and call.graded]
    roots = [call for call in roots if call.first < call.last and _backward_after(profile, call)]
    if not roots:
        raise Unsupported(
            "no model of the recorded step runs forward with gradients and then backward, so there is "
            "nothing to cut into stages. A pipeline needs a step of the form loss_fn(model(x), y)."
        )
    call = max(roots, key=lambda one: (_weight(profile, one), -one.first))
    return ForwardPass(
        profile.modules[call.module].path,
        call,
        call.first,
        call.last,
        _backward_after(profile, call),
    )


def passes_in(profile: Profile, root: str) -> int:
    """Return how often a step runs the root forward and then backward: more than once if it accumulates."""
    calls = (one for one in profile.calls if one.depth == 0 and one.graded)
    own = [one for one in calls if profile.modules[one.module].path == root]
    return sum(one.first < one.last and bool(_backward_after(profile, one)) for one in own)


def _weight(profile: Profile, call: Call) -> int:
    path = profile.modules[call.module].path
    return sum(
        module.parameter_bytes
        for module in profile.modules
        if module.path == path or module.path.startswith(f"{path}.")
    )


def _backward_after(profile: Profile, call: Call) -> int:
    """Return the first operator of the backward that follows the call, or 0."""
    for index in range(call.last, len(profile.operators)):
        if profile.operators[index].phase == "backward":
            return index
    return 0


def cuts_of(profile: Profile, made: ForwardPass) -> CutPlaces:
    """Return where the model may be cut: a single tensor must connect the operators before and after the
    place."""
    finder = _CallFinder(profile, made)
    found, reasons = [], Counter[str]()
    for call in finder.candidates():
        reason, size = finder.judged(call)
        if reason:
            reasons[reason] += 1
        else:
            found.append(CallCut(finder.below(call), call.first, call.inputs[0], size))
    return CutPlaces(tuple(found), tuple(reason for reason, _ in reasons.most_common()))


class _CallFinder:
    """Determines the tensors that cross each place of a forward pass."""

    def __init__(self, profile: Profile, made: ForwardPass) -> None:
        self._profile = profile
        self._pass = made
        self._reads: defaultdict[int, list[int]] = defaultdict(list)
        self._made: dict[int, int] = {}
        self._trained: set[int] = set()
        self._names = {
            number: one.name
            for number, one in enumerate(profile.storages)
            if one.kind == "parameter"
        }
        self._follow()

    def _follow(self) -> None:
        """Find the readers of each tensor, and the tensors that depend on parameters.

        Each stage recomputes the other tensors itself.
        """
        for index in range(self._pass.first, self._pass.last):
            op = self._profile.operators[index]
            inputs = {use.storage for use in op.inputs}
            for number in inputs:
                self._reads[number].append(index)
            for use in op.outputs:
                if use.storage not in inputs:
                    self._made.setdefault(use.storage, index)
                if any(one in self._trained or one in self._names for one in inputs):
                    self._trained.add(use.storage)
        self._trained -= set(self._names)
        for number in self._pass.call.outputs:
            self._reads[number].append(self._pass.last)
        spans = (
            (n, self._reads[n][0], self._reads[n][-1]) for n in self._names if n in self._reads
        )
        self._tied = [(n, first, last) for n, first, last in spans if first < last]
        self._crossing = self._counted()

    def below(self, call: Call) -> str:
        """Return the module's path below the root."""
        return self._profile.modules[call.module].path.removeprefix(f"{self._pass.root}.")

    def candidates(self) -> Iterator[Call]:
        """Yield the calls inside the model that begin after its first operator, the outermost if several
        begin there."""
        inside = [
            call
            for call in self._profile.calls
            if call.depth > 0
            and self._pass.first < call.first < call.last <= self._pass.returned
            and self._profile.modules[call.module].path.startswith(f"{self._pass.root}.")
        ]
        times = Counter(call.module for call in inside)
        begun: set[int] = set()
        for call in sorted(inside, key=lambda one: (one.first, one.depth)):
            if call.first not in begun and times[call.module] == 1:
                begun.add(call.first)
                yield call

    def judged(self, call: Call) -> tuple[str, int]:
        """Return the reason against a cut before the call, or an empty string, and how many bytes cross."""
        at, where = call.first, self.below(call)
        tied = next((n for n, first, last in self._tied if first < at <= last), None)
        if tied is not None:
            return f"{self._names[tied]} is used before it and after it (tied weights)", 0
        given = call.inputs[0] if call.inputs else -1
        crosses = self._crosses(given, at)
        if self._crossing[at - self._pass.first] > crosses:
            return "more than one tensor crosses it, such as a skip connection", 0
        if not crosses:
            return f"the input of {where} is not its first argument", 0
        if any(read >= call.last for read in self._reads[given]):
            return f"the input of {where} is used again after it, as in a residual block", 0
        size = self._bytes_if_all_read(given, at)
        return ("only a part of a tensor crosses it", 0) if size is None else ("", size)

    def _crosses(self, number: int, at: int) -> bool:
        """Return True if a tensor depends on parameters, is made before the operator, and is read from there
        on."""
        made, reads = self._made.get(number), self._reads.get(number)
        if made is None or not reads or number not in self._trained:
            return False
        return made < at <= reads[-1]

    def _counted(self) -> list[int]:
        """Return how many such tensors cross each operator of the pass, as a sum of bytes with one byte
        each."""
        lives = [
            (1, made + 1 - self._pass.first, self._reads[n][-1] + 1 - self._pass.first)
            for n, made in self._made.items()
            if n in self._trained and self._reads.get(n)
        ]
        return bytes_over_time(self._pass.last + 1 - self._pass.first, lives)

    def _bytes_if_all_read(self, number: int, at: int) -> int | None:
        """Return the bytes of a storage if its first read after the cut covers all of it."""
        size = self._profile.storages[number].bytes
        for index in self._reads[number]:
            if index < at or index >= self._pass.last:
                continue
            for use in self._profile.operators[index].inputs:
                if use.storage == number:
                    item = item_bytes(use.dtype)
                    return size if prod(use.shape) * item == size else None
        return None
