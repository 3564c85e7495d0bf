"""Keeps weights that a plan has updated ahead of the program's own `step` from being saved or returned.

After a backward that updated parameters comes `step`. Where the program is thrown out in between (Ctrl-C, an
exception) and saves its weights in a handler, they are not the original's.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

Check = Callable[[], None]


@contextlib.contextmanager
def checked_saves(check: Check) -> Iterator[None]:
    """Call `check` before each `state_dict` of a module and each `torch.save`; it raises to stop them."""
    with contextlib.ExitStack() as undo:
        for owner, name in ((nn.Module, "state_dict"), (torch, "save")):
            undo.callback(_checking(owner, name, check))
        yield


def _checking(owner: Any, name: str, check: Check) -> Callable[[], None]:
    """Put the check before a function; the result takes it off, unless another has wrapped it meanwhile."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def checked(*args: Any, **kwargs: Any) -> Any:
        check()
        return original(*args, **kwargs)

    def restore() -> None:
        if getattr(owner, name) is checked:
            setattr(owner, name, original)

    setattr(owner, name, checked)
    return restore
