"""Collectives, and the copies that FSDP2 makes around them: nothing is sent and no element is copied."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from torchtrim.dispatch.modes import tensors_among
from torchtrim.dryrun.oracle import is_small

if TYPE_CHECKING:
    from torchtrim.dryrun.mode import Dry

NAMESPACE = "c10d"
_CLONES_ITS_INPUT = "c10d::_reduce_scatter_base_"


def collective(dry: Dry, func: Any, args: Any, kwargs: dict[str, Any], known: bool) -> Any:
    """A collective that writes into its arguments, on nothing: these are given back as they are.

    Gloo reduces a copy of what it scatters (`ProcessGroupGloo::_reduce_scatter_base`); other backends of
    this process's memory are not modelled.
    """
    tensors = [*tensors_among((*args, *kwargs.values()))]
    if known and is_small(tensors):
        return func(*args, **kwargs)
    dry.forget(tensors)
    if func.name() == _CLONES_ITS_INPUT:
        dry.need(args[1].nbytes)
    empty = {id(tensor): tensor.new_empty(0) for tensor in tensors}
    result = func(
        *(_exchanged(value, empty) for value in args),
        **{name: _exchanged(value, empty) for name, value in kwargs.items()},
    )
    originals = {id(empty[id(tensor)]): tensor for tensor in tensors}
    return _exchanged(result, originals)


def gathered_into(dry: Dry, func: Any, args: Any, kwargs: dict[str, Any], known: bool) -> Any:
    """This rank's part of a gathered tensor is a view of the whole."""
    _, whole, _, length, rank = args
    dry.forget((whole,))
    return whole.narrow(0, length * rank, length), whole


def written_out(dry: Dry, func: Any, args: Any, kwargs: dict[str, Any], known: bool) -> None:
    """What is written into `out` is not known."""
    dry.forget(tensors_among((kwargs.get("out", args[-1]),)))


def _exchanged(value: Any, others: dict[int, Any]) -> Any:
    """The value with other tensors in place of its own."""
    if isinstance(value, torch.Tensor):
        return others.get(id(value), value)
    if isinstance(value, (list, tuple)):
        return type(value)(_each(value, others))
    return value


def _each(values: Any, others: dict[int, Any]) -> Iterator[Any]:
    return (_exchanged(value, others) for value in values)
