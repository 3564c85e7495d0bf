"""Runs of a script whose `torch.compile` stays on: its graphs are watched, planned, or compiled by a plan.

Inductor is imported when the script first compiles, since that takes seconds.
"""

from __future__ import annotations

import contextlib
import functools
import re
import time
import types
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from torchtrim.capture.watch import Watcher
from torchtrim.dispatch.patches import Patches
from torchtrim.dispatch.places import Places
from torchtrim.records.plan import CompiledGraph
from torchtrim.records.profile import CompiledFunction
from torchtrim.records.trial import CompiledMemory, Request, Trial
from torchtrim.runner.compiled_calls import CompiledCalls

_LONGEST = 200
"""Arbitrary; characters of a guard in a sentence."""
_LINE = re.compile(r'File "([^"]+)", line (\d+)')
_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_(\d+)")
_ID = re.compile(r"^\d+/\d+: ")
INDUCTOR = "inductor"
"""The backend whose graphs are planned."""
EAGERLY = (
    "the script uses torch.compile: its compiled functions ran eagerly here, and all figures "
    "refer to that. "
    "An eager plan is for eager runs, and `torchtrim run` runs it eagerly"
)
_OTHER_BACKEND = (
    "the script compiles by the backend {}, which torchtrim does not plan: what that compiles ran "
    "eagerly"
)


class OnCompile:
    """A watch for a script's `torch.compile`. Code compiled by other backends than `kept` runs eagerly.

    `first` is called before the first compile by one of them, or by any without `kept`. `calls` wraps the
    compiled functions that are no modules. `asked`: the backends that the script has named.
    """

    def __init__(
        self,
        first: Callable[[], None] = lambda: None,
        kept: Sequence[str] = (),
        calls: Callable[[Any], Any] = lambda compiled: compiled,
    ) -> None:
        self._calls = calls
        self._first: Callable[[], None] | None = first
        self._kept = kept
        self._patches = Patches()
        self.asked: set[str] = set()

    def install(self) -> None:
        """Replace `torch.compile`, also as a decorator, and `Module.compile`."""
        self._patches.replace(torch, "compile", self._watched(torch.compile))
        if not self._kept:
            self._patches.replace(nn.Module, "compile", self._eager_method())

    def remove(self) -> None:
        """Undo `install`."""
        self._patches.undo()

    def _watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def compile(model: Any = None, **options: Any) -> Any:
            name = self._ask(options.get("backend", INDUCTOR))
            if name not in self._kept:
                if isinstance(model, (types.FunctionType, types.MethodType, functools.partial)):
                    return _plain(model)
                options = {**options, "backend": "eager", "mode": None, "options": None}
            compiled = original(model, **options)
            is_function = not (model is None or isinstance(model, nn.Module))
            return self._calls(compiled) if is_function and name in self._kept else compiled

        return compile

    def _eager_method(self) -> Callable[..., None]:
        def compile(module: nn.Module, *_: Any, backend: Any = INDUCTOR, **__: Any) -> None:
            self._ask(backend)

        return compile

    def _ask(self, backend: Any) -> str:
        """Note a backend, and return its name."""
        name = backend if isinstance(backend, str) else getattr(backend, "__name__", "of its own")
        self.asked.add(name)
        if name in self._kept or not self._kept:
            self._begin()
        return name

    def _begin(self) -> None:
        first, self._first = self._first, None
        if first is None:
            return
        if not self._kept:  # no graph at all: its guards and its tracing would cost time
            self._patches.on_undo(torch.compiler.set_stance, "default")
            torch.compiler.set_stance("force_eager")
        first()


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function to run without Dynamo.

    Dynamo resets the dispatch keys when the function returns, and a recording that began inside, with the
    model's forward, would miss all later operators.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return functools.update_wrapper(run, function)


class Applying:
    """A plan of compiled graphs for a script, from its first `torch.compile` on."""

    def __init__(
        self, plan: Sequence[CompiledGraph], watcher: Watcher, calls: CompiledCalls | None = None
    ) -> None:
        self._plan = plan
        self._stack = contextlib.ExitStack()
        self._calls = calls or CompiledCalls(watcher)
        self._on_compile = OnCompile(self._begin, (INDUCTOR,), self._calls.watched)
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
        self._stack.enter_context(self._calls.noted())

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


class CompileLog:
    """A log of what torch compiles from now on, by step. `project`: the folder of the user's source."""

    def __init__(self, project: str) -> None:
        self._places = Places(project)
        self._step = 0
        self._last = time.time_ns() // 1000
        self._frames: defaultdict[str, list[tuple[int, Any]]] = defaultdict(list)

    def begin(self) -> None:
        """Note that a step begins."""
        self._note()
        self._step += 1

    def found(self) -> tuple[CompiledFunction, ...]:
        """Return the functions compiled in more than one step up to now, and rests behind graph breaks."""
        self._note()
        functions = (self._function(each) for each in self._frames.values() if _steps(each))
        return tuple(one for one in functions if one.steps > 1 or one.broken)

    def _note(self) -> None:
        from torchtrim.compiled.inductor import compiles_since

        for one in compiles_since(self._last):
            self._last = max(self._last, one.begun)
            self._frames[one.frame].append((self._step, one))

    def _function(self, found: Sequence[tuple[int, Any]]) -> CompiledFunction:
        steps = _steps(found)
        last = [one for _, one in found if one.function][-1]
        rest = _RESUMED.fullmatch(last.function)
        is_users = self._places.is_users_file(last.path)
        broken = is_users and rest is not None
        path, line = (last.path, int(rest[2])) if broken and rest else self._line(last)
        name = rest[1] if rest is not None else last.function
        return CompiledFunction(
            function=name if is_users else "",
            path=path,
            line=line,
            broken=broken,
            steps=len(steps),
            watched=self._step,
            seconds=sum(one.seconds for step, one in found if step > min(steps)),
            guard=_guard(last.reason),
        )

    def _line(self, one: Any) -> tuple[str, int]:
        """Return the user's line that a compile is for: the innermost known, or where the function begins."""
        lines = [(path, int(number)) for path, number in _LINE.findall(one.reason)]
        known = [*reversed(lines), (one.path, one.line)]
        return next((each for each in known if self._places.is_users_file(each[0])), ("", 0))


def _steps(found: Sequence[tuple[int, Any]]) -> set[int]:
    """Return the steps in which a function was compiled; its graph's backward may be in a later one."""
    return {step for step, one in found if one.function}


def _guard(reason: str) -> str:
    """Return the condition of torch's code that a call did not meet, in torch's words, on one line."""
    first = reason.partition("\n")[0].partition("  #")[0]
    return _ID.sub("", first).strip()[:_LONGEST]


class Compiling:
    """A script's `torch.compile` in a requested run: it runs eagerly, or is left on.

    Left on, the graphs are an original's, planned ones, or watched to be planned. `project`: the folder of
    the user's source.
    """

    def __init__(self, request: Request, watcher: Watcher, project: str = "") -> None:
        plan = request.plan.compiled if request.plan is not None else ()
        self._request = request
        self._plan = Applying(plan, watcher) if plan else None
        self._calls = CompiledCalls(watcher)
        kept = (INDUCTOR,) if request.compiles else ()
        self._on_compile = OnCompile(self._begin, kept, self._calls.watched)
        self._graphs: Any = None
        self._marks: Any = None
        self._log: CompileLog | None = None
        self._project = project
        self._stack = contextlib.ExitStack()

    def install(self) -> None:
        """Begin to wait for the script to compile."""
        (self._plan or self._on_compile).install()

    def step_begins(self) -> None:
        """Note that a step begins."""
        for one in (self._graphs, self._marks, self._log):
            if one is not None:
                one.begin()

    def end(self, trial: Trial) -> str:
        """Put what is known of the graphs into the trial. Return why the plan does not hold, if so."""
        if self._plan is not None:
            return "" if trial.crash is not None else self._plan.missed()
        asked = trial.backends = tuple(sorted(self._on_compile.asked))
        if not self._request.compiles:
            trial.notes += (EAGERLY,) if asked else ()
            return ""
        trial.again = self._log.found() if self._log is not None else ()
        others = (one for one in asked if one not in (INDUCTOR, "eager"))
        trial.notes += tuple(map(_OTHER_BACKEND.format, others))
        if trial.crash is None and self._graphs is not None and self._graphs.joints:
            try:
                trial.compiled = planned(self._graphs, self._request)
            except Exception as error:  # torch's own, from the private interfaces
                trial.unplanned = f"{type(error).__name__}: {error}"
        return ""

    def _begin(self) -> None:
        if self._request.graphs_save >= 0:
            from torchtrim.compiled.graphs import Graphs

            self._graphs = Graphs()
            self._stack.enter_context(self._graphs.watched())
            self._stack.enter_context(self._calls.noted())
        elif self._request.compiles:
            from torchtrim.compiled.phases import PhaseMarks

            self._log = CompileLog(self._project)
            self._marks = PhaseMarks()
            self._stack.enter_context(self._marks.updates())
            self._stack.enter_context(self._calls.noted(self._marks.marked))


def planned(graphs: Any, request: Request) -> CompiledMemory:
    """Return the graphs' memory, and a plan that needs as many bytes less as requested, or the fewest."""
    from torchtrim.compiled.planning import GraphPlanner

    planner = GraphPlanner(graphs, request.phases)
    budget = planner.own.peak_bytes - request.graphs_save
    choice = planner.plan(budget) or planner.lowest
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
