"""The modules of the roots, numbered, and the stack of those that run."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from msgspec.structs import replace
from torch import nn
from torch.nn.parameter import is_lazy

from torchtrim.capture.code.side_effects import SideEffects
from torchtrim.capture.gathered import gathered_parameters
from torchtrim.dispatch.storages import parts_of
from torchtrim.records.profile import Module


class Modules:
    """Numbers every module of every root in the order seen; names start with the root's name."""

    def __init__(self) -> None:
        self.records: list[Module] = []
        self.roots: dict[str, nn.Module] = {}
        self._numbers: dict[int, int] = {}
        self._paths: dict[str, int] = {}
        self._kept: list[nn.Module] = []

    def add_root(self, root: nn.Module) -> str:
        """Name a root after its class, with `#2` and so on for the second of a class."""
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
        """The module's number; -1 for one that no root holds."""
        return self._numbers.get(id(module), -1)

    def live(self) -> Iterator[tuple[str, nn.Module]]:
        """Path and module of each that is known."""
        for record, module in zip(self.records, self._kept, strict=True):
            yield record.path, module

    def named_tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """`(kind, name, tensor)` of all parameters and buffers that have a shape, and of what FSDP2
        gathers; a tied one comes once."""
        seen: set[int] = set()
        for name, root in self.roots.items():
            for kind, path, tensor in _named_tensors(root):
                if id(tensor) not in seen and not is_lazy(tensor):
                    seen.add(id(tensor))
                    yield kind, f"{name}.{path}", tensor

    def settled(self) -> list[Module]:
        """The records, with the bytes that lazy parameters have by now, and what the modules' code writes."""
        return [
            replace(record, parameter_bytes=_parameter_bytes(module), writes=_writes(module))
            for record, module in zip(self.records, self._kept, strict=True)
        ]

    def _add(self, module: nn.Module, path: str) -> None:
        if id(module) in self._numbers:
            return
        parent = self._parent(path)
        self._numbers[id(module)] = self._paths[path] = len(self.records)
        self._kept.append(module)
        self.records.append(
            Module(
                path=path,
                type=type(module).__name__,
                parent=parent,
                chain=type(module).forward is nn.Sequential.forward,
                hooked=bool(
                    module._forward_hooks
                    or module._forward_pre_hooks
                    or module._backward_hooks
                    or module._backward_pre_hooks
                    or module._compiled_call_impl
                ),
                parameter_bytes=_parameter_bytes(module),
            )
        )

    def _parent(self, path: str) -> int:
        while "." in path:
            path = path.rpartition(".")[0]
            if path in self._paths:
                return self._paths[path]
        return -1


def _named_tensors(root: nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    for path, parameter in root.named_parameters():
        yield "parameter", path, parameter
    for path, buffer in root.named_buffers():
        yield "buffer", path, buffer
    for path, tensor in gathered_parameters(root):
        yield "gathered", path, tensor


def _writes(module: nn.Module) -> str:
    """The first thing that its code writes beyond its own tensors and attributes, empty for nothing."""
    return next((str(write) for write in SideEffects([module]).writes), "")


def _parameter_bytes(module: nn.Module) -> int:
    parameters = module.parameters(recurse=False)
    return sum(part.nbytes for p in parameters if not is_lazy(p) for part in parts_of(p))
