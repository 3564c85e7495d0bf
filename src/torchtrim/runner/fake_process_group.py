"""A fake process group, with this process as its first rank."""

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
def fake_ranks(ranks: int, *, sharded: bool = False) -> Iterator[None]:
    """Put this process into a fake process group, which sends nothing; with 0 `ranks`, do nothing.

    Set torchrun's variables, and ignore the program's own calls that begin or end a group. `sharded`: the
    models will be sharded, so make `DistributedDataParallel` a plain call of its module. Raises `UsageError`
    if this process is in a group already.
    """
    if not ranks:
        yield
        return
    group: Any = torch.distributed
    if not group.is_available():
        raise Unsupported(
            "this torch was built without torch.distributed, so models cannot be sharded."
        )
    if group.is_initialized():
        raise UsageError(
            "this process is in a process group already, and an estimate over ranks creates its "
            "own. "
            "End it with torch.distributed.destroy_process_group(), or estimate in another process."
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    launched = {**_LAUNCHED, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    former = {name: os.environ[name] for name in launched if name in os.environ}
    patches = Patches()
    os.environ.update(launched)
    group.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        patches.replace(group, "init_process_group", lambda *_, **__: None)
        patches.replace(group, "destroy_process_group", lambda *_, **__: None)
        _patch_dtensor(patches)
        if sharded:
            patches.replace(nn.parallel, "DistributedDataParallel", _PlainCall)
            patches.replace(nn.parallel.distributed, "DistributedDataParallel", _PlainCall)
        yield
    finally:
        patches.undo()
        group.destroy_process_group()
        for name in launched:
            os.environ.pop(name, None)
        os.environ.update(former)


class _PlainCall(nn.Module):
    """Stand-in for `DistributedDataParallel` around a sharded model."""

    def __init__(self, module: nn.Module, *_: Any, **__: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do nothing: `fully_shard` reduces in every backward by default."""
        yield


_PlainCall.__name__ = "DistributedDataParallel"


def reduce_in_place(root: nn.Module) -> None:
    """Have a `DistributedDataParallel` use its own gradients as the mean over the ranks."""
    if isinstance(root, DistributedDataParallel):
        with contextlib.suppress(RuntimeError):  # the script has registered a hook
            root.register_comm_hook(None, lambda _, bucket: _done(bucket.buffer()))


def _done(result: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(result)
    return done


def _patch_dtensor(patches: Patches) -> None:
    """Draw a shard's random numbers locally, since fake ranks cannot agree on a seed, and infer the shapes
    of results on the host, since an emulated device has no fake tensors."""
    from torch.distributed.tensor import _dispatch, _op_schema

    def like(spec: Any) -> torch.Tensor:
        meta = spec.tensor_meta
        return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device="cpu")

    patches.replace(_dispatch, "is_rng_supported_mesh", lambda _: False)
    patches.replace(_op_schema, "_rebuild_tensor_from_dtensor_meta", like)


class Sharder:
    """Sharder of roots over this process's group. `blocks`: paths of the sharded modules."""

    def __init__(self, sharding: Sharding) -> None:
        self.blocks: list[str] = []
        self._sharding = sharding
        self._shards: Any = WeakTensorKeyDictionary()

    def shard(self, name: str, root: nn.Module) -> None:
        """Shard a root by blocks. Raises `UsageError` or `Unsupported` if it cannot be sharded."""
        from torch.distributed.fsdp import FSDPModule, fully_shard

        parameters = list(root.named_parameters(remove_duplicate=False))
        if any(isinstance(one, FSDPModule) for one in root.modules()):
            raise UsageError(
                f"the program itself already shards {name}: leave out --fsdp; --ranks is enough."
            )
        if not parameters:
            return
        blocks = list(self._blocks(root))
        if tied := split_parameter(parameters, [path for path, _ in blocks]):
            raise Unsupported(_refused(name, f"{tied[0]} and {tied[1]} are one parameter."))
        self.blocks += [f"{name}.{path}" for path, _ in blocks]
        options = self._options(parameters[0][1].device)
        try:
            for _, block in (*reversed(blocks), (name, root)):
                fully_shard(block, **options)
        except (AssertionError, ValueError, NotImplementedError) as error:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            raise Unsupported(_refused(name, first)) from error
        after = dict(root.named_parameters(remove_duplicate=False))
        for path, parameter in parameters:
            self._shards[parameter] = after[path]

    def adopt(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace an optimizer's parameters by their shards."""
        for group in optimizer.param_groups:
            group["params"] = [self._shards.get(one, one) for one in group["params"]]
        for parameter in [one for one in optimizer.state if one in self._shards]:
            del optimizer.state[parameter]

    def _blocks(self, root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        patterns = self._sharding.blocks
        if not patterns:
            yield from repeated(root)
            return
        blocks = list(matching(root, patterns))
        if not blocks:
            paths = [path for path, _ in root.named_modules() if path]
            some = ", ".join(paths[:8]) + (", ..." if len(paths) > 8 else "")
            raise UsageError(
                f"no module with parameters matches {', '.join(map(repr, patterns))}. A pattern "
                f"describes a module's path below the model, such as 'layers.*'. The model has: "
                f"{some}."
            )
        yield from blocks

    def _options(self, device: torch.device) -> dict[str, Any]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

        sharding = self._sharding
        options: dict[str, Any] = {
            "mesh": init_device_mesh(device.type, (torch.distributed.get_world_size(),)),
        }
        if not sharding.reshard:
            options["reshard_after_forward"] = False
        if sharding.compute:
            options["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=getattr(torch, sharding.compute), reduce_dtype=torch.float32
            )
        if sharding.offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type != "cpu")
        return options


def _refused(name: str, why: str) -> str:
    return (
        f"fully_shard cannot shard {name}: {why} Name the modules to shard one by one with "
        "--fsdp-blocks PATTERN: all owners of a shared parameter must be in one of them, or in none."
    )
