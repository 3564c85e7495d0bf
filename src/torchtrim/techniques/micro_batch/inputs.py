"""What a call is given: its leaves, which of them are of the batch, and how many samples there are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torchtrim.techniques.micro_batch.rows import Rows
from torchtrim.techniques.micro_batch.tree import Leaves, filled, leaves_of

_SEQUENCES = 2, 3
"""Dimensions of a sequence whose samples may be along the second."""


class Given(NamedTuple):
    """A call's arguments. `tensors`: which leaves are such; `batched`: along which dimension samples are in
    those of the batch, of `size` samples. `times`: where they are along the second dimension of the first
    tensor, how long its first is, else 1."""

    tree: tuple[Any, Any]
    leaves: Leaves
    tensors: tuple[int, ...]
    batched: dict[int, int]
    size: int
    times: int = 1
    twins: Mapping[int, int] = {}

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any], *, second: bool = False) -> Given:
        """The first tensor with dimensions says how many samples there are; 0 where none has any.

        They are along the first dimension, and along the second in states as recurrent layers take them, of
        layers x samples x width. `second`: they are along the second of the first tensor, as recurrent
        layers and transformers take sequences, of times x samples or times x samples x width.
        """
        leaves = leaves_of((args, kwargs))
        tensors = tuple(n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        shaped = [n for n in tensors if leaves[n].dim()]
        first: Sequence[int] = leaves[shaped[0]].shape if shaped else ()
        if second and len(first) not in _SEQUENCES:
            return Given((args, kwargs), leaves, tensors, {}, 0)
        size = first[1] if second else first[0] if first else 0
        dims = {n: _dim_of(leaves[n].shape, size, second=second) for n in shaped}
        batched = {number: dim for number, dim in dims.items() if dim is not None}
        times = first[0] if second else 1
        return Given((args, kwargs), leaves, tensors, batched, size, times, _twins(leaves, tensors))

    @property
    def transposed(self) -> Given:
        """The same call with its samples along the second dimension; of none where that is not so."""
        return Given.of(*self.tree, second=True)

    @property
    def without_tensors(self) -> Given:
        """The call without its tensors, which somebody else keeps."""
        leaves = [
            None if number in self.tensors else leaf for number, leaf in enumerate(self.leaves)
        ]
        return self._replace(tree=filled(self.tree, leaves), leaves=leaves)

    @property
    def signature(self) -> tuple[Any, ...]:
        """What two calls have in common that differ in sizes only."""
        tensors = (
            (leaf.dim(), leaf.dtype, leaf.requires_grad, self.batched.get(number))
            for number, leaf in enumerate(self.leaves)
            if isinstance(leaf, torch.Tensor)
        )
        others = (
            leaf if isinstance(leaf, (bool, str, type(None))) else type(leaf)
            for leaf in self.leaves
            if not isinstance(leaf, torch.Tensor)
        )
        return len(self.tree[0]), *self.tree[1], *tensors, *others, *self.twins.items()

    def arguments(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with other leaves."""
        args, kwargs = filled(self.tree, leaves)
        return args, kwargs

    def part(self, rows: Rows, tensors: Sequence[torch.Tensor]) -> Leaves:
        """The leaves of a part. `tensors` stand in for those of the call, in their order."""
        leaves = list(self.leaves)
        for number, tensor in zip(self.tensors, tensors, strict=True):
            dim = self.batched.get(number)
            if dim is not None:
                mine = rows.mine(tensor, dim)
                leaves[number] = mine.contiguous() if dim else mine
            else:
                leaves[number] = tensor
        self.pair(leaves)
        return leaves

    def pair(self, leaves: Leaves) -> None:
        """What was one tensor is one again: attention looks whether its query is its key."""
        for number, first in self.twins.items():
            leaves[number] = leaves[first]


def _twins(leaves: Leaves, tensors: Sequence[int]) -> dict[int, int]:
    """Tensors that were given before, with where they were given first."""
    firsts = {id(leaves[n]): n for n in reversed(tensors)}
    return {n: firsts[id(leaves[n])] for n in tensors if firsts[id(leaves[n])] != n}


def _dim_of(shape: Sequence[int], size: int, *, second: bool) -> int | None:
    """Along which dimension of a tensor so many samples are."""
    if second and len(shape) > 1:
        return 1 if shape[1] == size else None
    if shape[0] == size:
        return 0
    return 1 if len(shape) == 3 and shape[1] == size else None


class Ambient:
    """Autocast and the random generators as they are now, to be so again."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._devices = sorted({"cpu", *(t.device.type for t in tensors)} - {"meta"})
        self._autocasts = [
            (d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d in self._devices
        ]
        self._cuda = sorted({t.get_device() for t in tensors if t.is_cuda})
        self.states = self._now()

    @contextlib.contextmanager
    def again(self, *, graded: bool) -> Iterator[None]:
        """Autocast as it was; casts that it keeps are not carried from or to elsewhere."""
        torch.clear_autocast_cache()
        with contextlib.ExitStack() as stack:
            for device, dtype, enabled in self._autocasts:
                stack.enter_context(torch.autocast(device, dtype, enabled))
            stack.enter_context(torch.set_grad_enabled(graded))
            yield
        torch.clear_autocast_cache()

    def rewind(self) -> None:
        """The random generators as they were."""
        self._set(self.states)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """What is drawn here changes nothing outside."""
        now = self._now()
        try:
            yield
        finally:
            self._set(now)

    def _now(self) -> tuple[torch.Tensor, ...]:
        return torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in self._cuda)

    def _set(self, states: Sequence[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        for device, state in zip(self._cuda, states[1:], strict=True):
            torch.cuda.set_rng_state(state, device)
