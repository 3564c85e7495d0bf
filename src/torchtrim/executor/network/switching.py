"""Switch a technique on for all modules of a plan, or leave all of them unchanged."""

from __future__ import annotations

import ctypes
import tempfile
import weakref
from collections.abc import Mapping
from typing import IO, Any, NamedTuple

import torch
from torch import nn

from torchtrim.errors import ApplyFailed
from torchtrim.executor.network.planned import Planned
from torchtrim.executor.places import module_at
from torchtrim.executor.registry import Handles
from torchtrim.records.plan import Technique

_AT_ONCE = 64 * 2**20  # Arbitrary: bytes copied at once, large enough for the disk's full speed.


class _Place(NamedTuple):
    """A gradient as a view of a block: the block's number, geometry and dtype."""

    parameter: nn.Parameter
    block: int
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class _Block(NamedTuple):
    """A block of memory in the file, or a block of zeros, which is not written."""

    bytes: int
    device: torch.device
    at: int


class Aside:
    """Stash of the gradients of a module's parameters, which `revert` restores bit for bit.

    Gradients that shared memory share it again, with the same offsets and strides. If a parameter got a new
    gradient in the meantime, the stashed one is dropped. Raises `ApplyFailed` if the disk is full.
    """

    def __init__(self, module: nn.Module) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile(prefix="torchtrim-")  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        self._blocks: list[_Block] = []
        self._places: list[_Place] = []
        numbers: dict[int, int] = {}
        try:
            for parameter in module.parameters():
                if (grad := parameter.grad) is not None and grad.layout is torch.strided:
                    storage, at = grad.untyped_storage(), int(grad.storage_offset())
                    number = numbers.setdefault(storage._cdata, len(self._blocks))
                    if number == len(self._blocks):
                        self._blocks.append(self._save(storage))
                    geometry = grad.shape, grad.stride(), at, grad.dtype
                    self._places.append(_Place(parameter, number, *geometry))
        except OSError as error:
            self._file.close()
            raise ApplyFailed(
                f"could not stash the gradients in {tempfile.gettempdir()}: {error}. The model is "
                "unchanged. Free space there, set TMPDIR to another disk, or keep the gradients in "
                "memory (remove_grad_params=False)."
            ) from error
        for place in self._places:
            place.parameter.grad = None

    def revert(self) -> None:
        """Restore the gradients."""
        blocks: dict[int, torch.UntypedStorage] = {}
        for place in self._places:
            if place.parameter.grad is None:
                if place.block not in blocks:
                    blocks[place.block] = self._load(self._blocks[place.block])
                empty = torch.empty(0, dtype=place.dtype, device=self._blocks[place.block].device)
                storage: Any = blocks[place.block]
                place.parameter.grad = empty.set_(storage, place.offset, place.shape, place.strides)
        self._places.clear()
        self._blocks.clear()
        self._file.close()

    def _save(self, storage: torch.UntypedStorage) -> _Block:
        size, at = storage.nbytes(), self._file.seek(0, 2)
        whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        if not whole.count_nonzero():
            return _Block(size, storage.device, -1)
        for first in range(0, size, _AT_ONCE):
            part = whole[first : first + _AT_ONCE].cpu()
            self._file.write(_memory_of(part))
        return _Block(size, storage.device, at)

    def _load(self, block: _Block) -> torch.UntypedStorage:
        whole = torch.zeros(block.bytes, dtype=torch.uint8, device=block.device)
        if block.at >= 0:
            self._file.seek(block.at)
            for first in range(0, block.bytes, _AT_ONCE):
                size = min(_AT_ONCE, block.bytes - first)
                part = torch.empty(size, dtype=torch.uint8, device="cpu")
                self._file.readinto(_memory_of(part))  # type: ignore[attr-defined]
                whole[first : first + len(part)].copy_(part)
        return whole.untyped_storage()


def _memory_of(tensor: torch.Tensor) -> memoryview:
    kind: Any = ctypes.c_ubyte * len(tensor)
    return memoryview(kind.from_address(tensor.data_ptr())).cast("B")


def switch_on(roots: Mapping[str, nn.Module], technique: Technique) -> Handles:
    """Switch the technique on. Raises `ApplyFailed` for an unknown place and leaves the modules unchanged."""
    handles = Handles()
    try:
        for where in technique.where:
            module = module_at(roots, where)
            handles.add(Planned.of(module).switch_on(technique.name, technique.options))
            if technique.options.get("gradients"):
                handles.add(Aside(module))
    except BaseException:
        handles.revert()
        raise
    return handles
