"""Runs of a script, whole or as the ranks of a pipeline, for the pipeline's certificate."""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode

from torchtrim.capture.count import Counter
from torchtrim.capture.modules import Modules
from torchtrim.capture.watch import Listener, Watcher
from torchtrim.errors import ApplyFailed, ScriptFailed, TorchtrimError, UsageError
from torchtrim.evidence.evidence import bytes_of, digest_of
from torchtrim.executor.apply import fingerprint_of
from torchtrim.executor.swap import Swapped, is_traced
from torchtrim.pipelines.clocks import clocking
from torchtrim.pipelines.engine import Engine
from torchtrim.pipelines.lone import in_one_process
from torchtrim.pipelines.several import Several, clipping_together, in_several_processes
from torchtrim.records.files import write_atomically
from torchtrim.records.pipeline import Pipeline, StageSeconds
from torchtrim.records.plan import Plan
from torchtrim.records.trial import Crash
from torchtrim.runner.ranks import (
    RankEnded,
    crash_in,
    first_failed,
    folder_of,
    on_rank,
    run_ranks,
)
from torchtrim.runner.script import OUTCOME, STATUS, TASK, Script, Target, failure, run_script
from torchtrim.runner.settings import precision
from torchtrim.runner.worker import Stop, run_in_folder, run_to_crash, seed_all, seed_with

Progress = Callable[[str], None]


def run_stages(
    script: Script, task: StageTask, ranks: int, folder: Path, progress: Progress
) -> list[tuple[StageTrial, Path]]:
    """Run the task on each rank, and end all of them; return each rank's trial and folder.

    Raises `ScriptFailed` if a rank fails, and `ApplyFailed` if the plan was refused.
    """
    script.check()
    script = script._replace(processes=ranks, only=0 if ranks == 1 else -1)
    task = msgspec.structs.replace(task, method=str((folder / "store").absolute()))
    order, entry = msgspec.json.encode(task), "torchtrim.runner.stage_worker"
    if ranks > 1:
        ended = run_ranks(
            script, [order] * ranks, folder=folder, progress=progress, entry=entry, hide_gpu=True
        )
    else:  # a single process gets no variables of torchrun's
        end = run_script(
            script, order, entry=entry, folder=folder, progress=progress, hide_gpu=True
        )
        well = end.outcome is not None and crash_in(end.outcome) is None
        ended = [RankEnded(0, end, None if well else 0, False, script.timeout, ())]
    culprit = first_failed(ended)
    if culprit is not None:
        raise _error(culprit, ended, script)
    folders = [folder_of(folder, rank.number, script.only) for rank in ended]
    trials = [msgspec.json.decode(rank.ended.outcome or b"", type=StageTrial) for rank in ended]
    return list(zip(trials, folders, strict=True))


def _error(culprit: RankEnded, ranks: list[RankEnded], script: Script) -> Exception:
    crash = crash_in(culprit.ended.outcome)
    if crash is not None and crash.kind == "refused":
        return ApplyFailed(crash.message)
    if crash is None:
        error = failure(culprit.ended, script.timeout)
    else:
        trace = crash.traceback or culprit.ended.output
        error = ScriptFailed(f"the script failed: {crash.message}", traceback=trace)
    if len(ranks) > 1:
        on_rank(error, culprit, ranks, script.project)
    return error


VALUES = "gradient"
How = Literal["whole", "in order", "pipeline", "clocked"]


class StageTask(msgspec.Struct, frozen=True, kw_only=True):
    """The parent's order: the script, and a way to run its steps.

    `how`: the unchanged script, one process in the schedule's order, several processes, or the actions of
    each pipeline in `clocked` one by one. `still`: turn dropout off. `double`: run in float64. `nudged`: the
    seed of a perturbed run. `method`: the ranks' rendezvous, an `init_method` of `init_process_group`.
    `measured`: count bytes.
    """

    target: Target
    plan: Plan
    how: How
    steps: int
    threads: int
    still: bool = False
    double: bool = False
    nudged: int = 0
    measured: bool = False
    method: str = ""
    clocked: tuple[Pipeline, ...] = ()


class StageTrial(msgspec.Struct, kw_only=True):
    """The outcome of a run. `steps`: digests of gradients before each update and of parameters after it.

    `dropped`: the script uses dropout. `peak_bytes`: highest rise of storages within a step's schedule.
    `seconds`: duration of each step's schedule. `clocks`: for each pipeline, the seconds of each stage's
    actions.
    """

    steps: list[dict[str, str]] = []
    names: list[str] = []
    dropped: bool = False
    peak_bytes: int = 0
    seconds: list[float] = []
    clocks: list[tuple[StageSeconds, ...]] = []
    crash: Crash | None = None


class _Refused(Exception):
    """Error of a plan that was made for another model."""


class _Still(TorchFunctionMode):
    """Mode that turns dropout off if `on`, and notes in `dropped` that the script uses it."""

    def __init__(self, on: bool) -> None:
        super().__init__()
        self._on = on
        self.dropped = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "dropout" and (len(args) < 2 or args[1]) and kwargs.get("p", 1):
            self.dropped |= bool(kwargs.get("training", len(args) > 2 and args[2]))
            if self._on:
                return args[0]
        elif name == "scaled_dot_product_attention" and kwargs.get("dropout_p", 0):
            self.dropped = True
            kwargs["dropout_p"] = 0.0 if self._on else kwargs["dropout_p"]
        return func(*args, **kwargs)


class _Collects(Listener):
    """Collector of each step's results, which ends the script after the last step."""

    def __init__(self, runner: _StageRunner) -> None:
        self._runner = runner
        self._modules = Modules()
        self._roots: dict[str, nn.Module] = {}

    def root_appears(self, root: nn.Module) -> None:
        self._roots[self._modules.add_root(root)] = root
        stages = self._runner.stages
        if stages is not None and stages.root is None:
            stages.root_appears(root)
            if stages.executor is not None and self._runner.task.measured:
                stages.executor.around = self._runner.measure

    def optimizer_starts(self, optimizer: torch.optim.Optimizer) -> None:
        graded = [(n, p.grad) for n, p in self._parameters() if p.grad is not None]
        steps = self._runner.trial.steps
        steps.append({f"gradient:{name}": digest_of(grad) for name, grad in graded})
        if len(steps) == 1:
            self._runner.keep(graded)

    def optimizer_ends(self, optimizer: torch.optim.Optimizer) -> None:
        step = self._runner.trial.steps[-1]
        changed = [(n, p) for n, p in self._parameters() if f"gradient:{n}" in step]
        step.update((f"parameter:{name}", digest_of(p.detach())) for name, p in changed)
        if len(self._runner.trial.steps) == self._runner.task.steps:
            raise Stop

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        root = self._roots.get(self._runner.pipeline.root)
        if root is not None:
            yield from root.named_parameters()


class _StageRunner:
    """Runner of one task, which writes the outcome into the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.task = msgspec.json.decode((folder / TASK).read_bytes(), type=StageTask)
        self.trial = StageTrial()
        self.stages: StageApplier | None = None
        assert self.task.plan.pipeline is not None
        self.pipeline = self.task.plan.pipeline
        if self.task.how != "whole":
            several = self.task.how == "pipeline"
            engine_of = self._clocking if self.task.how == "clocked" else in_one_process
            self.stages = StageApplier(
                self.task.plan, several=several, refused=_Refused, engine_of=engine_of
            )

    def run(self) -> None:
        torch.set_num_threads(self.task.threads)
        seed_all()
        if self.task.double:
            torch.set_default_dtype(torch.float64)
        still = _Still(self.task.still)
        with contextlib.ExitStack() as stack:
            if self.task.how == "pipeline":
                stack.enter_context(among_ranks(self.pipeline, f"file://{self.task.method}"))
                seed_all()
            stack.enter_context(precision(double=self.task.double, nudged=self.task.nudged))
            stack.enter_context(still)
            self.trial.crash = self._run_watched()
            self.trial.dropped = still.dropped
            write_atomically(self._folder / OUTCOME, msgspec.json.encode(self.trial))

    def _run_watched(self) -> Crash | None:
        (self._folder / STATUS).write_text("the script starts")
        with Watcher(_Collects(self)):
            crash = run_to_crash(self.task.target, refusals=(TorchtrimError, _Refused))
        if crash is None and not self.trial.steps and not self.trial.clocks:
            return Crash(
                kind="no step", message="the script ended before any optimizer had stepped"
            )
        return crash

    def keep(self, graded: list[tuple[str, torch.Tensor]]) -> None:
        self.trial.names = [name for name, _ in graded]
        for number, (_, grad) in enumerate(graded):
            wide = grad.detach().double()  # `bytes_of` is a view of it
            (self._folder / f"{VALUES}{number}").write_bytes(bytes_of(wide))

    @contextlib.contextmanager
    def measure(self, batch: Sequence[torch.Tensor]) -> Iterator[None]:
        """Measure the body: either time or bytes, since counting bytes takes time."""
        counts = len(self.trial.seconds) % 2 == 1
        assert self.stages is not None
        assert self.stages.executor is not None
        counting = Counter([*self.stages.executor.kept(), *batch] if counts else ())
        begin = time.perf_counter()
        with counting if counts else contextlib.nullcontext():
            yield
        self.trial.seconds.append(time.perf_counter() - begin)
        self.trial.peak_bytes = max(self.trial.peak_bytes, counting.rise)

    def _clocking(self, root: nn.Module, _: Pipeline) -> Engine:
        def end(clocks: list[tuple[StageSeconds, ...]]) -> NoReturn:
            self.trial.clocks = clocks
            raise Stop

        return clocking(root, self.task.clocked, end)


def main() -> None:
    """Run the task named on the command line."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    run_in_folder(lambda folder: _StageRunner(folder).run())


# Enough for another rank to import torch and read its data, and less than torch's own 10 or 30 minutes.
_PATIENCE = datetime.timedelta(minutes=5)


class StageApplier(Listener):
    """Applier of a pipeline, which splits the plan's model in stages when it appears.

    `refused` makes the exception that stops the script; `engine_of` makes the engine in one process.
    `executor`: this rank's, None in one process. `applied` is called after the split.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        several: bool,
        refused: Callable[[str], BaseException],
        engine_of: Callable[[nn.Module, Pipeline], Engine] = in_one_process,
    ) -> None:
        assert plan.pipeline is not None
        self._plan = plan
        self._pipeline: Pipeline = plan.pipeline
        self._several = several
        self._refused = refused
        self._engine_of = engine_of
        self._modules = Modules()
        self._stack = contextlib.ExitStack()
        self.root: nn.Module | None = None
        self.executor: Several | None = None
        self.engine: Engine | None = None
        self.applied: Callable[[], None] = lambda: None

    def root_appears(self, root: nn.Module) -> None:
        name = self._modules.add_root(root)
        if name != self._pipeline.root or self.root is not None:
            return
        if self._plan.fingerprint.get(name) not in (None, fingerprint_of(root)):
            raise self._refused(f"the plan was made for another {name}; plan again for this one.")
        self.root = root
        if self._several:
            self.engine, self.executor = in_several_processes(root, self._pipeline)
            self._stack.enter_context(clipping_together(self.executor))
        else:
            self.engine = self._engine_of(root, self._pipeline)
            self._stack.enter_context(clipping_together())
        Swapped(root, self.engine.wrap, is_traced)
        self.applied()

    def close(self) -> None:
        self._stack.close()


@contextlib.contextmanager
def among_ranks(pipeline: Pipeline, method: str | None = None) -> Iterator[None]:
    """Join the pipeline's process group, with the same random numbers on all ranks.

    `method`: the rendezvous, by default torchrun's. Raises `UsageError` for a wrong number of ranks.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != pipeline.processes or "RANK" not in os.environ:
        raise UsageError(
            f"the plan is a pipeline of {pipeline.processes} processes, and this is "
            f"{'one of ' + str(world) if world > 1 else 'one'}. Start it with: torchrun --nproc-per-node "
            f"{pipeline.processes} -m torchtrim run SCRIPT --plan PLAN"
        )
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(
        None if torch.cuda.is_available() else "gloo",
        init_method=method,
        rank=int(os.environ["RANK"]),
        world_size=world,
        timeout=_PATIENCE,
    )
    try:
        # A script that seeds nothing would make another model on each rank.
        seed = torch.tensor([torch.initial_seed() % 2**31], device="cpu")
        dist.broadcast(seed, 0)
        seed_with(int(seed))
        yield
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
