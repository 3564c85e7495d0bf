"""Stand-in outputs of a model in stages: tensors without values on which a script may compute its loss.

The last stage computes the loss later, for each micro-batch. Until `backward` is called on it, operations on
the model's output are recorded; shapes and dtypes are known, values are not.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from torchtrim.errors import Unsupported

_NOT_SPLIT = ("weight", "pos_weight")
_SUMS = ("sum", "nansum")


@dataclasses.dataclass(eq=False)
class PromisedCall:
    """A node of the recorded loss: a leaf of the model's output, or a call. `fake` is its fake tensor.

    `value`: the result once the step has run, if it is a scalar.
    """

    ledger: Ledger
    fake: Any
    leaf: int = -1
    call: tuple[Callable[..., Any], Any, Any] | None = None
    item: int = -1
    value: Tensor | None = None


@dataclasses.dataclass(eq=False)
class Ledger:
    """The recorded computation on an output of `batch` samples. `run` receives the node of `backward`."""

    batch: int
    run: Callable[[PromisedCall], None]
    mode: FakeTensorMode
    over: bool = False

    def outputs(self, fakes: Any) -> Any:
        """Return the model's output as the same tree, with a stand-in for each tensor."""
        number = itertools.count()
        return pytree.tree_map_only(
            Tensor, lambda one: Promise(PromisedCall(self, one, leaf=next(number))), fakes
        )


class Promise(Tensor):
    """A stand-in output: a tensor of known shape whose values come later."""

    node: PromisedCall

    @staticmethod
    def __new__(cls, node: PromisedCall) -> Promise:
        """Create a tensor of the node's shape and dtype without memory."""
        fake = node.fake
        made: Promise = Tensor._make_wrapper_subclass(
            cls,
            fake.shape,
            strides=fake.stride(),
            dtype=fake.dtype,
            device=fake.device,
            requires_grad=False,
        )
        made.node = node
        return made

    def __init__(self, node: PromisedCall) -> None: ...

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Promise(shape={tuple(self.node.fake.shape)}, dtype={self.node.fake.dtype})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _called(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Raise `Unsupported`: an operator that reaches this needs values."""
        raise _no_values(str(func))


def _no_values(what: str) -> Unsupported:
    return Unsupported(
        f"the script reads values of the model's output ({what}) before backward has run. In a pipeline "
        "backward computes them, on the rank of the last stage. Move that after `loss.backward()`, when the "
        "loss has its value, or remove it."
    )


def _called(func: Any, args: Any, kwargs: Any) -> Any:
    nodes = [one.node for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, Promise)]
    name = getattr(func, "__name__", str(func))
    if name == "backward":
        _run(nodes[0], args, kwargs)
        return None
    args, kwargs = _with_values(args), _with_values(kwargs)
    ledger = next((node.ledger for node in nodes if value_of(node) is None), None)
    if ledger is None:
        return func(*args, **kwargs)
    if ledger.over:
        raise _no_values(name)
    try:
        with ledger.mode, torch._C.DisableTorchFunctionSubclass():
            fakes = func(*_with_fakes(args, ledger), **_with_fakes(kwargs, ledger))
    except Exception as error:
        if "data-dependent" in str(error).lower() or "DataDependent" in type(error).__name__:
            raise _no_values(name) from None
        raise
    kept = pytree.tree_map_only(Promise, lambda one: one.node, (args, kwargs))
    return _promised(ledger, (func, *kept), fakes)


def _run(node: PromisedCall, args: Any, kwargs: Any) -> None:
    if len(args) > 1 or any(value not in (None, False) for value in kwargs.values()):
        raise Unsupported(
            "backward() of a pipeline takes no arguments: neither a gradient, nor retain_graph, nor inputs."
        )
    if node.fake.dim():
        raise Unsupported("backward() of a pipeline needs a loss that is a scalar.")
    if node.ledger.over:
        raise Unsupported("backward() has already run for this output; call the model again first.")
    node.ledger.run(node)
    node.ledger.over = True


def _promised(ledger: Ledger, call: tuple[Any, Any, Any], fakes: Any) -> Any:
    if isinstance(fakes, Tensor):
        return Promise(PromisedCall(ledger, fakes, call=call))
    if isinstance(fakes, (tuple, list)) and any(isinstance(one, Tensor) for one in fakes):
        nodes = (PromisedCall(ledger, one, call=call, item=n) for n, one in enumerate(fakes))
        kind = type(fakes) if type(fakes) in (tuple, list) else tuple
        return kind(map(Promise, nodes))
    return fakes


def _with_fakes(tree: Any, ledger: Ledger) -> Any:
    tree = pytree.tree_map_only(Promise, lambda one: one.node.fake, tree)
    return pytree.tree_map_only(
        Tensor,
        lambda one: one if isinstance(one, FakeTensor) else ledger.mode.from_tensor(one),
        tree,
    )


def _with_values(tree: Any) -> Any:
    def known(one: Promise) -> Tensor:
        value = value_of(one.node)
        return one if value is None else value

    return pytree.tree_map_only(Promise, known, tree)


def value_of(node: PromisedCall) -> Tensor | None:
    """Return the node's value if it is known or follows from known ones, else None."""
    if node.value is None and node.call is not None and node.ledger.over:
        func, args, kwargs = node.call
        inner = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, PromisedCall)]
        if all(value_of(one) is not None for one in inner):
            values = pytree.tree_map_only(PromisedCall, value_of, (args, kwargs))
            given = func(*values[0], **values[1])
            node.value = given[node.item] if node.item >= 0 else given
    return node.value


def _nodes_before(node: PromisedCall) -> list[PromisedCall]:
    """Return the nodes leading to this one, itself last."""
    found: dict[int, PromisedCall] = {}

    def visit(one: PromisedCall) -> None:
        if id(one) in found:
            return
        for inner in pytree.tree_leaves(one.call[1:]) if one.call is not None else ():
            if isinstance(inner, PromisedCall):
                visit(inner)
        found[id(one)] = one

    visit(node)
    return list(found.values())


def numbers_before(node: PromisedCall) -> list[PromisedCall]:
    """Return the scalar nodes leading to this one, itself last."""
    nodes = _nodes_before(node)
    return [one for one in nodes if isinstance(one.fake, Tensor) and one.fake.dim() == 0]


def tensors_before(node: PromisedCall) -> list[Tensor]:
    """Return the script's own tensors that the node depends on, such as targets."""
    calls = [one.call[1:] for one in _nodes_before(node) if one.call is not None]
    return [one for one in pytree.tree_leaves(calls) if isinstance(one, Tensor)]


def refuse_sums(node: PromisedCall) -> None:
    """Raise `Unsupported` for a loss summed over samples: a pipeline averages micro-batches."""
    for one in numbers_before(node):
        if one.call is None:
            continue
        func, args, kwargs = one.call
        name = getattr(func, "__name__", "")
        alone = len(args) == 1 and not kwargs and isinstance(args[0], PromisedCall)
        sums_all = name in _SUMS and alone and args[0].fake.dim() > 0
        if sums_all or kwargs.get("reduction") == "sum":
            raise Unsupported(
                f"the loss sums over its samples ({name}), but a pipeline averages over its micro-batches. "
                "Use the mean over the samples of a batch."
            )


class OutputPart:
    """Evaluator of recorded nodes for micro-batch `number` of `count`."""

    def __init__(self, leaves: Sequence[Tensor], number: int, count: int) -> None:
        self._leaves = leaves
        self._number, self._count = number, count
        self._known: dict[int, Any] = {}

    def value(self, node: PromisedCall) -> Any:
        """Return the node's value for this micro-batch."""
        if id(node) not in self._known:
            self._known[id(node)] = self._computed(node)
        return self._known[id(node)]

    def _computed(self, node: PromisedCall) -> Any:
        if node.call is None:
            return self._leaves[node.leaf]
        func, args, kwargs = node.call
        batch = node.ledger.batch
        values = [self._split(one, batch) for one in args]
        named = {k: v if k in _NOT_SPLIT else self._split(v, batch) for k, v in kwargs.items()}
        try:
            given = func(*values, **named)
        except (RuntimeError, ValueError, IndexError) as error:
            raise Unsupported(
                f"the loss cannot be computed for a part of the batch: {error}. It uses sizes of the whole "
                "batch; write -1 for the batch, as in `view(-1, classes)`."
            ) from error
        return given[node.item] if node.item >= 0 else given

    def _split(self, tree: Any, batch: int) -> Any:
        number, count = self._number, self._count
        tree = pytree.tree_map_only(Tensor, lambda one: rows_of(one, batch, number, count), tree)
        return pytree.tree_map_only(PromisedCall, self.value, tree)


def rows_of(tensor: Tensor, batch: int, number: int, count: int) -> Tensor:
    """Return part `number` of `count` of a tensor's rows; all of it if it has no batch dimension."""
    if isinstance(tensor, torch.nn.Parameter) or not tensor.dim() or tensor.shape[0] % batch:
        return tensor
    return tensor.tensor_split(count)[number]


def samples_of(tensors: Iterator[Tensor]) -> int:
    """Return the batch size: the first dimension of the first tensor that has one."""
    return next((tensor.shape[0] for tensor in tensors if tensor.dim()), 0)
