"""Runs a script once, or as the ranks of a pipeline, for the certificate of the pipeline."""

from __future__ import annotations

import contextlib
import datetime
import os
import random
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
from torchtrim.executor.swap import Swapped
from torchtrim.pipelines.clocks import clocking
from torchtrim.pipelines.engine import Engine
from torchtrim.pipelines.lone import in_one_process
from torchtrim.pipelines.several import (
    Several,
    alone,
    among,
    clipping_together,
    in_several_processes,
)
from torchtrim.records.files import write_atomically
from torchtrim.records.pipeline import Pipeline, StageSeconds
from torchtrim.records.plan import Plan
from torchtrim.records.trial import Crash
from torchtrim.runner.ranks import RankEnded, first_failed, folder_of, on_rank, run_ranks
from torchtrim.runner.script import OUTCOME, STATUS, TASK, Script, failure, run_script
from torchtrim.runner.settings import Wide
from torchtrim.runner.worker import Stop, crash_of, run_in_folder, run_target, seed_all

_ENTRY = "torchtrim.runner.stage_worker"
Progress = Callable[[str], None]


def run_stages(
    script: Script, task: StageTask, ranks: int, folder: Path, progress: Progress
) -> list[tuple[StageTrial, Path]]:
    """Run the task on so many ranks; what each left, and its folder. Nothing of them is left behind.

    Where one fails the others are ended. Raises `ScriptFailed`, and `ApplyFailed` where the plan was refused.
    """
    script.check()
    script = script._replace(processes=ranks, only=0 if ranks == 1 else -1)
    task = msgspec.structs.replace(task, method=str((folder / "store").absolute()))
    ended = _run(script, msgspec.json.encode(task), folder, progress)
    culprit = first_failed(ended)
    if culprit is not None:
        raise _error(culprit, ended, script)
    folders = [folder_of(folder, rank.number, script.only) for rank in ended]
    return [(_trial_of(rank), own) for rank, own in zip(ended, folders, strict=True)]


def _run(script: Script, task: bytes, folder: Path, progress: Progress) -> list[RankEnded]:
    """Run it; a single process is no rank, and finds none in its environment."""
    if script.processes > 1:
        tasks = [task] * script.processes
        return run_ranks(
            script, tasks, folder=folder, progress=progress, entry=_ENTRY, hide_gpu=True
        )
    ended = run_script(script, task, entry=_ENTRY, folder=folder, progress=progress, hide_gpu=True)
    failed = None if ended.outcome is not None and _crash_free(ended.outcome) else 0
    return [RankEnded(0, ended, failed, False, script.timeout, ())]


def _crash_free(outcome: bytes) -> bool:
    return msgspec.json.decode(outcome, type=StageTrial).crash is None


def _trial_of(rank: RankEnded) -> StageTrial:
    assert rank.ended.outcome is not None
    return msgspec.json.decode(rank.ended.outcome, type=StageTrial)


def _error(culprit: RankEnded, ranks: list[RankEnded], script: Script) -> Exception:
    """What the rank that failed first for a reason of its own says, and what became of the others."""
    crash = None if culprit.ended.outcome is None else _trial_of(culprit).crash
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
    """What the parent asks for.

    `how`: the script as it is, in one process in the schedule's order, in several, or the actions of each of
    the pipelines in `clocked` one by one.

    `still`: nothing is dropped out. `double`: in float64. `method`: how the ranks find each other.
    `measured`: bytes are counted.
    """

    target: str
    module: bool
    args: tuple[str, ...]
    plan: Plan
    how: How
    steps: int
    threads: int
    still: bool = False
    double: bool = False
    measured: bool = False
    method: str = ""
    clocked: tuple[Pipeline, ...] = ()


class StageTrial(msgspec.Struct, kw_only=True):
    """What a run left. `steps`: digests of gradients before each update and of parameters after it, by name.

    `losses`: of each step. `dropped`: whether it drops out. `peak_bytes` is the highest that storages rose in
    a step's schedule, over what was there when it began; `seconds` what the schedule of each step took;
    `clocks` what the actions of each stage take, of each pipeline.
    """

    steps: list[dict[str, str]] = []
    losses: list[float | None] = []
    names: list[str] = []
    dropped: bool = False
    peak_bytes: int = 0
    seconds: list[float] = []
    clocks: list[tuple[StageSeconds, ...]] = []
    crash: Crash | None = None


class _Refused(Exception):
    """The plan was made for another model."""


class _Still(TorchFunctionMode):
    """Nothing is dropped out while it is on; `dropped` says whether it was asked for."""

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
    """Collects what each step computed, and ends the script when all are there."""

    def __init__(self, runner: StageRunner) -> None:
        self._runner = runner
        self._modules = Modules()
        self._roots: dict[str, nn.Module] = {}

    def root_appears(self, root: nn.Module) -> None:
        """Know it by its name, and put it in stages."""
        self._roots[self._modules.add_root(root)] = root
        puts = self._runner.puts
        if puts is not None and puts.root is None:
            puts.root_appears(root)
            if puts.engine is not None:
                puts.engine.told = self._runner.trial.losses.append
            if puts.executor is not None and self._runner.task.measured:
                puts.executor.around = self._runner.measure

    def backward_starts(self, tensors: tuple[torch.Tensor, ...]) -> None:
        """Note the loss of a script that runs as it is."""
        if self._runner.task.how == "whole" and tensors and tensors[0].numel() == 1:
            self._runner.trial.losses.append(float(tensors[0]))

    def optimizer_starts(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the gradients."""
        graded = [(n, p.grad) for n, p in self._parameters() if p.grad is not None]
        digests = {f"gradient:{name}": digest_of(grad) for name, grad in graded}
        self._runner.trial.steps.append(digests)
        if len(self._runner.trial.steps) == 1:
            self._runner.keep(graded)

    def optimizer_ends(self, optimizer: torch.optim.Optimizer) -> None:
        """Note the parameters; end after the last step."""
        step = self._runner.trial.steps[-1]
        changed = [(n, p) for n, p in self._parameters() if f"gradient:{n}" in step]
        step.update((f"parameter:{name}", digest_of(p.detach())) for name, p in changed)
        if len(self._runner.trial.steps) == self._runner.task.steps:
            self._runner.done()

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        root = self._roots.get(self._runner.root)
        if root is not None:
            yield from root.named_parameters()


class StageRunner:
    """Runs one task, and writes its outcome into the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.task = msgspec.json.decode((folder / TASK).read_bytes(), type=StageTask)
        self.trial = StageTrial()
        self.puts: PutsInStages | None = None
        assert self.task.plan.pipeline is not None
        self.pipeline = self.task.plan.pipeline
        self.root = self.pipeline.root
        if self.task.how != "whole":
            several = self.task.how == "pipeline"
            engine_of = self._clocking if self.task.how == "clocked" else in_one_process
            self.puts = PutsInStages(
                self.task.plan, several=several, refused=_Refused, engine_of=engine_of
            )

    def run(self) -> None:
        """Run the script until its steps are done, it ends or it fails; leave the outcome."""
        torch.set_num_threads(self.task.threads)
        seed_all()
        if self.task.double:
            torch.set_default_dtype(torch.float64)
        still = _Still(self.task.still)
        with contextlib.ExitStack() as stack:
            if self.task.how == "pipeline":
                stack.enter_context(among_ranks(self.pipeline, f"file://{self.task.method}"))
                seed_all()
            stack.enter_context(Wide() if self.task.double else contextlib.nullcontext())
            stack.enter_context(still)
            self.trial.crash = self._run_watched()
            self.trial.dropped = still.dropped
            self._write()

    def _run_watched(self) -> Crash | None:
        (self._folder / STATUS).write_text("the script starts")
        with Watcher(_Collects(self)):
            try:
                run_target(self.task.target, self.task.module, self.task.args)
            except Stop:
                return None
            except SystemExit as ended:
                if ended.code not in (None, 0):
                    return Crash(kind="exited", message=f"the script exited with {ended.code!r}")
            except (TorchtrimError, _Refused) as error:
                return Crash(kind="refused", message=str(error))
            except BaseException as error:
                return crash_of(error)
        if not self.trial.steps and not self.trial.clocks:
            return Crash(kind="no step", message="the script ended, and no optimizer had stepped")
        return None

    def keep(self, graded: list[tuple[str, torch.Tensor]]) -> None:
        """Keep the values of gradients of the first step."""
        self.trial.names = [name for name, _ in graded]
        for number, (_, grad) in enumerate(graded):
            wide = grad.detach().double()
            (self._folder / f"{VALUES}{number}").write_bytes(bytes_of(wide))

    @contextlib.contextmanager
    def measure(self, batch: Sequence[torch.Tensor]) -> Iterator[None]:
        """Measure what is in it: time and bytes in turn, since counting takes time."""
        counts = len(self.trial.seconds) % 2 == 1
        assert self.puts is not None
        assert self.puts.executor is not None
        counting = Counter([*self.puts.executor.kept(), *batch] if counts else ())
        begin = time.perf_counter()
        with counting if counts else contextlib.nullcontext():
            yield
        self.trial.seconds.append(time.perf_counter() - begin)
        self.trial.peak_bytes = max(self.trial.peak_bytes, counting.rise)

    def _clocking(self, root: nn.Module, _: Pipeline) -> Engine:
        return clocking(root, self.task.clocked, self._heard)

    def _heard(self, clocks: list[tuple[StageSeconds, ...]]) -> NoReturn:
        self.trial.clocks = clocks
        self.done()

    def done(self) -> NoReturn:
        """End the script: its steps are there."""
        raise Stop

    def _write(self) -> None:
        write_atomically(self._folder / OUTCOME, msgspec.json.encode(self.trial))


def main() -> None:
    """Run the task that the command line names."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    run_in_folder(lambda folder: StageRunner(folder).run())


_PATIENCE = datetime.timedelta(minutes=5)


class PutsInStages(Listener):
    """Puts the plan's model in stages when it appears. `refused`: raises what stops the script.

    `engine_of` makes the engine in one process. `executor` is this rank's, None where all is in one process.
    `watches` is called when it is done.
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
        self.watches: Callable[[], None] = lambda: None

    def root_appears(self, root: nn.Module) -> None:
        """Put it in stages if it is the plan's."""
        name = self._modules.add_root(root)
        if name != self._pipeline.root or self.root is not None:
            return
        if self._plan.fingerprint.get(name) not in (None, fingerprint_of(root)):
            raise self._refused(f"the plan was made for another {name}; plan again for this one.")
        self.root = root
        if self._several:
            self.engine, self.executor = in_several_processes(root, self._pipeline)
            self._stack.enter_context(clipping_together(among(self.executor.group)))
        else:
            self.engine = self._engine_of(root, self._pipeline)
            self._stack.enter_context(clipping_together(alone))
        Swapped(root, self.engine.wrap)
        self.watches()

    def close(self) -> None:
        """Undo the changes outside the model."""
        self._stack.close()


@contextlib.contextmanager
def among_ranks(pipeline: Pipeline, method: str | None = None) -> Iterator[None]:
    """This process as one of the pipeline's, all with the same random numbers.

    `method`: how they find each other.

    Without one, it is torchrun's. Raises `UsageError` where there are too few or too many.
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
        _seed_alike()
        yield
    finally:
        dist.destroy_process_group()


def _seed_alike() -> None:
    """A script that seeds nothing makes the same model on all ranks."""
    seed = torch.tensor([torch.initial_seed() % 2**31], device="cpu")
    dist.broadcast(seed, 0)
    random.seed(int(seed))
    torch.manual_seed(int(seed))
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(int(seed))


if __name__ == "__main__":
    main()
