"""Prefetching of a loader's batches to the device while the previous step computes."""

from __future__ import annotations

import random
import sys
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch.utils._pytree import tree_leaves, tree_map

from torchtrim.errors import UsageError

T = TypeVar("T")
_IN_TURN = 2  # Batches that show, without prefetching, if fetching draws random numbers.


class _Fetched(NamedTuple):
    """Result of one fetch: a batch being copied, or the error raised."""

    batch: Any
    host: Any
    arrived: Any
    error: Exception | None


class Prefetcher(Generic[T]):
    """Iterator over a loader's batches on the device, with up to `depth` copied ahead on a side stream.

        for images, labels in Prefetcher(loader, "cuda"):
            ...

    The loader should pin its memory (`pin_memory=True`): copies from pageable memory block the host. Taking a
    batch fetches the next, while the device is still busy, without a thread or process, so a loop that ends
    early, or by Ctrl-C, leaves nothing behind. At most `depth` batches beyond the one in use take device
    memory.

    Order, values and random numbers match the loader's. An error of the loader is raised at its own
    batch, after those before it. A loader that draws random numbers in this process, such as one without
    workers and with random transforms, is not prefetched, since it would change the numbers that the step
    draws; `ahead` tells whether the loader is prefetched.

    Moves tensors in lists, tuples and dicts, and objects with a method `to`. Raises `UsageError` for a depth
    below 1 and for a missing device.
    """

    def __init__(self, loader: Iterable[T], device: Any = "cuda", depth: int = 1) -> None:
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
            raise UsageError(
                f"depth={depth!r}: the number of batches to prefetch must be 1 or more. Without "
                "prefetching, move each batch yourself."
            )
        self.loader = loader
        self.device = _device(device)
        self.depth = depth
        self.ahead = self.device.type != "cpu"

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[T]:
        return _Ahead(self)


class _Ahead(Iterator[T]):
    def __init__(self, owner: Prefetcher[T]) -> None:
        self._owner = owner
        self._source = iter(owner.loader)
        self._module: Any = None
        self._stream: Any = None
        if owner.device.type != "cpu":
            self._module = torch.get_device_module(owner.device)
            self._stream = self._module.Stream(device=owner.device)
        self._queue: deque[_Fetched] = deque()
        self._fetched = 0

    def __next__(self) -> T:
        self._fill()
        entry = self._queue.popleft()
        if entry.error is not None:
            raise entry.error
        if entry.arrived is not None:
            self._receive(entry)
        batch: T = entry.batch
        return batch

    def _fill(self) -> None:
        """Fetch until there is one batch to return and `depth` more, or an error."""
        ahead = self._owner.ahead and self._fetched >= _IN_TURN
        wanted = 1 + (self._owner.depth if ahead else 0)
        while len(self._queue) < wanted and not (self._queue and self._queue[-1].error):
            self._queue.append(self._fetch())
            if not self._owner.ahead:
                break

    def _fetch(self) -> _Fetched:
        judged = self._owner.ahead and self._fetched
        before = _generators() if judged else None
        self._fetched += 1
        try:
            host = next(self._source)
        except Exception as error:
            return _Fetched(None, None, None, error)
        if judged and before != _generators():
            self._stay_in_turn()
        device = self._owner.device
        if self._stream is None:
            return _Fetched(_moved(host, device), None, None, None)
        with self._module.stream(self._stream):
            batch = _moved(host, device)
            return _Fetched(batch, host, self._stream.record_event(), None)

    def _stay_in_turn(self) -> None:
        """Stop prefetching, and restore the random state that the prefetched batch has advanced."""
        self._owner.ahead = False
        if self._queue:
            warnings.warn(
                "the loader draws random numbers in this process, but did not for its first batches. "
                "One batch was fetched too early, before the step that should have drawn first. The "
                "others are not prefetched.",
                stacklevel=5,
            )

    def _receive(self, entry: _Fetched) -> None:
        """Make the step wait for the copy, and record the step's stream with the allocator."""
        stream = self._module.current_stream(self._owner.device)
        stream.wait_event(entry.arrived)
        for tensor in _tensors(entry.batch):
            if tensor.device.type == self._owner.device.type:
                tensor.record_stream(stream)


def _device(device: Any) -> torch.device:
    try:
        known = torch.device(device)
        if known.type == "cpu" or torch.get_device_module(known).is_available():
            return known
    except (RuntimeError, TypeError, AttributeError):
        pass
    raise UsageError(
        f"device={device!r} does not exist on this machine. Give the model's device. On a "
        "CPU batches need no copy, and the loader's workers prefetch."
    )


def _moves(value: Any) -> bool:
    return hasattr(value, "to")


def _moved(batch: Any, device: torch.device) -> Any:
    return tree_map(
        lambda one: one.to(device, non_blocking=True) if _moves(one) else one, batch, is_leaf=_moves
    )


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):
            yield from _tensors(dict(leaf))
        elif _moves(leaf) and hasattr(leaf, "__dict__"):
            yield from _tensors(dict(vars(leaf)))


def _generators() -> tuple[Any, ...]:
    numpy: Any = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy else None
    drawn = (state[1].tobytes(), state[2]) if state else None
    return random.getstate(), torch.get_rng_state().numpy().tobytes(), drawn
