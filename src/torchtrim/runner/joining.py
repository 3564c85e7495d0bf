"""How a rank joins the others: at its parent's store, and over gloo on machines without NCCL."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from torchtrim.emulator.device import current
from torchtrim.emulator.moves import emulate_devices
from torchtrim.records.profile import is_emulated

_GLOO = (
    "the ranks exchange over gloo, on the host: the script requests NCCL, which needs a GPU for each rank. "
    "Exchanges and their order are the same; times are not"
)
_SPAWNED = "the ranks that torchtrim started run the functions that the script would spawn"
_SPAWNED_ALONE = "the function that the script would spawn in one process runs in the script's own"
_ONE_DEVICE = "each rank has its own emulated device, and calls it cuda:0"
_WAIT = timedelta(minutes=5)  # enough for another rank to import torch and read its data

_Function = Callable[..., Any]


class Joining:
    """Patches of torch.distributed that form a script's groups from torchtrim's ranks.

    A script alone (a world of one) forms its own, over gloo where an emulated device has no NCCL.
    """

    def __init__(self, world: int) -> None:
        self._notes: dict[str, None] = {}
        self._world = world
        self._groups = 0

    def notes(self, device: str) -> tuple[str, ...]:
        """Return the differences from the script's own groups. `device`: the rank's device."""
        several = self._world > 1 and is_emulated(device)
        return (*self._notes, *((_ONE_DEVICE,) if several else ()))

    def install(self) -> None:
        """Replace the functions that create groups, and those that gloo lacks."""
        if self._world > 1 and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max((os.cpu_count() or 1) // self._world, 1))
        emulate_devices(self._world)
        spawned = _SPAWNED if self._world > 1 else _SPAWNED_ALONE
        Spawning(self._world, lambda: self._notes.setdefault(spawned)).install()
        distributed: Any = torch.distributed
        if not distributed.is_available():
            return
        replace_in("torch.distributed", distributed.init_process_group, self._init_process_group)
        replace_in("torch.distributed", distributed.new_group, self._new_group)
        replace_in("torch.distributed", distributed.barrier, self._barrier)
        replace_in("torch.distributed", distributed.all_reduce, self._all_reduce)
        replace_in("torch.distributed", distributed.device_mesh.init_device_mesh, _init_device_mesh)

    def _init_process_group(
        self,
        original: _Function,
        backend: str | None = None,
        init_method: str | None = None,
        *args: Any,
        **options: Any,
    ) -> Any:
        backend = self._served(backend, options)
        world = options.get("world_size", -1)
        if self._world == 1 or args or world not in (-1, self._world):
            return original(backend, init_method, *args, **options)
        rank = options.get("rank", -1)
        options["rank"] = int(os.environ["RANK"]) if rank < 0 else rank
        options |= {"world_size": self._world, "store": self._store()}
        return original(backend, **options)

    def _store(self) -> Any:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["TORCHTRIM_PORT"])
        distributed: Any = torch.distributed
        store = distributed.TCPStore(host, port, is_master=False, timeout=_WAIT)
        self._groups += 1
        return distributed.PrefixStore(f"torchtrim/{self._groups}", store)

    def _new_group(
        self,
        original: _Function,
        ranks: Any = None,
        timeout: Any = None,
        backend: str | None = None,
        **options: Any,
    ) -> Any:
        served = self._served(backend, options) if backend is not None else None
        return original(ranks, timeout, served, **options)

    def _served(self, backend: str | None, options: dict[str, Any]) -> str | None:
        if _as_asked(self._world):
            return backend
        options.pop("device_id", None)
        if "nccl" in (backend or "nccl").lower() and (backend or current() is not None):
            self._notes.setdefault(_GLOO)
        return "gloo" if backend is None or "nccl" in backend.lower() else backend

    def _barrier(
        self, original: _Function, group: Any = None, async_op: bool = False, device_ids: Any = None
    ) -> Any:
        """Wait without devices, which gloo rejects."""
        return original(group, async_op, device_ids if _as_asked(self._world) else None)

    def _all_reduce(
        self,
        original: _Function,
        tensor: torch.Tensor,
        op: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Average through a sum, since gloo cannot average."""
        operations = torch.distributed.ReduceOp
        op = operations.SUM if op is None else op
        if op != operations.AVG or async_op or _as_asked(self._world):
            return original(tensor, op, group, async_op)
        done = original(tensor, operations.SUM, group, False)
        tensor.div_(torch.distributed.get_world_size(group))
        return done


def _init_device_mesh(original: _Function, *args: Any, **options: Any) -> Any:
    """Have a `DTensor` on an emulated device draw as on the host, which has no offsets."""
    if current() is not None:
        from torch.distributed.tensor import _dispatch, _random

        modules: tuple[Any, ...] = (_dispatch, _random)
        for module in modules:
            module.is_rng_supported_mesh = lambda _: False
    return original(*args, **options)


def _as_asked(world: int) -> bool:
    """Return True if the script's backend can serve: alone on the host, or NCCL with one real GPU per rank.

    A call of `torch.cuda` would begin emulation.
    """
    count = getattr(torch._C, "_cuda_getDeviceCount", None)
    if current() is None and world == 1:
        return True
    if current() is not None or count is None or not torch.distributed.is_nccl_available():
        return False
    return bool(count() >= world)


_LAUNCHED = "TORCHELASTIC_"


class Spawning:
    """Patches that call a function in this rank instead of spawning `world` processes.

    `told` is called before each such call.
    """

    def __init__(self, world: int, told: Callable[[], None] = lambda: None) -> None:
        self._world = world
        self._told = told

    def install(self) -> None:
        """Replace the functions that spawn."""
        multiprocessing: Any = torch.multiprocessing
        for original in (multiprocessing.spawn, multiprocessing.start_processes):
            replace_in("torch.multiprocessing", original, self._spawn)
        if self._world > 1 and torch.distributed.is_available():
            from torch.distributed.launcher import api

            replace_in("torch.distributed", api.launch_agent, self._launch_agent)

    def _spawn(
        self,
        original: _Function,
        fn: Any,
        args: Any = (),
        nprocs: int = 1,
        join: bool = True,
        *more: Any,
        **options: Any,
    ) -> Any:
        if nprocs != self._world:
            return original(fn, args, nprocs, join, *more, **options)
        self._run(fn, (int(os.environ["RANK"]) if nprocs > 1 else 0, *args))
        return None if join else _NoProcesses()

    def _launch_agent(
        self, original: _Function, config: Any, entrypoint: Any, args: Any, **options: Any
    ) -> Any:
        """Call the entry point of `elastic_launch` here; a command still starts processes."""
        ours = config.nproc_per_node == self._world and config.max_nodes == 1
        if not ours or not callable(entrypoint):
            return original(config, entrypoint, args, **options)
        return {int(os.environ["RANK"]): self._run(entrypoint, tuple(args), launched=True)}

    def _run(self, function: Any, args: tuple[Any, ...], *, launched: bool = False) -> Any:
        """Call the function, without torchrun's variables unless it would be launched with them."""
        self._told()
        names = () if launched else [name for name in os.environ if name.startswith(_LAUNCHED)]
        hidden = {name: os.environ.pop(name) for name in names}
        try:
            return function(*args)
        finally:
            os.environ.update(hidden)


class _NoProcesses:
    """Stand-in for torch's handle of spawned processes, all ended."""

    processes: tuple[Any, ...] = ()

    def join(self, *_: Any, **__: Any) -> bool:
        return True

    def pids(self) -> list[int]:
        return []


def replace_in(package: str, original: Any, ours: _Function) -> None:
    """Replace a function in every module of a package that holds it under its name.

    `ours` gets the original before the arguments.
    """

    @functools.wraps(original)
    def replacement(*args: Any, **options: Any) -> Any:
        return ours(original, *args, **options)

    name = original.__name__
    for where, module in list(sys.modules.items()):
        if where.startswith(package) and vars(module).get(name) is original:
            setattr(module, name, replacement)
