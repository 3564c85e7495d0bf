"""How a rank joins the others: where its parent says, and over gloo where there is no NCCL."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch

from torchtrim.emulator.device import current
from torchtrim.emulator.moves import emulate_devices
from torchtrim.records.profile import is_emulated

_GLOO = (
    "the ranks exchange over gloo, on the host: the script asks for NCCL, which needs a GPU for each rank. "
    "What is exchanged, and in which order, is the same; times are not"
)
_SPAWNED = "what the script would spawn runs in the ranks that torchtrim started"
_ONE_DEVICE = "each rank has an emulated device of its own, and calls it cuda:0"
_WAIT = timedelta(minutes=5)
_NAMES = ("init_process_group", "new_group", "barrier", "all_reduce")


class Joining:
    """From `install` on, groups of ranks are made so."""

    def __init__(self, world: int) -> None:
        self._notes: list[str] = []
        self._world = world
        self._groups = 0

    def notes(self, device: str) -> tuple[str, ...]:
        """What is not as the script asks. `device`: the one that the rank ran on."""
        several = self._world > 1 and is_emulated(device)
        return (*self._notes, *((_ONE_DEVICE,) if several else ()))

    def install(self) -> None:
        """Stand in for what makes groups, and for what gloo does not have."""
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(max((os.cpu_count() or 1) // self._world, 1))
        emulate_devices(self._world)
        for name in _NAMES:
            wrap = getattr(self, f"_{name}")
            original = getattr(torch.distributed, name)
            replace_in("torch.distributed", original, wrap(original))
        meshes: Any = torch.distributed.device_mesh
        replace_in("torch.distributed", meshes.init_device_mesh, _meshed(meshes.init_device_mesh))
        Spawning(self._world, self._spawned).install()

    def _spawned(self) -> None:
        self._notes += [] if _SPAWNED in self._notes else [_SPAWNED]

    def _init_process_group(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def init_process_group(
            backend: str | None = None, init_method: str | None = None, *args: Any, **options: Any
        ) -> Any:
            backend = self._served(backend, options)
            world = options.get("world_size", -1)
            if args or world not in (-1, self._world):
                return original(backend, init_method, *args, **options)
            rank = options.get("rank", -1)
            options["rank"] = int(os.environ["RANK"]) if rank < 0 else rank
            options |= {"world_size": self._world, "store": self._store()}
            return original(backend, **options)

        return init_process_group

    def _store(self) -> Any:
        """A connection to the parent's store, where each group of all ranks has keys of its own."""
        host, port = os.environ["MASTER_ADDR"], int(os.environ["TORCHTRIM_PORT"])
        distributed: Any = torch.distributed
        store = distributed.TCPStore(host, port, is_master=False, timeout=_WAIT)
        self._groups += 1
        return distributed.PrefixStore(f"torchtrim/{self._groups}", store)

    def _new_group(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def new_group(
            ranks: Any = None, timeout: Any = None, backend: str | None = None, **options: Any
        ) -> Any:
            served = self._served(backend, options) if backend is not None else None
            return original(ranks, timeout, served, **options)

        return new_group

    def _served(self, backend: str | None, options: dict[str, Any]) -> str | None:
        """The backend that a group gets."""
        if _has_nccl(self._world):
            return backend
        options.pop("device_id", None)
        if "nccl" in (backend or "nccl").lower() and (backend or current() is not None):
            self._notes += [] if _GLOO in self._notes else [_GLOO]
        return "gloo" if backend is None or "nccl" in backend.lower() else backend

    def _barrier(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """gloo takes no devices."""

        @functools.wraps(original)
        def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
            devices = device_ids if _has_nccl(self._world) else None
            return original(group, async_op, devices)

        return barrier

    def _all_reduce(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """gloo has no average, but sums."""
        average = torch.distributed.ReduceOp.AVG

        @functools.wraps(original)
        def all_reduce(
            tensor: torch.Tensor,
            op: Any = torch.distributed.ReduceOp.SUM,
            group: Any = None,
            async_op: bool = False,
        ) -> Any:
            if op != average or async_op or _has_nccl(self._world):
                return original(tensor, op, group, async_op)
            done = original(tensor, torch.distributed.ReduceOp.SUM, group, False)
            tensor.div_(torch.distributed.get_world_size(group))
            return done

        return all_reduce


def _meshed(original: Callable[..., Any]) -> Callable[..., Any]:
    """Random numbers of a `DTensor` on an emulated device are drawn as on the host, which has no offsets."""

    @functools.wraps(original)
    def init_device_mesh(*args: Any, **options: Any) -> Any:
        if current() is not None:
            from torch.distributed.tensor import _dispatch, _random

            modules: tuple[Any, ...] = (_dispatch, _random)
            for module in modules:
                module.is_rng_supported_mesh = _no_offsets
        return original(*args, **options)

    return init_device_mesh


def _no_offsets(mesh: Any) -> bool:
    return False


def _has_nccl(world: int) -> bool:
    """Whether there is NCCL, and a real GPU for each rank. To ask `torch.cuda` would begin emulation."""
    count = getattr(torch._C, "_cuda_getDeviceCount", None)
    if current() is not None or count is None or not torch.distributed.is_nccl_available():
        return False
    return bool(count() >= world)


_PACKAGE = "torch.multiprocessing"
_LAUNCHED = "TORCHELASTIC_"


class Spawning:
    """From `install` on, so many processes are not spawned. `told` is called when some would be."""

    def __init__(self, world: int, told: Callable[[], None] = lambda: None) -> None:
        self._world = world
        self._told = told

    def install(self) -> None:
        """Stand in for what spawns."""
        multiprocessing: Any = torch.multiprocessing
        for original in (multiprocessing.spawn, multiprocessing.start_processes):
            replace_in(_PACKAGE, original, self._spawn(original))
        if torch.distributed.is_available():
            from torch.distributed.launcher import api

            replace_in("torch.distributed", api.launch_agent, self._agent(api.launch_agent))

    def _spawn(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def spawn(
            fn: Any, args: Any = (), nprocs: int = 1, join: bool = True, *more: Any, **options: Any
        ) -> Any:
            if nprocs != self._world:
                return original(fn, args, nprocs, join, *more, **options)
            self._run(fn, (_rank(), *args))
            return None if join else NoProcesses()

        return spawn

    def _agent(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """What `elastic_launch` calls; a command is none of ours."""

        @functools.wraps(original)
        def launch_agent(config: Any, entrypoint: Any, args: Any, **options: Any) -> Any:
            ours = config.nproc_per_node == self._world and config.max_nodes == 1
            if not ours or not callable(entrypoint):
                return original(config, entrypoint, args, **options)
            return {_rank(): self._run(entrypoint, tuple(args), launched=True)}

        return launch_agent

    def _run(self, function: Any, args: tuple[Any, ...], *, launched: bool = False) -> Any:
        self._told()
        with _as_spawned(launched):
            return function(*args)


class NoProcesses:
    """A handle of processes of which none was started: all are over."""

    processes: tuple[Any, ...] = ()

    def join(self, *_: Any, **__: Any) -> bool:
        """They have ended."""
        return True

    def pids(self) -> list[int]:
        """None."""
        return []


def replace_in(package: str, original: Any, ours: Any) -> None:
    """Replace a function of a package wherever its modules have it by its name."""
    name = original.__name__
    for where, module in list(sys.modules.items()):
        if where.startswith(package) and vars(module).get(name) is original:
            setattr(module, name, ours)


def _rank() -> int:
    return int(os.environ["RANK"])


@contextmanager
def _as_spawned(launched: bool) -> Iterator[None]:
    """A process that a script spawns finds none of torchrun's own variables."""
    names = () if launched else [name for name in os.environ if name.startswith(_LAUNCHED)]
    taken = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ.update(taken)
