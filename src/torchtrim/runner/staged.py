"""Has a script's model run in stages: put in when the model first runs, in one process or in several."""

from __future__ import annotations

import contextlib
import datetime
import os
import random
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from torchtrim.capture.modules import Modules
from torchtrim.capture.watch import Listener
from torchtrim.errors import UsageError
from torchtrim.executor.fingerprint import fingerprint_of
from torchtrim.executor.swap import Swapped
from torchtrim.pipelines.clipping import alone, among, clipping_together
from torchtrim.pipelines.engine import Engine
from torchtrim.pipelines.lone import in_one_process
from torchtrim.pipelines.several import Several, in_several_processes
from torchtrim.records.pipeline import Pipeline
from torchtrim.records.plan import Plan

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
