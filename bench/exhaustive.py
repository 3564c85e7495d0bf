"""The smallest peak of per-block checkpointing, by running every subset of blocks of an example.

    python -m bench.exhaustive [EXAMPLE ...]

A block is a child of a ModuleList, a child with children of a Sequential, or, in a flat Sequential, a
layer with parameters and what follows it. The script runs unmodified in one process; before each of its
steps another subset is applied, and the step's peak is measured. Beside it stands the smallest peak of
torchtrim's own plans on the same script with the same arguments, measured as well. Where there are very
many subsets the batch is smaller than the example's.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import runpy
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from bench.examples import NAMES, script
from bench.machine import save
from torchtrim.capture.allocator import allocator_for
from torchtrim.capture.modules import Modules
from torchtrim.capture.watch import Listener, Watcher
from torchtrim.dispatch.storages import reachable_bytes
from torchtrim.executor.registry import Handle, technique
from torchtrim.records.budget import Budget
from torchtrim.records.plan import Technique
from torchtrim.records.trial import Request
from torchtrim.workflows.optimize.fitting import Fitting

_MOST_SUBSETS = 2048
_FLAT = 4
_SMALLER = {"segmentation": ("--batch-size", "1"), "gan": ("--batch-size", "16")}


class Stop(BaseException):
    """All subsets were tried."""


def blocks_of(name: str, root: nn.Module) -> Iterator[str]:
    """Places of the root's blocks."""
    inside: set[str] = set()
    for path, module in root.named_modules():
        where = f"{name}.{path}" if path else name
        children = list(module.children())
        if where.rpartition(".")[0] in inside:
            inside.add(where)
            continue
        if isinstance(module, nn.ModuleList) or (
            isinstance(module, nn.Sequential) and any(list(child.children()) for child in children)
        ):
            blocks = [f"{where}.{i}" for i, child in enumerate(children) if _is_block(child)]
            inside.update(blocks)
            yield from blocks
        elif isinstance(module, nn.Sequential) and len(children) >= _FLAT and where not in inside:
            starts = [
                i for i, child in enumerate(children) if list(child.parameters(recurse=False))
            ]
            weighty = [
                i for i in starts if not isinstance(children[i], nn.modules.batchnorm._NormBase)
            ]
            for first, last in itertools.pairwise([*weighty, len(children)]):
                yield f"{where}[{first}:{last}]"


def _is_block(module: nn.Module) -> bool:
    """Whether the module is a block itself and does not hold a list of blocks."""
    return not any(isinstance(inner, nn.ModuleList) for inner in module.modules())


class Exhaustive(Listener):
    """Applies one subset after the other, a step each."""

    def __init__(self) -> None:
        self.watcher = Watcher(self)
        self.modules = Modules()
        self.peaks: dict[tuple[str, ...], int] = {}
        self._allocator = allocator_for("cpu")
        self._subset: tuple[str, ...] = ()
        self._subsets: Iterator[tuple[str, ...]] | None = None
        self._handle: Handle | None = None
        self._alive = 0
        self._steps = 0

    def root_appears(self, root: nn.Module) -> None:
        self.modules.add_root(root)

    def training_begins(self) -> None:
        self._allocator.start()

    def step_ends(self) -> None:
        watched = self._allocator.stop()
        self._steps += 1
        if self._steps == 2:
            self._alive = reachable_bytes()
            self._subsets = self._all()
        elif self._steps > 2:
            self.peaks[self._subset] = self._alive + watched.peak
            self._alive += watched.end
        if self._subsets is not None:
            self._next()
        self._allocator.start()

    def _all(self) -> Iterator[tuple[str, ...]]:
        blocks = [
            where for name, root in self.modules.roots.items() for where in blocks_of(name, root)
        ]
        subsets = itertools.chain.from_iterable(
            itertools.combinations(blocks, size) for size in range(len(blocks) + 1)
        )
        self.blocks = blocks
        return itertools.islice(subsets, _MOST_SUBSETS)

    def _next(self) -> None:
        if self._handle is not None:
            self._handle.revert()
        assert self._subsets is not None
        subset = next(self._subsets, None)
        if subset is None:
            raise Stop
        self._subset = subset
        self._handle = technique("recompute").apply(
            self.modules.roots, Technique(name="recompute", where=subset)
        )


def measure(name: str) -> dict[str, Any]:
    """Every subset of one example's blocks."""
    search = Exhaustive()
    more = _SMALLER.get(name, ())
    sys.argv = [script(name).target, "--steps", "100000", "--log-every", "100000", *more]
    with search.watcher, contextlib.suppress(Stop):
        runpy.run_path(sys.argv[0], run_name="__main__")
    best = min(search.peaks, key=search.peaks.__getitem__)
    floor = floor_of(name, more)
    return {
        "floor_bytes": floor,
        "floor_over_best": round(floor / search.peaks[best], 4),
        "arguments": list(more),
        "blocks": search.blocks,
        "subsets": len(search.peaks),
        "all_subsets": 2 ** len(search.blocks),
        "original_bytes": search.peaks[()],
        "best_bytes": search.peaks[best],
        "best": list(best),
    }


def floor_of(name: str, arguments: tuple[str, ...]) -> int:
    """The smallest peak that torchtrim finds, measured."""
    fitting = Fitting(script(name)._replace(args=arguments), Request(), lambda _: None)
    planner = fitting.planner(fitting.observe())
    return fitting.run_planned(planner.floor_plan(Budget(1))).peak_bytes


def main() -> None:
    """Run the named examples, or all."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    for name in sys.argv[1:] or NAMES:
        found = measure(name)
        print(name, found, flush=True)
        save(f"exhaustive-{name}", found)


if __name__ == "__main__":
    main()
