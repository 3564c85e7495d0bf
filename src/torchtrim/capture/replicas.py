"""Records `DistributedDataParallel` modules: their settings and unused parameters."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from msgspec.structs import replace

from torchtrim.capture.modules import Modules
from torchtrim.records.profile import Profile, Replica


class Replicas:
    """Unused parameters of DDP modules, read after each step, since they may differ from step to step."""

    def __init__(self) -> None:
        self._unused: dict[int, int] = {}

    def look(self, modules: Modules) -> None:
        """Read the unused parameters of the step that ended."""
        for number, module in _wrappers(modules):
            if module.find_unused_parameters:
                with contextlib.suppress(RuntimeError, AttributeError):
                    unused = module._get_ddp_logging_data().get("unused_parameter_size", 0)
                    self._unused[number] = max(self._unused.get(number, 0), int(unused))

    def put_into(self, profile: Profile, modules: Modules) -> Profile:
        """Return the profile with its DDP modules, and gradient buckets as `gathered`, not `input`."""
        replicas = [_replica(n, module, self._unused.get(n, 0)) for n, module in _wrappers(modules)]
        if not replicas:
            return profile
        operators = [profile.operators[one.operator] for one in profile.collectives]
        buckets = {use.storage for op in operators if op.phase == "backward" for use in op.inputs}
        storages = [
            replace(one, kind="gathered") if number in buckets and one.kind == "input" else one
            for number, one in enumerate(profile.storages)
        ]
        return replace(profile, replicas=replicas, storages=storages)


def _wrappers(modules: Modules) -> Iterator[tuple[int, Any]]:
    parallel = sys.modules.get("torch.nn.parallel.distributed")
    if parallel is None:
        return
    for number, (_, module) in enumerate(modules.live()):
        wraps = isinstance(module, parallel.DistributedDataParallel)
        if wraps and hasattr(module, "find_unused_parameters"):  # a sharded one lacks it
            yield number, module


def _replica(number: int, module: Any, unused: int) -> Replica:
    ignored = getattr(module, "parameters_to_ignore", ())
    exchanged = [p for name, p in module.module.named_parameters() if name not in ignored]
    distributed: Any = torch.distributed
    # The first bucket has torch's default size unless the script set one for all.
    is_default = getattr(module, "bucket_bytes_cap_default", False)
    return Replica(
        module=number,
        bucket_bytes=int(getattr(module, "bucket_bytes_cap", 0)),
        gradient_bytes=sum(p.numel() * p.element_size() for p in exchanged if p.requires_grad),
        unused_bytes=unused,
        find_unused=bool(module.find_unused_parameters),
        static_graph=bool(module.static_graph),
        bucket_views=bool(module.gradient_as_bucket_view),
        first_bytes=int(distributed._DEFAULT_FIRST_BUCKET_BYTES) if is_default else 0,
    )
