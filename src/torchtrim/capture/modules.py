"""Numbers the modules of all roots; gathered parameters of FSDP2."""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn
from torch.nn.parameter import is_lazy

from torchtrim.capture.code.hooks import are_all_hooked, backward_hooks_on_all
from torchtrim.capture.code.side_effects import SideEffects
from torchtrim.dispatch.places import CallSite
from torchtrim.dispatch.storages import element_bytes
from torchtrim.records.profile import Module


class Modules:
    """All modules of all roots, numbered in the order seen; paths start with the root's name.

    `site` returns the call site that constructed a module, if it is known.
    """

    def __init__(self, site: Callable[[nn.Module], CallSite | None] = lambda _: None) -> None:
        self.records: list[Module] = []
        self._site = site
        self.roots: dict[str, nn.Module] = {}
        self._numbers: dict[int, int] = {}
        self._paths: dict[str, int] = {}
        self._kept: list[nn.Module] = []

    def add_root(self, root: nn.Module) -> str:
        """Add a root and return its name: its class, with `#2` and so on for further ones."""
        for name, known in self.roots.items():
            if known is root:
                return name
        stem = type(root).__name__
        taken = sum(name.split("#")[0] == stem for name in self.roots)
        name = stem if not taken else f"{stem}#{taken + 1}"
        self.roots[name] = root
        for path, module in root.named_modules():
            self._add(module, f"{name}.{path}" if path else name)
        return name

    def number(self, module: nn.Module) -> int:
        """Return the module's number, or -1 for a module outside all roots."""
        return self._numbers.get(id(module), -1)

    def live(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield path and module of every known module."""
        for record, module in zip(self.records, self._kept, strict=True):
            yield record.path, module

    def named_tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Yield `(kind, name, tensor)` of all initialized parameters and buffers, and of parameters gathered
        by FSDP2; tied ones once."""
        seen: set[int] = set()
        for name, root in self.roots.items():
            tables = {"parameter": root.named_parameters(), "buffer": root.named_buffers()}
            for kind, table in {**tables, "gathered": gathered_parameters(root)}.items():
                for path, tensor in table:
                    if id(tensor) not in seen and not is_lazy(tensor):
                        seen.add(id(tensor))
                        yield kind, f"{name}.{path}", tensor

    def settled(self, place_of: Callable[[CallSite | None], int]) -> list[Module]:
        """Return the records, with the current bytes of lazy parameters, each module's side effect, whether
        it reads again what its last call left, and the number of the place that constructed it."""
        return [
            replace(
                record,
                parameter_bytes=_parameter_bytes(module),
                writes=writes,
                appends=appends,
                made=place_of(self._site(module)),
                rereads=_rereads(module, effects),
            )
            for record, module in zip(self.records, self._kept, strict=True)
            for effects in (SideEffects([module]),)
            for writes, appends in (effects.recorded,)
        ]

    def _add(self, module: nn.Module, path: str) -> None:
        if id(module) in self._numbers:
            return
        parent = self._parent(path)
        own = any(getattr(module, name) for name in (*HOOKS, "_compiled_call_impl"))
        self._numbers[id(module)] = self._paths[path] = len(self.records)
        self._kept.append(module)
        self.records.append(
            Module(
                path=path,
                type=type(module).__name__,
                parent=parent,
                chain=type(module).forward is nn.Sequential.forward,
                hooked=own or are_all_hooked(),
                parameter_bytes=_parameter_bytes(module),
                hooked_with_all=not own and are_all_hooked() and not backward_hooks_on_all(),
            )
        )

    def _parent(self, path: str) -> int:
        while "." in path:
            path = path.rpartition(".")[0]
            if path in self._paths:
                return self._paths[path]
        return -1


def _rereads(module: nn.Module, effects: SideEffects) -> bool:
    """Return True if code may read a tensor that its last call left in an attribute of these modules."""
    attributes = (item for one in module.modules() for item in vars(one).items())
    kept = {name for name, value in attributes if isinstance(value, torch.Tensor)}
    return effects.is_unread or not effects.reads.isdisjoint(kept)


def _parameter_bytes(module: nn.Module) -> int:
    return sum(map(element_bytes, module.parameters(recurse=False)))


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@contextlib.contextmanager
def without_hooks(module: nn.Module) -> Iterator[None]:
    """Remove the hooks of a module and its submodules inside the block."""
    kept = [
        (inner, name, vars(inner)[name])
        for inner in module.modules()
        for name in HOOKS
        if vars(inner).get(name)
    ]
    try:
        for inner, name, _ in kept:
            vars(inner)[name] = OrderedDict()
        yield
    finally:
        for inner, name, hooks in kept:
            vars(inner)[name] = hooks


def gathered_parameters(root: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name of each parameter that `fully_shard` gathers, and its gathered tensors."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not hasattr(fsdp, "FSDPModule"):
        return
    for path, module in root.named_modules():
        if not isinstance(module, fsdp.FSDPModule):
            continue
        state: Any = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        for group in (state._fsdp_param_group,) if groups is None else groups:
            for one in group.fsdp_params if group is not None else ():
                name = getattr(one, "_param_fqn", None) or f"{path}.{one._module_info.param_name}"
                yield from ((name, tensor) for tensor in one.all_gather_outputs)
