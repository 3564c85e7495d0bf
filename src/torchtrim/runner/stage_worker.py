"""Runs a script for a pipeline's certificate: `python -m torchtrim.runner.stage_worker FOLDER LIFELINE`."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgspec
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from torchtrim.capture.count import Counter
from torchtrim.capture.modules import Modules
from torchtrim.capture.watch import Listener, Watcher
from torchtrim.errors import TorchtrimError
from torchtrim.evidence.evidence import bytes_of, digest_of
from torchtrim.pipelines.clocks import clocking
from torchtrim.pipelines.engine import Engine
from torchtrim.pipelines.lone import in_one_process
from torchtrim.records.files import write_atomically
from torchtrim.records.pipeline import Clocked, Pipeline
from torchtrim.records.plan import Plan
from torchtrim.records.trial import Crash
from torchtrim.runner.script import OUTCOME, STATUS, TASK
from torchtrim.runner.settings.float64 import Wide
from torchtrim.runner.staged import PutsInStages, among_ranks
from torchtrim.runner.worker import Stop, crash_of, run_in_folder, run_target, seed_all

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
    clocks: list[tuple[Clocked, ...]] = []
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

    def _heard(self, clocks: list[tuple[Clocked, ...]]) -> NoReturn:
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


if __name__ == "__main__":
    main()
