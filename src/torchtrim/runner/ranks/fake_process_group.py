"""Has this process be the first of many ranks, all of which only seem to be there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchtrim.dispatch.patches import Patches
from torchtrim.errors import Unsupported, UsageError

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
