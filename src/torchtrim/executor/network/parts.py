"""A network whose first operators run in parts of the batch, and the rest on all of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchtrim.errors import Unsupported
from torchtrim.executor.network.captured import Captured, Ref, Source, Value
from torchtrim.executor.network.program import Program, Switches, graph_of
from torchtrim.executor.network.samples import Along, along_batch, keeps_apart
from torchtrim.memory.network import best_cut

Recapture = Callable[[Sequence[Any]], Captured]


class Carried(NamedTuple):
    """A value that goes over the cut, and where its samples lie, None for one without."""

    number: int
    value: Value
    along: Along | None


class PartsProgram:
    """Runs in parts. Calls share nothing, as those of `Program`.

    `parts`: samples in each. `position`: how many operators run in parts, `of` how many there are.
    """

    def __init__(
        self,
        captured: Captured,
        inputs: Sequence[Any],
        parts: int,
        switches: Switches,
        recapture: Recapture,
    ) -> None:
        self.captured = captured
        self._batch, self._batched = batch_of(inputs)
        self.parts = _sizes(self._batch, parts)
        few = {size: recapture(self._part(inputs, 0, size)) for size in set(self.parts)}
        along = self._along(few)
        self.graph, self.buffers, _ = graph_of(captured)
        self.order = Program(captured, switches).layout.order
        cut = best_cut(
            self.graph,
            graph_of(few[self.parts[0]], self._batch / self.parts[0])[0],
            self.order,
            _last_apart(captured, self.order, along),
        )
        if not cut.position:
            raise Unsupported(
                "no first operators of it keep samples apart so that parts of the batch would need less"
            )
        self.position, self.of = cut.position, len(self.order)
        first, rest = self.order[: cut.position], self.order[cut.position :]
        self._carried = _carried(captured, first, rest, along)
        self._first = {
            size: Program(
                _beginning(network, first, self._carried), switches, whole=self._batch / size
            )
            for size, network in few.items()
        }
        self._rest = Program(_ending(captured, rest, self._carried, len(inputs)), switches)

    @property
    def peak_bytes(self) -> int:
        """The most bytes at any moment of a call."""
        return self._kept + max(program.layout.peak for program in self._programs)

    @property
    def output_bytes(self) -> int:
        """The most bytes of results, and of an arena, at any moment of a call."""
        return self._kept + max(program.layout.outputs for program in self._programs)

    @property
    def made_bytes(self) -> int:
        """Bytes of all that has memory of its own, and of the arenas of one part and of the rest."""
        first = max(program.made_bytes for program in self._first.values())
        return self._kept + first + self._rest.made_bytes

    @property
    def both(self) -> tuple[Program, Program]:
        """The program of the largest part, and that of the rest."""
        return self._first[max(self.parts)], self._rest

    @property
    def _programs(self) -> list[Program]:
        return [*self._first.values(), self._rest]

    @property
    def _kept(self) -> int:
        return sum(carried.value.bytes for carried in self._carried)

    def run(self, inputs: Sequence[Any], tensors: Mapping[str, Tensor]) -> list[Any]:
        """The results, flat, as `Program.run` gives them."""
        whole = [_empty(carried.value) for carried in self._carried]
        at = 0
        for size in self.parts:
            results = self._first[size].run(self._part(inputs, at, size), tensors)
            for place, result, carried in zip(whole, results, self._carried, strict=True):
                _put(place, result, carried.along, at, size)
            del results
            at += size
        return self._rest.run([*inputs, *whole], tensors)

    def _part(self, inputs: Sequence[Any], at: int, size: int) -> list[Any]:
        return [
            leaf[at : at + size] if number in self._batched else leaf
            for number, leaf in enumerate(inputs)
        ]

    def _along(self, few: Mapping[int, Captured]) -> list[Along | None]:
        for size, network in few.items():
            found = along_batch(self.captured, network, (self._batch, size))
            if found is None:
                raise Unsupported(
                    f"it is another network for {size} samples than for {self._batch}"
                )
        assert found is not None
        return found


def batch_of(inputs: Sequence[Any]) -> tuple[int, frozenset[int]]:
    """The number of samples, and which inputs have them: the most frequent first dimension."""
    lengths = {
        number: leaf.shape[0]
        for number, leaf in enumerate(inputs)
        if isinstance(leaf, Tensor) and leaf.dim()
    }
    sizes = list(lengths.values())
    batch = max(sizes, key=sizes.count, default=0)
    return batch, frozenset(number for number, length in lengths.items() if length == batch)


def _sizes(batch: int, parts: int) -> tuple[int, ...]:
    """As even as they come, the last the smallest."""
    if batch < 2:
        raise Unsupported("a batch of one sample has no parts")
    size = -(-batch // min(parts, batch))
    sizes = [size] * (batch // size)
    return (*sizes, batch % size) if batch % size else tuple(sizes)


def _last_apart(captured: Captured, order: Sequence[int], along: Sequence[Along | None]) -> int:
    """How many operators keep samples apart before the first that does not."""
    if captured.updates:
        return 0
    for position, number in enumerate(order):
        if not keeps_apart(captured.ops[number], captured.values, along):
            return position
    return len(order)


def _carried(
    captured: Captured, first: Sequence[int], rest: Sequence[int], along: Sequence[Along | None]
) -> tuple[Carried, ...]:
    """Values that the first operators make and the rest, or the caller, looks at."""
    made = {v for number in first for v in captured.ops[number].outputs if v >= 0}
    wanted = [v for number in rest for v in captured.ops[number].inputs]
    wanted += [r.value for r in captured.results if isinstance(r, Ref)]
    return tuple(
        Carried(v, captured.values[v], along[v]) for v in dict.fromkeys(wanted) if v in made
    )


def _beginning(network: Captured, first: Sequence[int], carried: Sequence[Carried]) -> Captured:
    """The first operators, which return the carried values."""
    return network._replace(
        ops=tuple(network.ops[number] for number in first),
        results=tuple(Ref(one.number) for one in carried),
    )


def _ending(
    network: Captured, rest: Sequence[int], carried: Sequence[Carried], inputs: int
) -> Captured:
    """The rest, which takes the carried values as further inputs."""
    values, memories = list(network.values), list(network.memories)
    sources = list(network.sources)
    for position, one in enumerate(carried):
        value = one.value
        values[one.number] = value._replace(
            memory=len(memories), ours=False, offset=0, strides=_dense(value)
        )
        memories.append(value.bytes)
        sources.append(Source("input", inputs + position, one.number))
    return network._replace(
        ops=tuple(network.ops[number] for number in rest),
        values=tuple(values),
        memories=tuple(memories),
        sources=tuple(sources),
    )


def _empty(value: Value) -> Tensor:
    return torch.empty_strided(value.shape, _dense(value), dtype=value.dtype, device=value.device)


def _dense(value: Value) -> tuple[int, ...]:
    """Strides in the value's order of dimensions, without gaps."""
    order = sorted(range(len(value.shape)), key=lambda d: (value.strides[d], -d))
    expected, strides = 1, [0] * len(value.shape)
    for dimension in order:
        strides[dimension] = expected
        expected *= max(value.shape[dimension], 1)
    return tuple(strides)


def _put(place: Tensor, result: Any, along: Along | None, at: int, size: int) -> None:
    if along is not None:
        place = place.narrow(along.dimension, at * along.each, size * along.each)
    place.copy_(result)
