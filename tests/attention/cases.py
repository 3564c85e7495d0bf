"""Inputs of relative attention, and the same call of an operator and of the reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attention import reference
from torchtrim.attention import Buckets, relative_attention


@dataclass
class Case:
    """Random q, k, v and tables for a grid; `on` says which of q, k, v and bias (b) have one."""

    buckets: Buckets
    on: str = "qkv"
    batch: int = 2
    heads: int = 2
    dim: int = 8
    shared: bool = True
    dtype: torch.dtype = torch.float32
    mask: Tensor | None = None
    leaves: list[Tensor] = field(default_factory=list)
    tables: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        length = self.buckets.tokens
        self.qkv = [self.leaf(self.batch, self.heads, length, self.dim) for _ in range(3)]
        first, number = (1 if self.shared else self.heads), self.buckets.number
        shapes = {
            "q": (first, self.dim, number),
            "k": (first, self.dim, number),
            "v": (first, number, self.dim),
            "b": (first, number),
        }
        for letter in self.on:
            name = "bias" if letter == "b" else f"{letter}_table"
            count = 2 if self.buckets.method == "cross" else 1
            made = tuple(self.leaf(*shapes[letter]) for _ in range(count))
            self.tables[name] = made if count == 2 else made[0]

    def leaf(self, *shape: int) -> Tensor:
        made = torch.randn(shape, dtype=self.dtype, requires_grad=True)
        self.leaves.append(made)
        return made

    def found(self, path: str = "auto", **more: Any) -> Tensor:
        return relative_attention(
            *self.qkv, buckets=self.buckets, mask=self.mask, path=path, **self.tables, **more
        )

    def expected(self, dtype: torch.dtype = torch.float64, **more: Any) -> Tensor:
        tables = {name: self._single(name, one) for name, one in self.tables.items()}
        exact = {name: one.to(dtype) for name, one in tables.items()}
        mask = self.mask
        if mask is not None and mask.is_floating_point():
            mask = mask.to(dtype)
        qkv = (one.to(dtype) for one in self.qkv)
        return reference.attention(*qkv, ids=self.buckets.ids(), mask=mask, **exact, **more)

    def _single(self, name: str, table: Any) -> Tensor:
        if isinstance(table, Tensor):
            return table
        return reference.composed(*table, self.buckets.skip, -2 if name == "v_table" else -1)

    def gradients(self, out: Tensor) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        slope = torch.randn(out.shape, generator=generator).to(out.dtype)
        return list(torch.autograd.grad(out, self.leaves, slope))

    def check(self, path: str, forward: float = 2e-6, backward: float = 2e-5) -> None:
        found, expected = self.found(path), self.expected()
        assert (found - expected).abs().max() <= forward
        for one, other in zip(self.gradients(found), self.gradients(expected), strict=True):
            size = other.norm().clamp(min=0.5)
            assert (one - other).norm() / size <= backward
