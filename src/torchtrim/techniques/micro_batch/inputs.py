"""Inputs of a call: its leaves, those with a batch dimension, and the number of samples."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from torchtrim.executor.arguments import as_they_are
from torchtrim.techniques.micro_batch.rows import Leaves, SampleRows, filled, leaves_of

_SEQUENCES = 2, 3
"""Numbers of dimensions of a sequence that may have its samples along the second."""


class CallArguments(NamedTuple):
    """A call's arguments.

    `tensors`: indices of the tensors among the leaves. `batched`: the batch dimension of those that have one,
    of size `size`. `times`: length of the first dimension if samples are along the second of the first
    tensor, else 1.
    """

    tree: tuple[Any, Any]
    leaves: Leaves
    tensors: tuple[int, ...]
    batched: dict[int, int]
    size: int
    times: int = 1
    twins: Mapping[int, int] = {}

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any], *, second: bool = False) -> CallArguments:
        """Find the batch dimension of a call's arguments. The batch size is 0 if no tensor has dimensions.

        The first tensor with dimensions decides. Samples are along its first dimension; in states of
        recurrent layers (layers x samples x width), along the second. `second`: samples are along the second
        dimension of the first tensor, as in sequences of recurrent layers and transformers (times x samples,
        or times x samples x width).
        """
        leaves = leaves_of((args, kwargs))
        tensors = tuple(n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor))
        shaped = [n for n in tensors if leaves[n].dim()]
        first: Sequence[int] = leaves[shaped[0]].shape if shaped else ()
        if second and len(first) not in _SEQUENCES:
            return CallArguments((args, kwargs), leaves, tensors, {}, 0)
        size = first[1] if second else first[0] if first else 0
        dims = {n: _dim_of(leaves[n].shape, size, second=second) for n in shaped}
        batched = {number: dim for number, dim in dims.items() if dim is not None}
        times = first[0] if second else 1
        return CallArguments(
            (args, kwargs), leaves, tensors, batched, size, times, _twins(leaves, tensors)
        )

    @property
    def transposed(self) -> CallArguments:
        """Return the call with samples along the second dimension, or with none if that is impossible."""
        return CallArguments.of(*self.tree, second=True)

    @property
    def without_tensors(self) -> CallArguments:
        """Return the call as it is now, without its tensors, which are kept elsewhere."""
        bare = [None if n in self.tensors else leaf for n, leaf in enumerate(self.leaves)]
        leaves = as_they_are(bare)
        return self._replace(tree=filled(self.tree, leaves), leaves=leaves)

    @property
    def signature(self) -> tuple[Any, ...]:
        """Return a key of the call, equal for calls that differ only in sizes."""
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
        """Return copies of the arguments with other leaves."""
        args, kwargs = as_they_are(filled(self.tree, leaves))
        return args, kwargs

    def part(self, rows: SampleRows, tensors: Sequence[torch.Tensor]) -> Leaves:
        """Return the leaves of a part. `tensors` replace the call's own, in order."""
        leaves = list(self.leaves)
        for number, tensor in zip(self.tensors, tensors, strict=True):
            dim = self.batched.get(number)
            leaves[number] = tensor if dim is None else rows.mine(tensor, dim)
            if dim:
                leaves[number] = leaves[number].contiguous()
        self.pair(leaves)
        return leaves

    def pair(self, leaves: Leaves) -> None:
        """Restore shared identity: attention checks whether its query is its key."""
        for number, first in self.twins.items():
            leaves[number] = leaves[first]


def _twins(leaves: Leaves, tensors: Sequence[int]) -> dict[int, int]:
    """Map repeated tensors to their first occurrence."""
    firsts = {id(leaves[n]): n for n in reversed(tensors)}
    return {n: firsts[id(leaves[n])] for n in tensors if firsts[id(leaves[n])] != n}


def _dim_of(shape: Sequence[int], size: int, *, second: bool) -> int | None:
    if second and len(shape) > 1:
        return 1 if shape[1] == size else None
    if shape[0] == size:
        return 0
    return 1 if len(shape) == 3 and shape[1] == size else None


class Ambient:
    """Saved state of autocast and the random generators."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._devices = sorted({"cpu", *(t.device.type for t in tensors)} - {"meta"})
        self._autocasts = [
            (d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d in self._devices
        ]
        self._cuda = sorted({t.get_device() for t in tensors if t.is_cuda})
        self.states = self._now()

    @contextlib.contextmanager
    def again(self, *, graded: bool) -> Iterator[None]:
        """Restore autocast, with its cast cache separate from the surrounding code's."""
        torch.clear_autocast_cache()
        with contextlib.ExitStack() as stack:
            for device, dtype, enabled in self._autocasts:
                stack.enter_context(torch.autocast(device, dtype, enabled))
            stack.enter_context(torch.set_grad_enabled(graded))
            yield
        torch.clear_autocast_cache()

    def rewind(self) -> None:
        """Restore the random generators."""
        self._set(self.states)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Run code without a lasting effect on the random generators."""
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
