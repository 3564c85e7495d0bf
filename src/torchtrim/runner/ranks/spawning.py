"""Has what a script would spawn as processes of its own run in the ranks that are there."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

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
