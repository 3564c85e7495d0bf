"""A profile -> a chain of segments between the places where it may be cut, with the cost of each."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from torchtrim.errors import Unsupported
from torchtrim.memory.packing.buffers import Life, bytes_over_time
from torchtrim.planner.stages.calls import ForwardPass, cuts_of, pass_of
from torchtrim.records.profile import Operator, Profile
from torchtrim.techniques.micro_batch.found import is_training_norm

_OF_BATCH = ("activation", "temporary", "input")


class Segment(NamedTuple):
    """The part of a model between two possible cuts, for one micro-batch.

    `where` is its first module. Seconds: `forward`; backward to the `inputs` and to the `weights`; `update`
    of its parameters. Bytes: `given`, its input; `held`, tensors that forward leaves for backward; `rise` and
    `back`, the rise of memory in forward and in backward above the bytes before them; `first`, the rise of a
    backward whose gradients are new and stay; `sent`, its output if only a stage keeps it; `waiting`,
    gradients kept between backward to the inputs and to the weights; `split`, the rise of backward to the
    inputs if all of these are kept; `gradients` that a step allocates; `state`: parameters, optimizer state,
    buffers, and gradients kept between steps; `parameters`, their part of `state`.
    """

    where: str
    forward: float
    inputs: float
    weights: float
    update: float = 0.0
    given: int = 0
    held: int = 0
    rise: int = 0
    back: int = 0
    first: int = 0
    sent: int = 0
    waiting: int = 0
    split: int = 0
    gradients: int = 0
    state: int = 0
    parameters: int = 0

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward + self.inputs + self.weights


class Chain(NamedTuple):
    """A model as segments in order.

    `batch`: the samples of a whole batch. `share`: the part of it in a micro-batch.
    """

    root: str
    segments: tuple[Segment, ...]
    batch: int
    share: float = 1.0


class ChainReader:
    """Reads chains for micro-batches of any size from one profile. Raises `Unsupported` with the reason.

    `seconds`: the time of the step without a recorder. `times`: the time of each operator, if it differs from
    the profile's, such as on another device.
    """

    def __init__(
        self, profile: Profile, seconds: float, times: Sequence[float] | None = None
    ) -> None:
        self._profile = profile
        self._times = times or [op.seconds for op in profile.operators]
        self._pass = pass_of(profile)
        self._refuse()
        found = cuts_of(profile, self._pass)
        self.reasons = found.reasons
        self._cuts = found.cuts
        self._starts = (self._pass.first, *(cut.operator for cut in found.cuts))
        self._scale = 1.0 if times else _scale(profile, seconds)
        self._shortest_seconds = _shortest_seconds(profile, self._times)
        self._homes = dict(self._attributed())
        self._readers = self._first_readers()
        self._held_always = self._state_bytes()
        self._update_seconds = sum(
            seconds
            for op, seconds in zip(profile.operators, self._times, strict=True)
            if op.phase == "optimizer"
        )
        self._grads_are_fresh = not any(
            one.kind == "gradient" and one.birth < 0 for one in profile.storages
        )
        self._all_parameters = sum(one.bytes for one in profile.storages if one.kind == "parameter")

    @property
    def root(self) -> str:
        """The model's name."""
        return self._pass.root

    @property
    def batch(self) -> int:
        """The samples in the model's input: the first size of its first tensor."""
        given = self._pass.call.inputs[:1]
        for index in range(self._pass.first, self._pass.last):
            for use in self._profile.operators[index].inputs:
                if use.storage in given and use.shape:
                    return use.shape[0]
        return 1

    def _refuse(self) -> None:
        ops = self._profile.operators[self._pass.first : self._pass.last]
        norm = next(filter(is_training_norm, ops), None)
        if norm is not None:
            raise Unsupported(
                f"{self.root} normalizes by the statistics of a batch ({norm.name}), and a pipeline runs "
                "micro-batches, whose statistics differ: it would compute a different function. Use "
                "GroupNorm or LayerNorm, or freeze the BatchNorm with .eval()."
            )

    def chain(self, share: float) -> Chain:
        """Return the chain for micro-batches of this share of the batch."""
        begun = [("", 0), *((cut.where, cut.bytes) for cut in self._cuts)]
        curves = _Curves(self._profile, self._pass, share)
        segments = tuple(
            self._segment(number, where, int(given * share), share, curves)
            for number, (where, given) in enumerate(begun)
        )
        return Chain(self.root, segments, self.batch, share)

    def _segment(
        self, number: int, where: str, given: int, share: float, curves: _Curves
    ) -> Segment:
        forward, inputs, weights = (
            sum(self._seconds(index, share) for index in self._ops(number, kind)) for kind in "FIW"
        )
        parameters, state = self._held_always[number]
        waiting = self._waiting(number)
        fresh = self._grads_are_fresh
        updates = self._update_seconds
        return Segment(
            where,
            forward,
            inputs,
            weights,
            updates * self._scale * parameters / max(self._all_parameters, 1),
            given,
            *curves.of(self._ops(number, "F"), [*self._ops(number, "I"), *self._ops(number, "W")]),
            sent=self._sent(number, share),
            waiting=int(share * sum(self._profile.storages[one].bytes for one in waiting)),
            split=curves.split(self._ops(number, "I"), waiting | self._waiting(number - 1)),
            gradients=parameters if fresh else 0,
            state=parameters + state + (0 if fresh else parameters),
            parameters=parameters,
        )

    def _ops(self, number: int, kind: str) -> list[int]:
        return self._homes.get((number, kind), [])

    def _sent(self, number: int, share: float) -> int:
        """Return the bytes of the segment's output that autograd does not keep, and a stage must.

        The output of the last segment is the model's; torch's schedules keep it until its backward.
        """
        inner = number < len(self._cuts)
        results = {self._cuts[number].storage} if inner else {*self._pass.call.outputs}
        kept = (self._profile.storages[one] for one in results)
        return sum(int(one.bytes * share) for one in kept if one.death <= self._pass.last)

    def _home(self, operator: int) -> int:
        return max(bisect_right(self._starts, operator) - 1, 0)

    def _attributed(self) -> Iterator[tuple[tuple[int, str], list[int]]]:
        """Return the operators of each segment: forward, backward to the inputs and to the weights."""
        found: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
        for index in range(self._pass.first, self._pass.last):
            found[self._home(index), "F"].append(index)
        last = len(self._starts) - 1
        for index, op in self._backwards():
            if self._pass.first <= op.forward < self._pass.last:
                last = self._home(op.forward)
            found[last, "W" if self._is_of_weights(op) else "I"].append(index)
        return iter(found.items())

    def _backwards(self) -> Iterator[tuple[int, Operator]]:
        """Yield the backward operators that follow the pass, up to another forward or an update."""
        for index in range(self._pass.last, len(self._profile.operators)):
            op = self._profile.operators[index]
            if op.phase not in ("backward", "recompute", "other"):
                return
            yield index, op

    def _is_of_weights(self, op: Operator) -> bool:
        kinds = {self._profile.storages[use.storage].kind for use in op.outputs}
        return kinds == {"gradient"}

    def _seconds(self, index: int, share: float) -> float:
        """Return the time of an operator on a part of the batch; a small one takes as long as other small
        ones."""
        seconds = self._times[index]
        return self._scale * max(seconds * share, min(seconds, self._shortest_seconds))

    def _first_readers(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for index in range(self._pass.first, self._pass.last):
            for use in self._profile.operators[index].inputs:
                found.setdefault(use.storage, self._home(index))
        return found

    def _state_bytes(self) -> dict[int, tuple[int, int]]:
        """Return the bytes of each segment's parameters, and of its buffers and optimizer states."""
        storages = self._profile.storages
        found: defaultdict[int, tuple[int, int]] = defaultdict(lambda: (0, 0))

        def add(home: int, parameters: int, others: int) -> None:
            found[home] = found[home][0] + parameters, found[home][1] + others

        for storage, home in self._readers.items():
            one = storages[storage]
            add(home, one.bytes * (one.kind == "parameter"), one.bytes * (one.kind == "buffer"))
        steps = (update for step in self._profile.optimizer_steps for update in step.updates)
        states = {
            (self._readers.get(one.parameter, -1), state) for one in steps for state in one.states
        }
        for home, state in states:
            add(home, 0, storages[state].bytes)
        return found

    def _waiting(self, number: int) -> set[int]:
        """Return the gradients that backward to the inputs makes and backward to the weights reads, as
        storages."""
        storages = self._profile.storages
        found: set[int] = set()
        for index in (*self._ops(number, "I"), *self._ops(number, "W")):
            op = self._profile.operators[index]
            if any(storages[use.storage].kind == "gradient" for use in op.outputs):
                found |= {use.storage for use in op.inputs}
        return {
            one
            for one in found
            if storages[one].birth >= self._pass.last and storages[one].kind != "gradient"
        }


class _Curves:
    """Bytes over the recorded pass, by segment, scaled to a micro-batch.

    A gradient keeps its size in a micro-batch; all else shrinks with the share of the batch.
    """

    def __init__(self, profile: Profile, made: ForwardPass, share: float) -> None:
        self._operators, self._storages = profile.operators, profile.storages
        self._turn = made.last
        self._share = share
        given = set(made.call.inputs)
        lives: list[Life] = []
        gradients: list[Life] = []
        for number, one in enumerate(profile.storages):
            if not one.counted or one.birth < made.first or number in given:
                continue
            if one.kind in _OF_BATCH:
                lives.append((int(one.bytes * share), one.birth, one.death))
            else:
                gradients.append((one.bytes, one.birth, one.death))
        self._lives, self._gradients = _ByBirth(lives), _ByBirth(gradients)

    def of(self, forward: Sequence[int], backward: Sequence[int]) -> tuple[int, int, int, int]:
        """Return the bytes held after forward, and the rise above them in forward, in backward, and in the
        first one."""
        if not forward:
            return 0, 0, 0, 0
        first, end = forward[0], forward[-1] + 1
        own = self._lives.born(first, end)
        held = sum(size for size, _, death in own if death > self._turn)
        rise = max(self._highest(own, first, end), held)
        if not backward:
            return held, rise, held, held
        low, high = min(backward), max(backward) + 1
        own += self._lives.born(low, high)
        new = self._gradients.born(low, high)
        brief = [(size, birth, birth + 1) for size, birth, _ in new]
        back, stays = (self._highest(own + more, low, high) for more in (brief, new))
        return held, rise, max(back, held), max(stays, held)

    def split(self, inputs: Sequence[int], waiting: Collection[int]) -> int:
        """Return the rise in backward to the inputs, if the storages in `waiting` are kept."""
        if not inputs:
            return 0
        low, high = min(inputs), max(inputs) + 1
        there = set(inputs)
        own = [
            (int(one.bytes * self._share), one.birth, high if number in waiting else one.death)
            for number, one in enumerate(self._storages)
            if one.birth in there and one.counted and one.kind in _OF_BATCH
        ]
        return self._highest(own, low, high, there)

    def _highest(
        self, lives: Sequence[Life], first: int, end: int, at: Collection[int] | None = None
    ) -> int:
        """Return the highest bytes in a span of operators, or during some of them, with their own
        temporaries."""
        moved = [(size, birth - first, death - first) for size, birth, death in lives]
        live = bytes_over_time(end - first, moved)
        before = bytes_over_time(end - first, ((size, at + 1, to) for size, at, to in moved))
        return max(
            max(now, then + int(op.transient_bytes * self._share))
            for number, (now, then, op) in enumerate(
                zip(live, before, self._operators[first:end], strict=True), first
            )
            if at is None or number in at
        )


class _ByBirth:
    """Lives, searchable by their start."""

    def __init__(self, lives: Iterable[Life]) -> None:
        self._lives = sorted(lives, key=_birth)

    def born(self, first: int, end: int) -> list[Life]:
        """Return the lives that begin at `first <= i < end`."""
        low, high = (bisect_left(self._lives, at, key=_birth) for at in (first, end))
        return self._lives[low:high]


def _birth(life: Life) -> int:
    return life[1]


def _scale(profile: Profile, seconds: float) -> float:
    recorded = sum(op.seconds for op in profile.operators)
    return seconds / recorded if recorded and seconds else 1.0


def _shortest_seconds(profile: Profile, seconds: Sequence[float]) -> float:
    """Return the time of an operator that does next to nothing: the first decile of all times."""
    phases = ("forward", "backward")
    both = zip(profile.operators, seconds, strict=True)
    times = sorted(one for op, one in both if op.phase in phases)
    return times[len(times) // 10] if times else 0.0
