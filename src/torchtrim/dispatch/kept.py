"""Until when Python keeps the tensors that operators made: in a local of `forward`, a list, an attribute.

A weak reference does not tell: an object lives on while autograd keeps its tensor. Its references tell, of
which torch has one itself while C++ keeps the tensor too; `counts_tell` tries whether this torch does so.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

_OWN_REFERENCES = 2
_AT_ONCE = 32
"""So many objects are looked at for each operator: about 10 microseconds."""


class Kept:
    """The tensors that Python still keeps; `note` gets a storage's number when it keeps it no longer."""

    def __init__(self, note: Callable[[int], None]) -> None:
        self._note = note
        self._objects: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    def add(self, tensor: torch.Tensor, number: int) -> None:
        """An operator made this tensor, of a storage."""
        reference = weakref.ref(tensor)
        self._objects[id(reference)] = reference, number

    def sweep(self, clock: int) -> None:
        """Look which are kept no longer; where they are many, at every second operator, every third..."""
        if not self._objects or clock % (len(self._objects) // _AT_ONCE + 1):
            return
        for key, (reference, number) in list(self._objects.items()):
            if not is_kept(reference):
                self._objects.pop(key, None)
                self._note(number)

    def end(self) -> None:
        """What is kept still is kept to the end."""
        for _, number in self._objects.values():
            self._note(number)
        self._objects.clear()


def is_kept(reference: weakref.ref[torch.Tensor]) -> bool:
    """Whether Python has a reference to the tensor."""
    tensor: Any = reference()
    if tensor is None:
        return False
    shared: bool = tensor._use_count() > 1
    return sys.getrefcount(tensor) - _OWN_REFERENCES > shared


@functools.cache
def counts_tell() -> bool:
    """Whether this torch counts references as `is_kept` reads them."""
    with torch.inference_mode(False), torch.enable_grad(), torch._C._DisableTorchDispatch():
        made = torch.zeros(1, dtype=torch.float32, device="cpu", requires_grad=True) * 2
        saver, reference = made.sin(), weakref.ref(made)
        while_kept = is_kept(reference)
        del made
        return while_kept and saver.requires_grad and not is_kept(reference)
