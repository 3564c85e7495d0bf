"""Runs of a script whose `torch.compile` stays on: its graphs are watched, planned, or compiled by a plan.

Inductor is imported when the script first compiles, since that takes seconds.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchtrim.dispatch.patches import Patches
from torchtrim.records.plan import CompiledGraph
from torchtrim.records.trial import CompiledMemory, Request, Trial

OTHER_BACKEND = (
    "the script compiles by the backend {}, which torchtrim does not plan: what that compiles ran "
    "eagerly"
)


NOT_PLANNED = "the compiled graphs were not planned"


class OnCompile:
    """A watch for a script's first `torch.compile` by Inductor, before which `first` is called.

    What other backends compile runs eagerly; `others` names them.
    """

    def __init__(self, first: Callable[[], None]) -> None:
        self._first: Callable[[], None] | None = first
        self._patches = Patches()
        self.others: set[str] = set()

    def install(self) -> None:
        """Replace `torch.compile`, which `Module.compile` calls."""
        self._patches.replace(torch, "compile", self._asked(torch.compile))

    def remove(self) -> None:
        """Undo `install`."""
        self._patches.undo()

    def _asked(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def compile(model: Any = None, **options: Any) -> Any:
            backend = options.get("backend", "inductor")
            if backend not in ("inductor", "eager"):
                self.others.add(backend if isinstance(backend, str) else repr(backend))
                for name in ("mode", "options"):
                    options.pop(name, None)
                return original(model, **{**options, "backend": "eager"})
            first, self._first = self._first, None
            if first is not None:
                first()
            return original(model, **options)

        return compile


class Applying:
    """A plan of compiled graphs for a script, from its first `torch.compile` on."""

    def __init__(self, plan: Sequence[CompiledGraph]) -> None:
        self._plan = plan
        self._stack = contextlib.ExitStack()
        self._on_compile = OnCompile(self._begin)
        self._applied: Any = None

    def install(self) -> None:
        """Begin to wait for the script to compile."""
        self._on_compile.install()

    def remove(self) -> None:
        """Have Inductor partition as it does by itself."""
        self._on_compile.remove()
        self._stack.close()

    def _begin(self) -> None:
        from torchtrim.compiled.apply import Applied

        self._applied = Applied(self._plan)
        self._stack.enter_context(self._applied.installed())

    def missed(self) -> str:
        """Return why the plan does not hold for this run, or an empty text."""
        if self._applied is None:
            return (
                "the script compiled nothing by Inductor, and the plan is for its compiled graphs"
            )
        if self._applied.failures:
            return f"torch partitioned a graph by itself: {self._applied.failures[0]}"
        if self._applied.unused and self._applied.others:
            return (
                f"{len(self._applied.unused)} of the plan's compiled graphs did not occur, and "
                f"{len(self._applied.others)} others did, which save what torch saves by itself: the "
                "model, its shapes or torch have changed"
            )
        return ""


class Compiling:
    """The compiled graphs of a requested run: of an original, a planned one, or one to plan."""

    def __init__(self, request: Request) -> None:
        plan = request.plan.compiled if request.plan is not None else ()
        self._request = request
        self._plan = Applying(plan) if plan else None
        self._on_compile = OnCompile(self._begin)
        self._graphs: Any = None
        self._stack = contextlib.ExitStack()

    def install(self) -> None:
        """Leave `torch.compile` on."""
        (self._plan or self._on_compile).install()

    def step_begins(self) -> None:
        """Note that a step begins."""
        if self._graphs is not None:
            self._graphs.begin()

    def end(self, trial: Trial) -> str:
        """Put what is known of the graphs into the trial. Return why the plan does not hold, if so."""
        if self._plan is not None:
            return self._plan.missed()
        trial.notes += tuple(OTHER_BACKEND.format(one) for one in sorted(self._on_compile.others))
        if self._graphs is not None and self._graphs.joints:
            try:
                trial.compiled = planned(self._graphs, self._request.graphs_save)
            except Exception as error:  # torch's own, from the private interfaces
                trial.notes += (f"{NOT_PLANNED}: {type(error).__name__}: {error}",)
        return ""

    def _begin(self) -> None:
        if self._request.graphs_save >= 0:
            from torchtrim.compiled.graphs import Graphs

            self._graphs = Graphs()
            self._stack.enter_context(self._graphs.watched())


def planned(graphs: Any, saving: int) -> CompiledMemory:
    """Return the graphs' memory, and a plan that needs this many bytes less, or as few as possible."""
    from torchtrim.compiled.planning import GraphPlanner

    planner = GraphPlanner(graphs)
    choice = planner.plan(planner.own.peak_bytes - saving) or planner.lowest
    return CompiledMemory(
        calls=len(graphs.joints),
        saved_bytes=planner.own.saved_bytes,
        peak_bytes=planner.own.peak_bytes,
        graphs=planner.alone,
        planned_peak=choice.simulated.peak_bytes,
        plan=choice.graphs,
        added_seconds=choice.added_seconds,
        unmeasured=planner.own.unmeasured,
    )
