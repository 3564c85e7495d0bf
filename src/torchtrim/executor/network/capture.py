"""Captures a network by `torch.export` on fake tensors: nothing of its size is allocated or computed."""

from __future__ import annotations

import contextlib
import importlib.util
import random
import warnings
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as modules_of_torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from torchtrim.capture.hookless import HOOKS, without_hooks
from torchtrim.capture.snapshot import Snapshot
from torchtrim.errors import TorchtrimError, Unsupported
from torchtrim.executor.network.captured import Captured
from torchtrim.executor.network.reader import Reader

_NUMPY = importlib.util.find_spec("numpy") is not None
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
_FUSED = (nn.TransformerEncoderLayer, nn.TransformerEncoder, nn.MultiheadAttention)


def capture(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Captured:
    """The graph of one call. The module's own forward hooks are not part of it.

    Raises `Unsupported` with the reason: control flow that depends on values, shapes that do, hooks on
    modules inside, a class of tensors of its own, state that is no tensor. The module is as it was.
    """
    _check(module, args, kwargs)
    before, drawn = _whole_state(module), _random_state()
    snapshot = Snapshot([module], (), values=False)
    try:
        with _undisturbed(), without_hooks(module), _watching(module) as states:
            program = torch.export.export(module, args, dict(kwargs), strict=False)
            program = program.run_decompositions({})
        if any(state != before for state in states):
            raise Unsupported("it changes its own attributes when it is called")
        if _random_state() != drawn:
            raise Unsupported("it draws random numbers that are not torch's")
    except TorchtrimError:
        raise
    except Exception as error:
        raise Unsupported(f"torch.export cannot follow it: {_first_line(error)}") from error
    finally:
        snapshot.restore()
    try:
        return Reader(program).read()
    except Unsupported as error:
        raise Unsupported(str(error).splitlines()[0]) from None


def _check(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise Unsupported("it is compiled by TorchScript")
    for path, inner in module.named_modules():
        if path and any(getattr(inner, name, None) for name in HOOKS):
            raise Unsupported(f"`{path}` has hooks, which would no longer run")
    for path, inner in module.named_modules():
        if takes_fused_path(inner):
            raise Unsupported(
                f"`{path or type(inner).__name__}` takes a fused path in eval that torch.export does "
                "not see (torch.backends.mha.set_fastpath_enabled(False) turns it off)"
            )
    if any(getattr(modules_of_torch, name, None) for name in _GLOBAL_HOOKS):
        raise Unsupported("there are hooks for all modules, which would no longer run")
    for leaf in pytree.tree_leaves((args, dict(kwargs))):
        if isinstance(leaf, torch.Tensor) and type(leaf) not in (torch.Tensor, nn.Parameter):
            raise Unsupported(f"an input is a {type(leaf).__name__}, a class of tensors of its own")
        if isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided:
            raise Unsupported(f"an input is not dense but {leaf.layout}")


def takes_fused_path(module: nn.Module) -> bool:
    """Whether torch runs the module by a kernel of its own in eval, and by another when it is traced."""
    fused = any(type(module).forward is kind.forward for kind in _FUSED)
    return fused and not module.training and torch.backends.mha.get_fastpath_enabled()


def plain_state(module: nn.Module) -> Hashable:
    """Every module inside, its mode, and its attributes that are plain values: a graph depends on them."""
    return tuple(
        (id(inner), type(inner).__qualname__, inner.training, _attributes(inner))
        for inner in module.modules()
    )


def _whole_state(module: nn.Module) -> Hashable:
    """The same, and how many elements its lists, dicts and sets have."""
    sizes = tuple(
        (name, len(value))
        for inner in module.modules()
        for name, value in vars(inner).items()
        if name not in _OF_TORCH and isinstance(value, (list, dict, set))
    )
    return plain_state(module), sizes


@contextlib.contextmanager
def _watching(module: nn.Module) -> Iterator[list[Hashable]]:
    """The module's states when a call of it ends; torch.export puts them back before it returns."""
    states: list[Hashable] = []
    handle = module.register_forward_hook(lambda *_: states.append(_whole_state(module)))
    try:
        yield states
    finally:
        handle.remove()


def _attributes(module: nn.Module) -> Hashable:
    return tuple(
        (name, value)
        for name, value in vars(module).items()
        if name not in _OF_TORCH and (isinstance(value, _PLAIN) or _plain_tuple(value))
    )


def _plain_tuple(value: object) -> bool:
    return type(value) is tuple and all(isinstance(part, _PLAIN) for part in value)


def _random_state() -> Hashable:
    """The states of Python's and numpy's generators; torch.export would load numpy in any case."""
    drawn: Any = importlib.import_module("numpy.random").get_state() if _NUMPY else None
    return random.getstate(), None if drawn is None else (bytes(drawn[1]), *drawn[2:])


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Without gradients, warnings and modes."""
    with (
        warnings.catch_warnings(),
        _disable_current_modes(),
        torch.no_grad(),
    ):
        warnings.simplefilter("ignore")
        yield


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
