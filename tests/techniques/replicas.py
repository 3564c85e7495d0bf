"""What each of two processes over gloo does in `test_data_parallel.py`: trains, as it is and changed."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torchtrim import Profile, TrainStep
from torchtrim.capture.build import Setting
from torchtrim.errors import ApplyFailed
from torchtrim.executor.registry import Replaces, technique
from torchtrim.planner.planner import Planner
from torchtrim.records.budget import Budget
from torchtrim.records.plan import Technique
from torchtrim.records.trial import Request
from torchtrim.runner.session import Session
from torchtrim.step.from_profile import step_of
from torchtrim.techniques.data_parallel import TECHNIQUE

ROOT = "DistributedDataParallel"
VIEWS = {"gradient_as_bucket_view": True}
WIDTH = 96


class Unused(nn.Module):
    """Passes on what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def replica(
    bucket_cap_mb: float = 0.05, *, unused: bool = False, **options: Any
) -> DistributedDataParallel:
    """The same on each rank, in several buckets. `unused`: with parameters that have no part in the loss."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
    more = [Unused()] if unused else []
    model = nn.Sequential(*layers, *more)
    options["find_unused_parameters"] = unused or options.get("find_unused_parameters", False)
    return DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb, **options)


def applied(model: nn.Module, **options: Any) -> Any:
    """The technique on the whole model."""
    return TECHNIQUE.apply(
        {ROOT: model}, Technique(name="data_parallel", where=(ROOT,), options=options)
    )


class Loop:
    """A training loop whose ranks see other data."""

    def __init__(
        self,
        accumulate: int = 1,
        *,
        keeps: bool = False,
        waits: bool = False,
        clips: bool = True,
        **options: Any,
    ) -> None:
        self.model = replica(**options)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.accumulate, self.keeps, self.waits, self.clips = accumulate, keeps, waits, clips

    def train(self, first: int, last: int) -> None:
        """Steps `first <= i < last`."""
        for number in range(first, last):
            for part in range(self.accumulate):
                torch.manual_seed(1000 * number + 10 * part + torch.distributed.get_rank())
                waits = self.waits and part + 1 < self.accumulate
                with self.model.no_sync() if waits else contextlib.nullcontext():
                    self.model(torch.randn(16, WIDTH)).square().mean().backward()
            if self.clips:
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=not self.keeps)

    def state(self) -> list[torch.Tensor]:
        """All that training makes."""
        states = self.optimizer.state.values()
        return [
            *self.model.parameters(),
            *(one[key] for one in states for key in ("exp_avg", "exp_avg_sq")),
        ]


def apart(one: Loop, other: Loop) -> float:
    """By how much they differ at most; 0 for the same bits."""
    return apart_of(one.state(), other.state())


def apart_of(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """The same of tensors."""
    pairs = [*zip(one, other, strict=True)]
    if all(torch.equal(a, b) for a, b in pairs):
        return 0.0
    return max(float((a - b).detach().abs().max()) for a, b in pairs) or 1.0


def views(accumulate: int, *, keeps: bool = False, **options: Any) -> dict[str, Any]:
    """As views, and after they were taken back."""
    original, planned = (Loop(accumulate, keeps=keeps, **options) for _ in range(2))
    original.train(0, 1)
    planned.train(0, 1)
    handle = applied(planned.model, **VIEWS)
    for loop in (original, planned):
        loop.train(1, 4)
    shared = (
        {p.grad.untyped_storage().data_ptr() for p in planned.model.parameters()} if keeps else ()
    )
    differs = apart(original, planned)
    handle.revert()
    own = all(
        p.grad is None or p.grad.untyped_storage().nbytes() == p.grad.nbytes
        for p in planned.model.parameters()
    )
    for loop in (original, planned):
        loop.train(4, 6)
    flags = planned.model.gradient_as_bucket_view
    return {
        "apart": differs,
        "storages": len(shared),
        "reverted": apart(original, planned),
        "own": own and not flags,
    }


def changed_and_back(kind: str, **options: Any) -> dict[str, Any]:
    """With buckets of another size, or with one search, beside the original, and after it was taken back."""
    original, planned = (Loop(**options) for _ in range(2))
    handle = applied(planned.model, **{kind: 1 if kind == "bucket_cap_mb" else True})
    for loop in (original, planned):
        loop.train(0, 3)
    found = {
        "apart": apart(original, planned),
        "exchanges": [exchanges(original), exchanges(planned)],
    }
    handle.revert()
    for loop in (original, planned):
        loop.train(4, 6)
    flags = [(one.model.bucket_bytes_cap, one.model.static_graph) for one in (original, planned)]
    return {
        **found,
        "reverted": apart(original, planned),
        "again": [exchanges(original), exchanges(planned)],
        "same settings": flags[0] == flags[1],
    }


def exchanges(loop: Loop) -> int:
    """How many a step has."""
    return sum(one.name == "allreduce" for one in profile_of(loop).collectives)


def compressed() -> dict[str, Any]:
    """Gradients in bfloat16, beside that by hand, and after it was taken back."""
    plan = Technique(name="compress_gradients", where=(ROOT,), options={"dtype": "bfloat16"})
    original, planned, by_hand = (Loop() for _ in range(3))
    unit = technique("compress_gradients")
    handle = unit.apply({ROOT: planned.model}, plan)
    assert isinstance(unit, Replaces)
    unit.by_hand({ROOT: by_hand.model}, plan)
    views_too = applied(planned.model, **VIEWS)
    for loop in (original, planned, by_hand):
        loop.train(0, 1)
    gradients = apart_of(gradients_of(original), gradients_of(planned))
    differs = apart(planned, by_hand)
    twice = refused(lambda: unit.apply({ROOT: planned.model}, plan))
    views_too.revert()
    handle.revert()
    planned.model.load_state_dict(original.model.state_dict())
    planned.optimizer.load_state_dict(copy.deepcopy(original.optimizer.state_dict()))
    for loop in (original, planned):
        loop.train(1, 3)
    reverted = apart(original, planned)
    options = unit.options(step_of(profile_of(original)))
    return {
        "gradients": gradients,
        "by hand": differs,
        "twice": twice,
        "reverted": reverted,
        "offered": [one.where for one in options],
    }


def gradients_of(loop: Loop) -> list[torch.Tensor]:
    """The last gradients: the first moments of the first step of Adam are a tenth of them."""
    return [one["exp_avg"] for one in loop.optimizer.state.values()]


def accumulates(count: int) -> dict[str, Any]:
    """Fewer exchanges, in double precision, and after they were taken back."""
    torch.set_default_dtype(torch.float64)
    original, planned = Loop(count), Loop(count)
    handle = applied(planned.model, accumulate=count)
    before = sum(one.name == "allreduce" for one in profile_of(original).collectives)
    after = sum(one.name == "allreduce" for one in profile_of(planned).collectives)
    for loop in (original, planned):
        loop.train(0, 4)
    differs = apart(original, planned)
    planned.accumulate = count - 1
    said = refused(lambda: planned.train(4, 6))
    handle.revert()
    plain, again = Loop(count), Loop(count)
    applied(again.model, accumulate=count).revert()
    for loop in (plain, again):
        loop.train(0, 2)
    torch.set_default_dtype(torch.float32)
    return {
        "rounds": before / after,
        "apart": differs,
        "refused": said,
        "reverted": apart(plain, again),
        "hooks": len(planned.model._forward_hooks) + len(planned.model._forward_pre_hooks),
    }


def refused(act: Callable[[], Any]) -> str:
    """What it says."""
    try:
        act()
    except ApplyFailed as error:
        return str(error)
    return ""


def with_hook() -> str:
    """A script's own communication hook."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    model = replica()
    model.register_comm_hook(None, allreduce_hook)
    return refused(lambda: applied(model, **VIEWS))


def no_sync_first() -> str:
    """A static graph that would learn from a forward without an exchange."""
    loop = Loop(2, waits=True, unused=True)
    applied(loop.model, static_graph=True)
    return refused(lambda: loop.train(0, 1))


def offered(accumulate: int = 1, **options: Any) -> list[str]:
    """What may be changed."""
    found = TECHNIQUE.options(step_of(profile_of(Loop(accumulate, **options))))
    return [name for one in found for name, _ in one.settings]


def with_buffers() -> str:
    """Buffers that are broadcast in each forward."""
    model = DistributedDataParallel(nn.BatchNorm1d(WIDTH))
    return refused(lambda: applied(model, accumulate=2))


def profile_of(loop: Loop) -> Profile:
    """The third step, when buckets are as they stay."""
    step = TrainStep(
        loop.model,
        lambda model, x: model(x).square().mean(),
        loop.optimizer,
        torch.randn(16, WIDTH),
    )
    session = Session(Request(steps=0, warmup=2), Setting("cpu", "", str(Path.cwd())))
    session.watcher.optimizers.extend(step.optimizers)
    with session.watcher:
        loop.train(0, 3)
        session.step_ends()
    profile = session.finish().profile
    assert profile is not None
    return profile


def predicted() -> dict[str, Any]:
    """What the planner says, and what is then measured."""
    profile = profile_of(Loop())
    gc.collect()
    planner = Planner(profile, step_seconds=profile.step_seconds, fingerprint={})
    plan = planner.floor_plan(Budget(0, bias=profile.peak_bytes - planner.simulated_original))
    loop = Loop()
    alone = Planner(
        profile,
        step_seconds=profile.step_seconds,
        fingerprint={},
        exclude=[name for name in plan_names() if name != "data_parallel"],
    ).floor_plan(Budget(0))
    for one in alone.techniques:
        TECHNIQUE.apply({ROOT: loop.model}, one)
    after = profile_of(loop)
    return {
        "techniques": [one.name for one in plan.techniques],
        "places": [list(one.where) for one in alone.techniques],
        "before": profile.tracked_peak_bytes,
        "predicted": alone.predicted.peak_bytes,
        "after": after.tracked_peak_bytes,
        "gradients": sum(one.gradient_bytes for one in profile.replicas),
    }


def plan_names() -> list[str]:
    """All techniques."""
    from torchtrim.executor.registry import names

    return names()


def measure(rank: int, world: int, folder: Path) -> None:
    """All of it, on one rank."""
    torch.set_num_threads(1)
    meeting = (folder / "meeting").as_uri()
    torch.distributed.init_process_group("gloo", meeting, rank=rank, world_size=world)
    found = {
        "views": views(1),
        "accumulating views": views(2),
        "waiting views": views(3, waits=True),
        "kept views": views(1, keeps=True),
        "static views": views(1, static_graph=True),
        "searching views": views(1, find_unused_parameters=True),
        "accumulates": accumulates(3),
        "bucket_cap_mb": changed_and_back("bucket_cap_mb"),
        "static_graph": changed_and_back("static_graph", unused=True),
        "no_sync first": no_sync_first(),
        "searches": [offered(unused=True), offered(2, waits=True, unused=True)],
        "compressed": compressed(),
        "hook": with_hook(),
        "buffers": with_buffers(),
        "predicted": predicted(),
    }
    (folder / str(rank)).write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def gathered(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Whole tensors in the place of shards."""
    return [getattr(one, "full_tensor", lambda one=one: one)() for one in tensors]


def found_by(module: str, world: int = 2) -> tuple[dict[str, Any], ...]:
    """What each rank left that `python -m MODULE WORLD FOLDER` has started."""
    tests = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as name:
        path = os.pathsep.join([str(tests), str(tests.parent / "src")])
        command = [sys.executable, "-m", module, str(world), name]
        subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True, timeout=300)
        return tuple(json.loads(Path(name, str(rank)).read_text()) for rank in range(world))


def forked(measure: Callable[[int, int, Path], None], world: int, folder: Path) -> None:
    """So many processes, which are forks of this one."""
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=measure, args=(rank, world, folder)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(max(abs(rank.exitcode or 0) for rank in ranks))


if __name__ == "__main__":
    forked(measure, int(sys.argv[1]), Path(sys.argv[2]))
