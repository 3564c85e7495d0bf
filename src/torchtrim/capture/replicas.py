"""Records `DistributedDataParallel` modules: their settings and unused parameters."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn

from torchtrim.capture.modules import Modules
from torchtrim.records.profile import Profile, Replica, Storage


class Replicas:
    """Unused parameters of DDP modules, read after each step, since they may differ from step to step."""

    def __init__(self) -> None:
        self._unused: dict[int, int] = {}

    def look(self, modules: Modules) -> None:
        """Read the unused parameters of the step that ended."""
        for number, module in _wrappers(modules):
            unused = _unused_bytes(module)
            self._unused[number] = max(self._unused.get(number, 0), unused)

    def put_into(self, profile: Profile, modules: Modules) -> Profile:
        """Return the profile with its DDP modules."""
        found = [
            _replica(number, module, self._unused.get(number, 0))
            for number, module in _wrappers(modules)
        ]
        if not found:
            return profile
        return replace(profile, replicas=found, storages=_with_buckets(profile))


def _wrappers(modules: Modules) -> Iterator[tuple[int, Any]]:
    parallel = sys.modules.get("torch.nn.parallel.distributed")
    if parallel is None:
        return
    for number, (_, module) in enumerate(modules.live()):
        wraps = isinstance(module, parallel.DistributedDataParallel)
        if wraps and hasattr(module, "find_unused_parameters"):  # one that is sharded has none
            yield number, module


def _with_buckets(profile: Profile) -> list[Storage]:
    """Return the storages with gradient buckets marked as `gathered`, not `input`."""
    buckets = {
        use.storage
        for one in profile.collectives
        if profile.operators[one.operator].phase == "backward"
        for use in profile.operators[one.operator].inputs
    }
    return [
        replace(one, kind="gathered") if number in buckets and one.kind == "input" else one
        for number, one in enumerate(profile.storages)
    ]


def _replica(number: int, module: Any, unused: int) -> Replica:
    return Replica(
        module=number,
        bucket_bytes=int(getattr(module, "bucket_bytes_cap", 0)),
        gradient_bytes=_bytes_of(_exchanged(module)),
        unused_bytes=unused,
        find_unused=bool(module.find_unused_parameters),
        static_graph=bool(module.static_graph),
        bucket_views=bool(module.gradient_as_bucket_view),
        first_bytes=_first_bytes(module),
    )


def _first_bytes(module: Any) -> int:
    """Return the size of the first bucket: torch's default unless the script set one for all."""
    own = getattr(module, "bucket_bytes_cap_default", False)
    return int(torch.distributed._DEFAULT_FIRST_BUCKET_BYTES) if own else 0  # type: ignore[attr-defined]


def _exchanged(module: Any) -> Iterator[nn.Parameter]:
    ignored = getattr(module, "parameters_to_ignore", ())
    for name, parameter in module.module.named_parameters():
        if parameter.requires_grad and name not in ignored:
            yield parameter


def _unused_bytes(module: Any) -> int:
    """Return the bytes of unused parameters in the previous step, from torch's DDP statistics."""
    if not module.find_unused_parameters:
        return 0
    with contextlib.suppress(RuntimeError, AttributeError):
        return int(module._get_ddp_logging_data().get("unused_parameter_size", 0))
    return 0


def _bytes_of(parameters: Iterable[nn.Parameter]) -> int:
    return sum(one.numel() * one.element_size() for one in parameters)
