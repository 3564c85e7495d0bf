"""What a captured network depends on besides the values of tensors: the call's and the module's own."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from torchtrim.errors import Unsupported

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def leaves_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], pytree.TreeSpec]:
    """The call's arguments, flat, in torch.export's order."""
    return pytree.tree_flatten((args, kwargs))


def signature_of(leaves: list[Any], spec: pytree.TreeSpec) -> Hashable:
    """Geometry of tensors and values of the rest. Raises `Unsupported` for what has neither."""
    return spec, tuple(_of_leaf(leaf) for leaf in leaves), _autocast()


def _of_leaf(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        if leaf.layout is not torch.strided or leaf.is_nested:
            raise Unsupported(f"an input is not dense but {leaf.layout}")
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.is_conj()
    if isinstance(leaf, _PLAIN):
        return type(leaf), leaf
    raise Unsupported(f"an argument is a {type(leaf).__name__}, which may be anything")


def _autocast() -> Hashable:
    return tuple(
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        for kind in ("cpu", "cuda")
    )
