"""Replacement of a module's forward by one that returns lazy logits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _global_backward_hooks, _global_backward_pre_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from torchtrim.errors import ApplyFailed
from torchtrim.executor.notices import say_once
from torchtrim.executor.swap import Swapped
from torchtrim.techniques.chunked_loss.logits import Logits, head_of

Forward = Callable[..., Any]
_PRODUCTS = ("matmul", "mm", "__matmul__")


def replaced(root: nn.Module, path: str, where: str, rows: int, classes: int) -> Swapped:
    """Make the module at a path return a stand-in, or its matrix products with `classes` columns.

    Backward hooks, on the module or on one around it, need a result of autograd: it is computed then.
    """
    names = path.split(".") if path else []
    around = [root.get_submodule(".".join(names[:depth])) for depth in range(len(names) + 1)]
    module = around[-1]

    def lazily(lazy: Forward) -> Callable[[Forward], Forward]:
        return lambda forward: functools.partial(_unless_hooked, where, around, lazy, forward)

    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return Swapped(module, lazily(functools.partial(_of_linear, module, where, rows)))
    if not classes:
        raise ApplyFailed(
            f"`{where}` is a {type(module).__name__}, not an nn.Linear, so chunked_loss cannot tell which of "
            "its products are logits. Give the option classes, the number of classes."
        )
    return Swapped(module, lazily(functools.partial(_of_products, module, where, rows, classes)))


def _unless_hooked(
    where: str,
    around: Sequence[nn.Module],
    lazy: Forward,
    forward: Forward,
    *args: Any,
    **kwargs: Any,
) -> Any:
    hooked = any(one._backward_hooks or one._backward_pre_hooks for one in around)
    if hooked or _global_backward_hooks or _global_backward_pre_hooks:
        say_once(
            where,
            "it or a module around it has backward hooks now, which need its logits, so they are computed, "
            "and chunked_loss saves nothing there.",
        )
        return forward(*args, **kwargs)
    return lazy(forward, *args, **kwargs)


def _of_linear(module: nn.Linear, where: str, rows: int, forward: Forward, input: Any) -> Any:
    made = _lazy_product(input, module.weight, module.bias, where, rows)
    return forward(input) if made is None else made


def _lazy_product(hidden: Any, weight: Any, bias: Any, where: str, rows: int) -> Logits | None:
    """Return the stand-in for a product, or None if it must be computed: no gradients, or special tensors."""
    plain = all(isinstance(one, Tensor) for one in (hidden, weight)) and type(hidden) is Tensor
    if not plain or not torch.is_grad_enabled():
        return None
    if not (hidden.requires_grad or weight.requires_grad) or not hidden.dim():
        return None
    return head_of(hidden, weight, bias, where, rows)


def _of_products(
    module: nn.Module,
    where: str,
    rows: int,
    classes: int,
    forward: Forward,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, nn.Parameter)]
    with _Products((*module.parameters(), *given), where, rows, classes):
        return forward(*args, **kwargs)


class _Products(TorchFunctionMode):
    """Replaces products with one of these matrices, or a part of it, that has this many classes."""

    def __init__(
        self, matrices: Iterable[nn.Parameter], where: str, rows: int, classes: int
    ) -> None:
        super().__init__()
        self._own = {id(one) for one in matrices if one.dim() == 2}
        self._where, self._rows, self._classes = where, rows, classes

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operands = self._operands(getattr(func, "__name__", ""), args, kwargs)
        made = operands and _lazy_product(*operands, self._where, self._rows)
        return func(*args, **kwargs) if made is None else made

    def _operands(
        self, name: str, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor | None] | None:
        if name == "linear" and len(args) > 1 and self._is_own(args[1]):
            return args[0], args[1], args[2] if len(args) > 2 else kwargs.get("bias")
        if name not in _PRODUCTS or len(args) != 2 or kwargs:
            return None
        hidden, turned = args
        if not isinstance(turned, Tensor) or turned.dim() != 2:
            return None
        return (hidden, turned.t(), None) if self._is_own(turned.t()) else None

    def _is_own(self, weight: Any) -> bool:
        if not isinstance(weight, Tensor) or weight.dim() != 2:
            return False
        whole = weight if weight._base is None else weight._base
        return id(whole) in self._own and len(weight) == self._classes
