"""Cache constant position maps and deduplicate rotary tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class SharedPositions:
    """Handle of `share_positions`. `hits` and `misses` count lookups of cached position maps."""

    def __init__(self) -> None:
        self.hits = 0
        self.misses = 0
        self.freed_bytes = 0
        self._maps: dict[Any, torch.Tensor] = {}
        self._undo: list[Callable[[], None]] = []

    @property
    def bytes(self) -> int:
        """Bytes of the cached maps."""
        return sum(one.untyped_storage().nbytes() for one in self._maps.values())

    def revert(self) -> None:
        """Undo the changes. Shared tables become copies again."""
        while self._undo:
            self._undo.pop()()
        self._maps.clear()

    def _keep_maps(self, module: Any) -> None:
        forward: Callable[..., torch.Tensor] = module.forward

        def cached(shape: Any, device: Any, dtype: torch.dtype, mask: Any = None) -> torch.Tensor:
            if mask is not None:
                return forward(shape, device, dtype, mask)
            settings = (module.num_position_features, module.normalize, module.scale)
            inference = torch.is_inference_mode_enabled()
            key = (*shape, str(device), dtype, *settings, module.temperature, inference)
            if key in self._maps:
                self.hits += 1
            else:
                self.misses += 1
                self._maps[key] = forward(shape, device, dtype)
            return self._maps[key]

        module.forward = cached
        self._undo.append(lambda: delattr(module, "forward"))

    def _share_table(self, module: Any, first: torch.Tensor) -> None:
        own = module.freqs_cis
        self.freed_bytes += own.untyped_storage().nbytes()
        module.freqs_cis = first

        def copy() -> None:
            if module.freqs_cis is first:
                module.freqs_cis = first.clone()

        self._undo.append(copy)


def share_positions(model: nn.Module) -> SharedPositions:
    """Cache a model's sine position maps, and let its modules share equal rotary tables.

    SAM 2 in transformers rebuilds four maps per frame, since its cache holds only one
    (`build_sine_position_embedding`); the `sam2` package stores one table per attention module
    (`freqs_cis`). Results are identical bit for bit. All streams share the cached maps, which take 84 MiB
    in float32 at 1024x1024. Changes only this model's instances; `revert()` undoes them.
    """
    shared = SharedPositions()
    tables: list[torch.Tensor] = []
    for module in model.modules():
        known = hasattr(type(module), "build_sine_position_embedding")
        if known and "forward" not in vars(module):
            shared._keep_maps(module)
        table = vars(module).get("freqs_cis")
        if isinstance(table, torch.Tensor):
            first = next((one for one in tables if _same(one, table)), None)
            if first is None:
                tables.append(table)
            elif first is not table:
                shared._share_table(module, first)
    return shared


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
    return alike and torch.equal(one, other)
