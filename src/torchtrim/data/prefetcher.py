"""Copies a loader's next batches to the device while the step before computes."""

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
_IN_TURN = 2
"""Batches that are fetched in their turn, before it is known whether fetching one draws random numbers."""


class _Fetched(NamedTuple):
    """What the loader gave when it was asked once: a batch on its way, or an error in its place."""

    batch: Any
    host: Any
    arrived: Any
    error: Exception | None


class Prefetcher(Generic[T]):
    """Goes over a loader's batches on the device, up to `depth` copied ahead on a stream of its own.

        for images, labels in Prefetcher(loader, "cuda"):
            ...

    The loader should pin its memory (`pin_memory=True`): a copy from other memory keeps the host waiting.
    There is no thread and no process: the next batch is asked for when one is taken, while the device is
    still at work, so a loop that is left early, or by Ctrl-C, leaves nothing behind. At most `depth` batches
    beyond the one in use take memory on the device.

    Order, values and random numbers are those of the loader. An error that the loader raises comes at
    the batch that it is about, after the ones before it. A loader that draws random numbers in this process,
    as one without workers does for random transforms, is asked in turn and not ahead, since what it drew
    would else be what the step was to draw; `ahead` says whether it is asked ahead.

    Tensors are found in lists, tuples, dicts, and what has a method `to`. Raises `UsageError` for a
    depth below 1, and for a device that there is not.
    """

    def __init__(self, loader: Iterable[T], device: Any = "cuda", depth: int = 1) -> None:
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
            raise UsageError(
                f"depth={depth!r}: it is how many batches are copied ahead, 1 or more. Without any, move "
                "each batch by itself."
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
    """One way through the loader."""

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
        """Fetch until there is one to give and `depth` more; nothing beyond an error."""
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
        return self._sent(host)

    def _stay_in_turn(self) -> None:
        """Ask ahead no more. What one was asked ahead for has drawn what the step was to draw."""
        self._owner.ahead = False
        if self._queue:
            warnings.warn(
                "the loader draws random numbers in this process, and did not for its first batches: "
                "one was asked for before the step that was to draw first. All others are asked in turn.",
                stacklevel=5,
            )

    def _sent(self, host: Any) -> _Fetched:
        device = self._owner.device
        if self._stream is None:
            return _Fetched(_moved(host, device), None, None, None)
        with self._module.stream(self._stream):
            batch = _moved(host, device)
            return _Fetched(batch, host, self._stream.record_event(), None)

    def _receive(self, entry: _Fetched) -> None:
        """Order the step behind the copy, and have the allocator know of the step."""
        stream = self._module.current_stream(self._owner.device)
        stream.wait_event(entry.arrived)
        for tensor in _tensors(entry.batch):
            if tensor.device.type == self._owner.device.type:
                tensor.record_stream(stream)


def _device(device: Any) -> torch.device:
    try:
        found = torch.device(device)
        if found.type == "cpu" or torch.get_device_module(found).is_available():
            return found
    except (RuntimeError, TypeError, AttributeError):
        pass
    raise UsageError(
        f"device={device!r} is not on this machine. Give the device that the model is on; on a CPU batches "
        "need no copy, and a loader reads ahead by its workers."
    )


def _moves(value: Any) -> bool:
    return hasattr(value, "to")


def _moved(batch: Any, device: torch.device) -> Any:
    """The batch with all that can be moved on the device; what cannot stays as it is."""
    return tree_map(
        lambda one: one.to(device, non_blocking=True) if _moves(one) else one, batch, is_leaf=_moves
    )


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    """The tensors of a batch, also those inside what moves as one."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):
            yield from _tensors(dict(leaf))
        elif _moves(leaf) and hasattr(leaf, "__dict__"):
            yield from _tensors(dict(vars(leaf)))


def _generators() -> tuple[Any, ...]:
    """What the host's generators of random numbers will draw next."""
    numpy: Any = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy else None
    drawn = (state[1].tobytes(), state[2]) if state else None
    return random.getstate(), torch.get_rng_state().numpy().tobytes(), drawn
