"""A profile -> a chain of segments between the places where it may be cut, with the cost of each."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from operator import itemgetter
from typing import NamedTuple

from torchtrim.errors import Unsupported
from torchtrim.memory.packing.buffers import Life, bytes_over_time
from torchtrim.planner.stages.calls import ForwardPass, cuts_of, pass_of
from torchtrim.records.profile import Profile
from torchtrim.techniques.micro_batch.found import is_training_norm

_OF_BATCH = ("activation", "temporary", "input")
_BIRTH = itemgetter(1)


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

    `seconds`: the time of the step without a recorder. `times`: the time of each operator on another device.
    """

    def __init__(
        self, profile: Profile, seconds: float, times: Sequence[float] | None = None
    ) -> None:
        self._profile = profile
        self._times = times or [op.seconds for op in profile.operators]
        self._pass = pass_of(profile)
        self._refuse()
        self._cuts, self.reasons = cuts_of(profile, self._pass)
        self._starts = (self._pass.first, *(cut.operator for cut in self._cuts))
        self._scale = 1.0 if times else _scale(profile, seconds)
        self._shortest_seconds = _shortest_seconds(profile, self._times)
        self._homes = self._attributed()
        self._readers: dict[int, int] = {}
        for index in range(self._pass.first, self._pass.last):
            for use in profile.operators[index].inputs:
                self._readers.setdefault(use.storage, self._home(index))
        self._held_always = self._state_bytes()
        self._update_seconds = sum(
            seconds
            for op, seconds in zip(profile.operators, self._times, strict=True)
            if op.phase == "optimizer"
        )
        self._grads_are_fresh = not any(
            storage.kind == "gradient" and storage.birth < 0 for storage in profile.storages
        )
        self._all_parameters = sum(s.bytes for s in profile.storages if s.kind == "parameter")

    @property
    def root(self) -> str:
        """The model's name."""
        return self._pass.root

    @property
    def batch(self) -> int:
        """The samples in the model's input: the first dimension of its first tensor."""
        given = self._pass.call.inputs[:1]
        for index in range(self._pass.first, self._pass.last):
            for use in self._profile.operators[index].inputs:
                if use.storage in given and use.shape:
                    return use.shape[0]
        return 1

    def _refuse(self) -> None:
        ops = self._profile.operators[self._pass.first : self._pass.last]
        if (norm := next(filter(is_training_norm, ops), None)) is not None:
            raise Unsupported(
                f"{self.root} normalizes by the statistics of a batch ({norm.name}), and a pipeline runs "
                "micro-batches, whose statistics differ: it would compute a different function. Use "
                "GroupNorm or LayerNorm, or freeze the BatchNorm with .eval()."
            )

    def chain(self, share: float) -> Chain:
        """Return the chain for micro-batches of this share of the batch."""
        begins = [("", 0), *((cut.where, cut.bytes) for cut in self._cuts)]
        curves = _Curves(self._profile, self._pass, share)
        segments = tuple(
            self._segment(number, where, int(size * share), share, curves)
            for number, (where, size) in enumerate(begins)
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
        return Segment(
            where,
            forward,
            inputs,
            weights,
            self._update_seconds * self._scale * parameters / max(self._all_parameters, 1),
            given,
            *curves.of(self._ops(number, "F"), [*self._ops(number, "I"), *self._ops(number, "W")]),
            sent=self._sent(number, share),
            waiting=int(share * sum(self._profile.storages[number].bytes for number in waiting)),
            split=curves.split(self._ops(number, "I"), waiting | self._waiting(number - 1)),
            gradients=parameters if fresh else 0,
            state=parameters + state + (0 if fresh else parameters),
            parameters=parameters,
        )

    def _ops(self, number: int, kind: str) -> list[int]:
        return self._homes.get((number, kind), [])

    def _sent(self, number: int, share: float) -> int:
        """Return the bytes of the segment's output that autograd does not keep, and a stage must."""
        inner = number < len(self._cuts)
        # Torch's schedules keep the model's output until its backward.
        results = {self._cuts[number].storage} if inner else {*self._pass.call.outputs}
        storages = (self._profile.storages[number] for number in results)
        return sum(int(s.bytes * share) for s in storages if s.death <= self._pass.last)

    def _home(self, operator: int) -> int:
        return max(bisect_right(self._starts, operator) - 1, 0)

    def _attributed(self) -> dict[tuple[int, str], list[int]]:
        """Return the operators of each segment: forward, backward to the inputs and to the weights."""
        operators: defaultdict[tuple[int, str], list[int]] = defaultdict(list)
        for index in range(self._pass.first, self._pass.last):
            operators[self._home(index), "F"].append(index)
        last = len(self._starts) - 1
        for index in range(self._pass.last, len(self._profile.operators)):
            op = self._profile.operators[index]
            if op.phase not in ("backward", "recompute", "other"):
                break  # another forward, or an update
            if self._pass.first <= op.forward < self._pass.last:
                last = self._home(op.forward)
            kinds = {self._profile.storages[use.storage].kind for use in op.outputs}
            operators[last, "W" if kinds == {"gradient"} else "I"].append(index)
        return operators

    def _seconds(self, index: int, share: float) -> float:
        seconds = self._times[index]
        return self._scale * max(seconds * share, min(seconds, self._shortest_seconds))

    def _state_bytes(self) -> dict[int, tuple[int, int]]:
        """Return the bytes of each segment's parameters, and of its buffers and optimizer states."""
        storages = self._profile.storages
        parameters: Counter[int] = Counter()
        others: Counter[int] = Counter()
        for number, home in self._readers.items():
            if storages[number].kind == "parameter":
                parameters[home] += storages[number].bytes
            elif storages[number].kind == "buffer":
                others[home] += storages[number].bytes
        updates = (update for step in self._profile.optimizer_steps for update in step.updates)
        for home, state in {
            (self._readers.get(u.parameter, -1), s) for u in updates for s in u.states
        }:
            others[home] += storages[state].bytes
        return {home: (parameters[home], others[home]) for home in range(len(self._starts))}

    def _waiting(self, number: int) -> set[int]:
        """Return the storages that backward to the inputs creates and backward to the weights reads."""
        storages = self._profile.storages
        reads: set[int] = set()
        for index in (*self._ops(number, "I"), *self._ops(number, "W")):
            op = self._profile.operators[index]
            if any(storages[use.storage].kind == "gradient" for use in op.outputs):
                reads |= {use.storage for use in op.inputs}
        return {
            read
            for read in reads
            if storages[read].birth >= self._pass.last and storages[read].kind != "gradient"
        }


class _Curves:
    """Bytes over the recorded pass, by segment. Except gradients, they shrink with a micro-batch's share."""

    def __init__(self, profile: Profile, forward: ForwardPass, share: float) -> None:
        self._operators, self._storages = profile.operators, profile.storages
        self._turn = forward.last
        self._share = share
        inputs = set(forward.call.inputs)
        lives: list[Life] = []
        gradients: list[Life] = []
        for number, storage in enumerate(profile.storages):
            if not storage.counted or storage.birth < forward.first or number in inputs:
                continue
            if storage.kind in _OF_BATCH:
                lives.append((int(storage.bytes * share), storage.birth, storage.death))
            else:
                gradients.append((storage.bytes, storage.birth, storage.death))
        self._lives, self._gradients = sorted(lives, key=_BIRTH), sorted(gradients, key=_BIRTH)

    def of(self, forward: Sequence[int], backward: Sequence[int]) -> tuple[int, int, int, int]:
        if not forward:
            return 0, 0, 0, 0
        first, end = forward[0], forward[-1] + 1
        own = _born(self._lives, first, end)
        held = sum(size for size, _, death in own if death > self._turn)
        rise = max(self._highest(own, first, end), held)
        if not backward:
            return held, rise, held, held
        low, high = min(backward), max(backward) + 1
        own += _born(self._lives, low, high)
        new = _born(self._gradients, low, high)
        brief = [(size, birth, birth + 1) for size, birth, _ in new]
        back, stays = (self._highest(own + more, low, high) for more in (brief, new))
        return held, rise, max(back, held), max(stays, held)

    def split(self, inputs: Sequence[int], waiting: Collection[int]) -> int:
        if not inputs:
            return 0
        low, high = min(inputs), max(inputs) + 1
        operators = set(inputs)
        own = [
            (int(s.bytes * self._share), s.birth, high if number in waiting else s.death)
            for number, s in enumerate(self._storages)
            if s.birth in operators and s.counted and s.kind in _OF_BATCH
        ]
        return self._highest(own, low, high, operators)

    def _highest(
        self, lives: Sequence[Life], first: int, end: int, at: Collection[int] | None = None
    ) -> int:
        """Return the highest bytes during a span of operators, or some of them, temporaries included."""
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


def _born(lives: list[Life], first: int, end: int) -> list[Life]:
    """Return the lives, sorted by birth, that begin at `first <= i < end`."""
    low, high = (bisect_left(lives, at, key=_BIRTH) for at in (first, end))
    return lives[low:high]


def _scale(profile: Profile, seconds: float) -> float:
    recorded = sum(op.seconds for op in profile.operators)
    return seconds / recorded if recorded and seconds else 1.0


def _shortest_seconds(profile: Profile, seconds: Sequence[float]) -> float:
    """Return the time of an operator that does next to nothing: the first decile of all times."""
    pairs = zip(profile.operators, seconds, strict=True)
    times = sorted(time for op, time in pairs if op.phase in ("forward", "backward"))
    return times[len(times) // 10] if times else 0.0
