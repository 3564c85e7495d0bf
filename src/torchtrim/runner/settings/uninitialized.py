"""What `Module.to_empty` leaves: the same small numbers in every run of a script, and who keeps them.

Memory that nothing has written holds anything, so two runs of a script that trains on it never agree.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

_SEED = 7_081_990
_SCALE = 0.02
_NOTE = (
    "{count} tensors of {root}, first `{first}`, hold what `to_empty` left in memory: the script has not "
    "written them before its first forward. Here they are the same small numbers in every run; without "
    "torchtrim they hold anything. Have `reset_parameters` reach them"
)


class _Left(NamedTuple):
    """A tensor as `to_empty` left it, and the versions that it and this rank's part of it had."""

    tensor: weakref.ref[torch.Tensor]
    versions: tuple[int, int]


_left: dict[int, _Left] = {}


def install() -> None:
    """From now on fill what `to_empty` leaves, in this process."""
    original = nn.Module.to_empty

    @functools.wraps(original)
    def to_empty(module: nn.Module, *args: Any, **options: Any) -> Any:
        result = original(module, *args, **options)
        with _disable_current_modes(), torch.no_grad():
            _fill(module)
        return result

    nn.Module.to_empty = to_empty  # type: ignore[assignment, method-assign]


def note_on(root: nn.Module) -> tuple[str, ...]:
    """What is to be said of a root whose first forward begins; nothing where all was written."""
    names = [name for name, tensor in _tensors_of(root) if _is_left(tensor)]
    if not names:
        return ()
    return (_NOTE.format(count=len(names), root=type(root).__name__, first=names[0]),)


def _fill(module: nn.Module) -> None:
    draws = torch.Generator().manual_seed(_SEED)
    for _, tensor in _tensors_of(module):
        own = _own_part(tensor)
        if own.is_floating_point():
            drawn = torch.empty(own.shape, dtype=torch.float32, device="cpu")
            own.copy_(drawn.normal_(0.0, _SCALE, generator=draws))
        else:
            own.zero_()
        _left[id(tensor)] = _Left(weakref.ref(tensor), _versions(tensor))


def _is_left(tensor: torch.Tensor) -> bool:
    left = _left.get(id(tensor))
    return left is not None and left.tensor() is tensor and left.versions == _versions(tensor)


def _versions(tensor: torch.Tensor) -> tuple[int, int]:
    """What writes to a sharded tensor counts at that, or at its part."""
    return tensor._version, _own_part(tensor)._version


def _own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Of a tensor that is shared out over ranks, the part of this one."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def _tensors_of(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers, by name."""
    return [*module.named_parameters(), *module.named_buffers()]
