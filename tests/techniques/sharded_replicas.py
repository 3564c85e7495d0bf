"""What each of two processes over gloo does in `test_shard.py`: trains with a whole model and with shards."""

from __future__ import annotations

import copy
import gc
import json
import sys
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from techniques.replicas import (
    ROOT,
    WIDTH,
    Loop,
    apart_of,
    forked,
    gathered,
    profile_of,
    refused,
    replica,
)
from torchtrim.records.plan import Technique
from torchtrim.step.from_profile import step_of
from torchtrim.techniques.shard import fsdp as sharding
from torchtrim.techniques.shard.technique import TECHNIQUE


def sharded(model: nn.Module, **options: Any) -> Any:
    """The technique on the whole model."""
    plan = Technique(name="shard", where=(ROOT,), options=options)
    return TECHNIQUE.apply({ROOT: model}, plan)


def apart(one: Loop, other: Loop) -> float:
    """By how much they differ at most; 0 for the same bits."""
    return apart_of(gathered(one.state()), gathered(other.state()))


def kept_bytes(loop: Loop) -> int:
    """What this rank keeps of parameters and states."""
    parts = (one.to_local() if hasattr(one, "to_local") else one for one in loop.state())
    return sum(one.untyped_storage().nbytes() for one in parts)


def trained(accumulate: int = 1, *, waits: bool = False, before: int = 0, **options: Any) -> Any:
    """Beside the original, from step `before` on, and after it was taken back."""
    original, planned = (Loop(accumulate, waits=waits) for _ in range(2))
    for loop in (original, planned):
        loop.train(0, before)
    parameters = [id(one) for one in planned.model.parameters()]
    marks = marks_of(planned.model)
    handle = sharded(planned.model, **options)
    for loop in (original, planned):
        loop.train(before, before + 3)
    differs, kept = apart(original, planned), kept_bytes(planned) / kept_bytes(original)
    handle.revert()
    same = parameters == [id(one) for one in planned.model.parameters()]
    as_before = marks == marks_of(planned.model)
    for loop in (original, planned):
        loop.train(before + 3, before + 5)
    return {
        "apart": differs,
        "kept": kept,
        "same": same,
        "marks": as_before,
        "reverted": apart(original, planned),
    }


def marks_of(model: nn.Module) -> list[Any]:
    """Class, attributes and hooks of each module."""
    return [
        [type(one).__name__, sorted(vars(one)), [len(getattr(one, name)) for name in _HOOKS]]
        for one in model.modules()
    ]


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks")


def saved() -> dict[str, Any]:
    """Whole files, that are loaded by shards and by whole models, and a rank that asks alone."""
    original, planned, again = (Loop() for _ in range(3))
    for one in (planned, again):
        sharded(one.model)
    for one in (original, planned):
        one.train(0, 2)
    files = [(one.model.state_dict(), one.optimizer.state_dict()) for one in (original, planned)]
    differs = [apart_of(*pair) for pair in zip(*(map(tensors, files)), strict=True) if pair]
    again.train(0, 1)
    again.model.load_state_dict(files[0][0])
    again.optimizer.load_state_dict(copy.deepcopy(files[0][1]))
    for one in (original, again):
        one.train(2, 4)
    loaded = apart(original, again)
    sharding._PATIENCE_SECONDS = 1.0
    rank = torch.distributed.get_rank()
    alone = "" if rank else refused(lambda: planned.model.module.state_dict())
    torch.distributed.barrier()
    part = planned.model.module[0].state_dict()
    mixed = any(hasattr(one, "to_local") for one in part.values())
    again.model.module[0].load_state_dict(part)
    return {
        "files": max(differs),
        "loaded": loaded,
        "alone": alone,
        "a module": mixed,
        "a module loaded": apart_of(
            *(gathered([*one.model.module[0].parameters()]) for one in (planned, again))
        ),
    }


def tensors(file: tuple[Any, Any]) -> list[list[torch.Tensor]]:
    """The tensors of a model's file, and of its optimizer's."""
    model, optimizer = file
    states = [one for state in optimizer["state"].values() for one in state.values()]
    return [list(model.values()), states]


def broadcasts() -> float:
    """Buffers that are broadcast in each forward."""
    found = []
    for shards in (False, True):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        if shards:
            sharded(model)
        for step in range(3):
            torch.manual_seed(10 * step + torch.distributed.get_rank())
            with torch.no_grad():
                model(torch.randn(8, 4))
            model(torch.randn(8, 4)).square().mean().backward()
        found.append([*gathered(list(model.parameters())), *model.buffers()])
    return apart_of(*found)


def refusals() -> dict[str, str]:
    """What it does not take."""
    hooked, graded, tied, ignoring = (replica() for _ in range(4))
    hooked.register_comm_hook(None, allreduce_hook)
    graded(torch.randn(2, WIDTH)).sum().backward()
    tied.module[1][0].weight = tied.module[0][0].weight
    kept = replica()
    theirs = [one for one in kept.parameters() if one.dim() > 1]
    ignoring.parameters_to_ignore = {"0.0.bias"}
    models = {
        "hooked": hooked,
        "graded": graded,
        "tied": tied,
        "kept": kept,
        "ignoring": ignoring,
    }
    found = {name: refused(partial(sharded, model)) for name, model in models.items()}
    found["unmatched"] = refused(partial(sharded, replica(), blocks="layers.*"))
    del theirs
    return found


def failed() -> dict[str, Any]:
    """Where `fully_shard` fails after it has sharded some blocks."""
    original, planned = Loop(), Loop()
    marks = marks_of(planned.model)
    shard, calls = torch.distributed.fsdp.fully_shard, count()

    def fails(*args: Any, **options: Any) -> Any:
        if next(calls) == 2:
            raise RuntimeError("no room for another block")
        return shard(*args, **options)

    with mock.patch("torch.distributed.fsdp.fully_shard", fails):
        said = refused(lambda: sharded(planned.model))
    for loop in (original, planned):
        loop.train(0, 2)
    return {
        "said": said,
        "marks": marks == marks_of(planned.model),
        "apart": apart(original, planned),
    }


def made_later() -> dict[str, Any]:
    """An optimizer that is made of shards, and two that are found in another order on each rank."""
    original, planned = Loop(), Loop()
    parameters = [*planned.model.parameters()]
    half = len(parameters) // 2
    parts = [parameters[:half], parameters[half:]]
    turned = slice(None, None, 1 - 2 * torch.distributed.get_rank())
    optimizers = []
    for one in parts[turned]:
        optimizers.append(torch.optim.SGD(one))
        gc.collect()
    optimizers = optimizers[turned]
    for number, optimizer in enumerate(optimizers):
        for one in parts[number]:
            optimizer.state[one]["momentum_buffer"] = torch.full_like(one, number)
    del parameters, parts, one
    handle = sharded(planned.model)
    planned.optimizer = torch.optim.AdamW(planned.model.parameters())
    for loop in (original, planned):
        loop.train(0, 2)
    handle.revert()
    for loop in (original, planned):
        loop.train(2, 4)
    own = {id(one) for one in planned.model.parameters()}
    back = [
        id(one) in own and bool((state["momentum_buffer"] == number).all())
        for number, optimizer in enumerate(optimizers)
        for one, state in optimizer.state.items()
    ]
    return {"apart": apart(original, planned), "back": back}


def measure(rank: int, world: int, folder: Path) -> None:
    """All of it, on one rank."""
    torch.set_num_threads(1)
    meeting = (folder / "meeting").as_uri()
    torch.distributed.init_process_group("gloo", meeting, rank=rank, world_size=world)
    options = TECHNIQUE.options(step_of(profile_of(Loop())))
    plain = TECHNIQUE.options(step_of(profile_of(Loop(clips=False))))
    found = {
        "resharded": trained(),
        "kept": trained(reshard=False),
        "accumulated": trained(2, waits=True),
        "later": trained(before=2),
        "one block": trained(blocks="0 1"),
        "saved": saved(),
        "broadcasts": broadcasts(),
        "refused": refusals(),
        "failed": failed(),
        "later made": made_later(),
        "options": [[one.where, *map(list, one.settings), one.equivalence] for one in options],
        "unclipped": [one.equivalence for one in plain],
    }
    (folder / str(rank)).write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    forked(measure, int(sys.argv[1]), Path(sys.argv[2]))
