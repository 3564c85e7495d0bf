"""Lets plain subclasses of `torch.Tensor` be constructed under a dispatch mode."""

from __future__ import annotations

from typing import Any

import torch

from torchtrim.dispatch.modes import has_own_dispatch
from torchtrim.dispatch.patches import Patches


def patch_subclasses(patches: Patches) -> None:
    """Construct `Subclass(tensor)` and `Subclass(3, 4)`, which torch refuses while a mode is active.

    The mode's alias already has a Python object of the plain type. So the data is created as torch does,
    and the alias of another type where no mode sees it: it shares the storage.
    """
    own: Any = torch.Tensor.__new__

    def new(*all_args: Any, **options: Any) -> Any:  # a signature that torch._dynamo accepts here
        kind, *args = all_args
        if kind is torch.Tensor or has_own_dispatch(kind):
            return own(kind, *args, **options)
        data = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if data is not None and has_own_dispatch(type(data)):
            return own(kind, *args, **options)
        if data is None:
            args, options = [own(torch.Tensor, *args, **options)], {}
        with torch._C._DisableTorchDispatch():
            return own(kind, *args, **options)

    patches.replace(torch.Tensor, "__new__", staticmethod(new))
