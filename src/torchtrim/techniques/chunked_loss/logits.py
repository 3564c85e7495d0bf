"""Lazy logits: computed only if something other than cross entropy reads them.

`Logits` replaces a head's output. Functions that only move elements (views, shifts, transposes, casts)
apply to the hidden states or their description. Cross entropy reads the hidden states directly. Every other
function gets the real logits, which are then computed and kept.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map

from torchtrim.errors import ApplyFailed
from torchtrim.executor.autograd import only_once
from torchtrim.executor.failing import note
from torchtrim.executor.ordinals import storage_number
from torchtrim.techniques.chunked_loss.moves import MOVES, MovedHidden
from torchtrim.techniques.chunked_loss.ops import chunked_cross_entropy, linear_cross_entropy


class Head(NamedTuple):
    """Source of logits: `hidden`, with its width at dimension `moved.dim`, and the weights.

    `autocast`: dtype the head ran in, or None. `versions`: versions and storages of the three tensors.
    `where` and `rows` are from the plan.
    """

    moved: MovedHidden
    bias: Tensor | None
    dtype: torch.dtype
    autocast: torch.dtype | None
    versions: tuple[int, ...]
    where: str
    rows: int

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Hidden states, weight, and bias if there is one."""
        found = (self.moved.hidden, self.moved.weight, self.bias)
        return tuple(one for one in found if one is not None)

    def check(self) -> None:
        """Raise if hidden states or weights have changed."""
        if _states_of(self.tensors) != self.versions:
            raise _refused(
                f"the logits of `{self.where}` are read after its weights or its input changed, so "
                "chunked_loss can no longer compute them. Read them before the optimizer steps, or "
                "take it out of the plan.",
                self.where,
            )


class Logits(Tensor):
    """Stand-in for logits. `head` computes them; `there` holds them afterwards."""

    head: Head
    there: Tensor | None
    log_probabilities: bool
    _family: list[weakref.ref[Logits]]

    @staticmethod
    def of(head: Head, real: Tensor | None = None, log: bool = False, family: Any = None) -> Logits:
        """Return logits of a head, or the existing ones in `real`. `log`: they are a log_softmax."""
        shape = head.moved.shape if real is None else real.shape
        make: Any = Tensor._make_wrapper_subclass
        device = head.moved.hidden.device
        made: Logits = make(Logits, shape, dtype=head.dtype, device=device)
        made.head, made.there, made.log_probabilities = head, real, log
        made._family = family if family is not None else []
        made._family.append(weakref.ref(made))
        if torch.is_grad_enabled():
            made.join_graph()
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = _name_of(func)
        if name in _GEOMETRY:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for handle in (_answer_query, _train, _chunked_loss, _apply_move):
            found = handle(name, func, args, kwargs)
            if found is not NotImplemented:
                return found
        return _run_with_logits(name, func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        mine = next((one for one in args if isinstance(one, Logits)), None)
        where = mine.head.where if mine is not None else ""
        raise _refused(
            f"{func} reads the logits of `{where}` below Python, where chunked_loss cannot compute them. "
            "Take it out of the plan.",
            where,
        )

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return (["there"] if self.there is not None else []), None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Tensor:
        real: Tensor = inner["there"]
        return real

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """Tensors they are computed from, or the real logits if these are there."""
        return self.head.tensors if self.there is None else (self.there,)

    def made_from(self) -> Tensor:
        """Tensor they are computed from, which is on the same device."""
        return self.head.moved.hidden

    def value(self) -> Tensor:
        """Return the real logits, computed at first use and kept if gradients are on."""
        real = self.there
        if real is None:
            # Saved as they are: a checkpoint around the reader alone finds them computed when it reruns.
            with saved_tensors_hooks(_same, _same):
                real = _computed(self.head, self.head.tensors)
            if torch.is_grad_enabled():
                self.there = real
        return _read(real, self.head, log=self.log_probabilities)

    def join_graph(self) -> None:
        """Have autograd's graph lead from these to what they are computed from."""
        _InGraph.apply([self], *self.operands)  # type: ignore[no-untyped-call]

    def become_real(self) -> None:
        """Compute the logits for good before a write. Raises if aliases exist."""
        others = [one for ref in self._family if (one := ref()) is not None and one is not self]
        if self.log_probabilities or (self.there is None and others):
            raise _refused(
                f"the logits of `{self.head.where}` are changed in place while other variables alias "
                "them, which chunked_loss does not support. Take it out of the plan.",
                self.head.where,
            )
        with torch.enable_grad():
            self.value()


class _InGraph(torch.autograd.Function):
    """Gives logits a place in autograd's graph, for code that reads them below Python, such as the call of
    another `autograd.Function`: they would be a constant to it.
    """

    @staticmethod
    def forward(ctx: Any, logits: list[Logits], *given: Tensor) -> Tensor:
        (made,) = logits
        ctx.head, ctx.is_real, ctx.given = made.head, made.there is not None, given
        ctx.log_probabilities = made.log_probabilities
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        only_once("chunked_loss")
        pairs = zip(ctx.given, ctx.needs_input_grad[1:], strict=True)
        given = [one.detach().requires_grad_(needed) for one, needed in pairs]
        with torch.enable_grad():
            real = given[0] if ctx.is_real else _computed(ctx.head, given)
            made = _read(real, ctx.head, log=ctx.log_probabilities)
        wanted = [one for one in given if one.requires_grad]
        found = iter(torch.autograd.grad(made, wanted, gradient))
        return None, *(next(found) if one.requires_grad else None for one in given)


def _states_of(tensors: Iterable[Tensor | None]) -> tuple[int, ...]:
    """Return what changes with a tensor's values: its version, and its memory, which `.data` replaces."""
    known = (one for one in tensors if one is not None)
    return tuple(number for one in known for number in (one._version, storage_number(one)))


def head_of(hidden: Tensor, weight: Tensor, bias: Tensor | None, where: str, rows: int) -> Logits:
    """Return the stand-in for `hidden @ weight.T + bias`."""
    device = hidden.device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    dtype = hidden.dtype if autocast is None or hidden.dtype is torch.float64 else autocast
    moved = MovedHidden(hidden, weight, hidden.dim() - 1)
    versions = _states_of((hidden, weight, bias))
    return Logits.of(Head(moved, bias, dtype, autocast, versions, where, rows))


def kept(real: Tensor, dim: int, where: str, rows: int) -> Logits:
    """Return the stand-in for existing logits with the classes at `dim`."""
    one, dim = real.detach().new_zeros(1), dim % real.dim()
    shape = [1 if at == dim else size for at, size in enumerate(real.shape)]
    moved = MovedHidden(one.expand(shape), one.expand(real.shape[dim]), dim)
    return Logits.of(Head(moved, None, real.dtype, None, (), where, rows), real)


def _computed(head: Head, given: Sequence[Tensor]) -> Tensor:
    """Return a head's logits of other hidden states, weight, and bias."""
    head.check()
    hidden, weight, *bias = given
    hidden = hidden.movedim(head.moved.dim, -1)
    with torch.autocast(hidden.device.type, dtype=head.autocast, enabled=head.autocast is not None):
        made = F.linear(hidden, weight, *bias)
    return made.to(head.dtype).movedim(-1, head.moved.dim)


def _read(real: Tensor, head: Head, *, log: bool) -> Tensor:
    """Return the real logits, or their log probabilities."""
    return F.log_softmax(real, head.moved.dim) if log else real


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _name_of(func: Any) -> str:
    """Return a function's name, `.shape` for reading an attribute, `__set__` for setting one."""
    name: str = getattr(func, "__name__", "")
    if name != "__get__":
        return name
    owner = func.__self__
    return f".{getattr(owner, '__name__', '') or getattr(owner.fget, '__name__', '')}"


def _answer_query(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    if name == ".__cuda_array_interface__" and args[0].device.type == "cpu":
        raise AttributeError("logits on the CPU have no __cuda_array_interface__")
    if name not in (".requires_grad", ".is_leaf"):
        return NotImplemented
    mine: Logits = args[0]
    graded = any(one.requires_grad for one in mine.operands)
    return graded if name == ".requires_grad" else not graded


def _train(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """Have detached logits require gradients of their own, as a checkpoint that is given them does."""
    sets = name == "__set__" and func.__self__.__name__ == "requires_grad"
    if not (sets or name == "requires_grad_") or args[0].requires_grad:
        return NotImplemented
    mine: Logits = args[0]
    with torch.no_grad():
        mine.there, mine.log_probabilities = mine.value(), False
    func(mine.there, *args[1:], **kwargs)
    with torch.enable_grad():
        mine.join_graph()
    return None if sets else mine


def _apply_move(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """Return lazy logits with the same elements, or some of them."""
    if not args or not isinstance(args[0], Logits):
        return NotImplemented
    mine: Logits = args[0]
    if name == "log_softmax" and not mine.log_probabilities:
        return _log_softmax(mine, func, args, kwargs)
    move = MOVES.get(name)
    moved = move(mine.head.moved, *args[1:], **kwargs) if move is not None else None
    dtype = _cast(name, mine, args[1:], kwargs) if moved is None else mine.head.dtype
    if moved is None and dtype is None:
        return NotImplemented
    real = func(mine.there, *args[1:], **kwargs) if mine.there is not None else None
    if dtype is not None and moved is None:
        return Logits.of(mine.head._replace(dtype=dtype), real, mine.log_probabilities)
    assert moved is not None
    bias = mine.head.bias
    if bias is not None and name == "detach":
        bias = bias.detach()
    if bias is not None and moved.classes is not None:
        bias = bias[moved.classes]
    versions = mine.head.versions
    if mine.there is None:
        mine.head.check()
        versions = _states_of((moved.hidden, moved.weight, bias))
    head = mine.head._replace(moved=moved._replace(classes=None), bias=bias, versions=versions)
    return Logits.of(head, real, mine.log_probabilities, mine._family)


def _log_softmax(mine: Logits, func: Any, args: Any, kwargs: Any) -> Any:
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if dim is None or dim % mine.dim() != mine.head.moved.dim or kwargs.get("dtype") is not None:
        return NotImplemented
    return Logits.of(mine.head, mine.there, log=True)


def _cast(name: str, mine: Logits, args: Any, kwargs: Any) -> torch.dtype | None:
    """Return the target dtype if a function only casts, else None."""
    kind = _CASTS.get(name)
    given = [*args, *kwargs.values()]
    if name == "to" and len(given) == 1 and not {*kwargs} - {"dtype", "device"}:
        kind = given[0] if isinstance(given[0], torch.dtype) else None
        if isinstance(given[0], (str, torch.device)) and torch.device(given[0]) == mine.device:
            kind = mine.head.dtype
    if name in ("contiguous", "clone") and not args and not kwargs:
        kind = mine.head.dtype
    wide = mine.head.moved.hidden.dtype is torch.float64
    return kind if kind is not torch.float64 or wide else None


def _chunked_loss(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    loss = _LOSSES.get(name)
    if loss is None:
        return NotImplemented
    try:
        return loss(*args, **kwargs)
    except TypeError:
        return NotImplemented


def _class_loss(
    log: bool,
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    known = isinstance(input, Logits) and input.log_probabilities is log
    dated = size_average is not None or reduce is not None
    if not known or dated or (log and label_smoothing):
        return NotImplemented
    return _loss(input, target, weight, reduction, ignore_index, label_smoothing)


def _logsumexp(input: Any, dim: Any, keepdim: bool = False) -> Any:
    """Return the logsumexp, for z-losses: the loss of class 0 plus its logit."""
    known = isinstance(input, Logits) and input.there is None and not input.log_probabilities
    dim = dim[0] if isinstance(dim, (list, tuple)) and len(dim) == 1 else dim
    if not known or not isinstance(dim, int) or dim % input.dim() != input.head.moved.dim:
        return NotImplemented
    shape = [n for at, n in enumerate(input.shape) if at != input.head.moved.dim]
    zeros = torch.zeros(shape, dtype=torch.int64, device=input.device)
    input.head.check()
    hidden, weight, bias = _operands(input.head)
    lost = linear_cross_entropy(
        hidden, weight, zeros.view(-1), bias, reduction="none", rows=input.head.rows
    )
    first = F.linear(hidden, weight[:1], None if bias is None else bias[:1]).squeeze(1)
    found = (lost + first).view(shape).to(_loss_type(input))
    return found.unsqueeze(input.head.moved.dim) if keepdim else found


def _gathered(input: Any, dim: Any, index: Any, *, sparse_grad: bool = False) -> Any:
    """Return one log probability of each row: its negative loss."""
    known = isinstance(input, Logits) and input.log_probabilities and not sparse_grad
    last = input.dim() - 1 if known else -1
    if not known or dim not in (-1, last) or input.head.moved.dim != last:
        return NotImplemented
    if not isinstance(index, Tensor) or index.shape != (*input.shape[:-1], 1):
        return NotImplemented
    flat, classes = input.reshape(-1, input.shape[-1]), index.reshape(-1)
    lost = _class_loss(True, flat, classes, ignore_index=_NO_CLASS, reduction="none")
    return lost if lost is NotImplemented else lost.neg().view(index.shape)


_NO_CLASS = torch.iinfo(torch.int64).min
"""`gather` ignores no index."""
_LOSSES: dict[str, Callable[..., Any]] = {
    "cross_entropy": functools.partial(_class_loss, False),
    "nll_loss": functools.partial(_class_loss, True),
    "logsumexp": _logsumexp,
    "gather": _gathered,
}


def _loss(
    mine: Logits,
    target: Any,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
) -> Any:
    """Compute the loss if the target gives one class per row."""
    dim, shape = mine.head.moved.dim, list(mine.shape)
    classes_at = 0 if len(shape) == 1 else 1
    rows_shape = shape[:dim] + shape[dim + 1 :]
    known = isinstance(target, Tensor) and type(target) is Tensor and dim == classes_at
    if not known or target.is_floating_point() or list(target.shape) != rows_shape:
        return NotImplemented
    rule: dict[str, Any] = {
        "class_weight": weight,
        "reduction": reduction,
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "rows": mine.head.rows,
    }
    if mine.there is not None:
        real = mine.there if len(shape) > 1 else mine.there.unsqueeze(0)
        found = chunked_cross_entropy(real, target.reshape(rows_shape or (1,)), **rule)
    else:
        mine.head.check()
        hidden, head_weight, bias = _operands(mine.head)
        found = linear_cross_entropy(hidden, head_weight, target.reshape(-1), bias, **rule)
    found = found.view(rows_shape) if reduction == "none" else found
    return found.to(_loss_type(mine))


def _operands(head: Head) -> tuple[Tensor, Tensor, Tensor | None]:
    moved = head.moved
    hidden = moved.hidden.movedim(moved.dim, -1).reshape(-1, moved.width)
    weight, bias = moved.weight, head.bias
    if head.autocast is None or hidden.dtype is torch.float64:
        return hidden, weight, bias
    dtype = head.autocast
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def _loss_type(mine: Logits) -> torch.dtype:
    on = torch.is_autocast_enabled(mine.device.type) and mine.head.dtype is not torch.float64
    return torch.float32 if on else mine.head.dtype


def _run_with_logits(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    written = list(_written_logits(name, args, kwargs))
    for one in written:
        one.become_real()

    def real(value: Any) -> Any:
        return value.value() if isinstance(value, Logits) else value

    made = func(*tree_map(real, args), **tree_map(real, kwargs))
    return next((one for one in written if one.there is made), made)


def _written_logits(name: str, args: Any, kwargs: Any) -> Iterator[Logits]:
    """Yield the logits that a function writes to."""
    inplace = name in _WRITES or (name.endswith("_") and not name.endswith("__"))
    if inplace and args and isinstance(args[0], Logits):
        yield args[0]
    if isinstance(kwargs.get("out"), Logits):
        yield kwargs["out"]


def _refused(said: str, where: str) -> ApplyFailed:
    error = ApplyFailed(said)
    note(error, where)
    return error


_CASTS = {
    "float": torch.float32,
    "double": torch.float64,
    "bfloat16": torch.bfloat16,
    "half": torch.float16,
}
_WRITES = frozenset(
    (
        *("__setitem__", "__set__", "__iadd__", "__isub__", "__imul__", "__itruediv__"),
        *("__ifloordiv__", "__imod__", "__ipow__", "__iand__", "__ior__", "__ixor__"),
    )
)
_GEOMETRY = frozenset(
    (
        *(".shape", ".dtype", ".device", ".ndim", ".layout", ".itemsize", ".nbytes", ".names"),
        *(".is_cuda", ".is_cpu", ".is_meta", ".is_xpu", ".is_mps", ".is_sparse", ".is_nested"),
        *(".is_quantized", ".is_mkldnn", ".is_sparse_csr", "size", "dim", "ndimension", "numel"),
        *("nelement", "element_size", "get_device", "__len__", "is_floating_point", "is_complex"),
        *("is_inference", "is_signed", "is_conj", "is_neg", "__hash__", "is_same_size"),
        *("stride", "is_contiguous", "storage_offset"),
    )
)
