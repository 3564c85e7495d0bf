"""The modules of the roots, numbered, and the stack of those that run."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

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

    def named_tensors(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """`(kind, name, tensor)` of all parameters and buffers; a tied one comes once."""
        for name, root in self.roots.items():
            for path, parameter in root.named_parameters():
                yield "parameter", f"{name}.{path}", parameter
            for path, buffer in root.named_buffers():
                yield "buffer", f"{name}.{path}", buffer

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
                    module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
                ),
                parameter_bytes=sum(p.nbytes for p in module.parameters(recurse=False)),
            )
        )

    def _parent(self, path: str) -> int:
        while "." in path:
            path = path.rpartition(".")[0]
            if path in self._paths:
                return self._paths[path]
        return -1
