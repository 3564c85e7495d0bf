"""What FSDP2 keeps of parameters that are gathered from all ranks: memory that comes and goes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


def gathered_parameters(root: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The name of each parameter of a root that `fully_shard` gathers, and what it is gathered into."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not hasattr(fsdp, "FSDPModule"):
        return
    for path, module in root.named_modules():
        if isinstance(module, fsdp.FSDPModule):
            for one in _parameters_of(module):
                name = getattr(one, "_param_fqn", None) or f"{path}.{one._module_info.param_name}"
                yield from ((name, tensor) for tensor in one.all_gather_outputs)


def _parameters_of(module: Any) -> Iterator[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [group] if (group := state._fsdp_param_group) is not None else []
    for group in groups:
        yield from group.fsdp_params
