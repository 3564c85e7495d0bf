"""Has this process be the first of many ranks, all of which only seem to be there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from torchtrim.dispatch.patches import Patches
from torchtrim.errors import Unsupported, UsageError
from torchtrim.records.sharding import Sharding
from torchtrim.techniques.shard.fsdp import matching, repeated, split_parameter

_LAUNCHED = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@contextlib.contextmanager
def seeming_ranks(ranks: int, *, sharded: bool = False) -> Iterator[None]:
    """A process group of so many ranks, in which nothing is sent. None where `ranks` is 0.

    What torchrun would set is set, and the program's own calls that begin or end a group do nothing.
    `sharded`: its models are to be, so `DistributedDataParallel` only calls what it is given. Raises
    `UsageError` where this process is in a group already.
    """
    if not ranks:
        yield
        return
    group = _group()
    launched = {**_LAUNCHED, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    former = {name: os.environ.get(name) for name in launched}
    patches = Patches()
    os.environ.update(launched)
    group.init_process_group("fake", store=_fake_store(), rank=0, world_size=ranks)
    try:
        patches.replace(group, "init_process_group", _ignored)
        patches.replace(group, "destroy_process_group", _ignored)
        _patch_dtensor(patches)
        if sharded:
            patches.replace(nn.parallel, "DistributedDataParallel", Alone)
            patches.replace(nn.parallel.distributed, "DistributedDataParallel", Alone)
        yield
    finally:
        patches.undo()
        group.destroy_process_group()
        _restore(former)


class Alone(nn.Module):
    """Stands for `DistributedDataParallel` around a model that is sharded instead."""

    def __init__(self, module: nn.Module, *_: Any, **__: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's."""
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Nothing: `fully_shard` reduces in every backward unless it is set otherwise."""
        yield


Alone.__name__ = "DistributedDataParallel"


def reduce_in_place(root: nn.Module) -> None:
    """Have a `DistributedDataParallel` take a gradient as it is for the mean over the ranks."""
    if isinstance(root, DistributedDataParallel):
        with contextlib.suppress(RuntimeError):  # it has a hook of the script's
            root.register_comm_hook(None, lambda _, bucket: _done(bucket.buffer()))


def _done(result: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(result)
    return done


def _group() -> Any:
    if not torch.distributed.is_available():
        raise Unsupported(
            "this torch was built without torch.distributed, so nothing can be sharded."
        )
    if torch.distributed.is_initialized():
        raise UsageError(
            "this process is in a process group already, and an estimate over ranks makes one of its own. "
            "End it with torch.distributed.destroy_process_group(), or estimate in another process."
        )
    return torch.distributed


def _fake_store() -> Any:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def _patch_dtensor(patches: Patches) -> None:
    """A shard's random numbers are drawn as they come, since ranks that are not there agree on none; and
    results' shapes are asked of the host, since a device that is not there has no fake tensors."""
    from torch.distributed.tensor import _dispatch, _op_schema

    def like(spec: Any) -> torch.Tensor:
        meta = spec.tensor_meta
        return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="cpu")

    patches.replace(_dispatch, "is_rng_supported_mesh", lambda _: False)
    patches.replace(_op_schema, "_rebuild_tensor_from_dtensor_meta", like)


def _ignored(*_: Any, **__: Any) -> None:
    """The group is there."""


def _restore(former: dict[str, str | None]) -> None:
    for name, value in former.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


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
