"""Shards a program's models with FSDP2 as they appear, and has its optimizers update the shards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from torchtrim.errors import Unsupported, UsageError
from torchtrim.records.sharding import Sharding
from torchtrim.techniques.shard.fsdp import matching, repeated, split_parameter


class Sharder:
    """Shards roots over the ranks of this process's group. `blocks`: the paths of the sharded modules."""

    def __init__(self, sharding: Sharding) -> None:
        self.blocks: list[str] = []
        self._sharding = sharding
        self._shards: Any = WeakTensorKeyDictionary()

    def shard(self, name: str, root: nn.Module) -> None:
        """Shard a root by blocks. Raises `UsageError` and `Unsupported` where that cannot be done."""
        from torch.distributed.fsdp import FSDPModule

        parameters = list(root.named_parameters(remove_duplicate=False))
        if any(isinstance(one, FSDPModule) for one in root.modules()):
            raise UsageError(
                f"{name} is sharded already, by the program itself: leave --fsdp out, and --ranks is enough."
            )
        if not parameters:
            return
        found = list(self._blocks(root))
        _check_shared(name, parameters, [path for path, _ in found])
        self.blocks += [f"{name}.{path}" for path, _ in found]
        options = self._options(parameters[0][1].device)
        try:
            for _, block in (*reversed(found), (name, root)):
                _fully_shard(block, options)
        except (AssertionError, ValueError, NotImplementedError) as error:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise Unsupported(_refused(name, first)) from error
        after = dict(root.named_parameters(remove_duplicate=False))
        for path, one in parameters:
            self._shards[one] = after[path]

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Have an optimizer update the shards of what it was made for."""
        for group in optimizer.param_groups:
            group["params"] = [self._shards.get(one, one) for one in group["params"]]
        for one in [one for one in optimizer.state if one in self._shards]:
            del optimizer.state[one]

    def _blocks(self, root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        patterns = self._sharding.blocks
        if not patterns:
            yield from repeated(root)
            return
        found = list(matching(root, patterns))
        if not found:
            paths = [path for path, _ in root.named_modules() if path]
            raise UsageError(_no_match(patterns, paths))
        yield from found

    def _options(self, device: torch.device) -> dict[str, Any]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

        asked = self._sharding
        options: dict[str, Any] = {
            "mesh": init_device_mesh(device.type, (torch.distributed.get_world_size(),)),
        }
        if not asked.reshard:
            options["reshard_after_forward"] = False
        if asked.compute:
            options["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=getattr(torch, asked.compute), reduce_dtype=torch.float32
            )
        if asked.offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type != "cpu")
        return options


def _check_shared(name: str, parameters: list[tuple[str, nn.Parameter]], blocks: list[str]) -> None:
    """Raises `Unsupported` for a parameter of two blocks, or of one and what is outside of all."""
    if tied := split_parameter(parameters, blocks):
        raise Unsupported(_refused(name, f"{tied[0]} and {tied[1]} are one parameter."))


def _fully_shard(block: nn.Module, options: dict[str, Any]) -> None:
    from torch.distributed.fsdp import fully_shard

    fully_shard(block, **options)


def _refused(name: str, why: str) -> str:
    return (
        f"fully_shard cannot shard {name}: {why} Say which modules are to be sharded one by one with "
        "--fsdp-blocks PATTERN: parameters that are shared have to lie in one of them, or outside of all."
    )


def _no_match(patterns: tuple[str, ...], paths: list[str]) -> str:
    some = ", ".join(paths[:8]) + (", ..." if len(paths) > 8 else "")
    return (
        f"no module with parameters matches {', '.join(map(repr, patterns))}. A pattern is of a module's "
        f"path below the model, such as 'layers.*'; there are: {some}."
    )
