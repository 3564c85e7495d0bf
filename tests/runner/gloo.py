"""What each of several processes over gloo does in `test_sharded.py`: a step of a model that is sharded.

Activations are most of what the models need, since gloo's threads let go of a collective's buffers a moment
after it, by chance before or after the next operator.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

from torchtrim import TrainStep
from torchtrim.capture.build import Setting
from torchtrim.planner.estimate import unused_bytes
from torchtrim.records.profile import Profile
from torchtrim.records.trial import Request
from torchtrim.runner.session import Session


class Layered(nn.Module):
    """Layers one after the other, with an odd width, so that shards are padded."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 61)
        self.layers = nn.ModuleList(nn.Linear(61, 61) for _ in range(4))
        self.last = nn.Linear(61, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = F.gelu(layer(x))
        return self.last(x)


class Block(nn.Module):
    """A block of a decoder."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], 2, -1)
        q, k, v = (
            part.reshape(shape).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, -1)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Decoder(nn.Module):
    """A decoder whose first and last weights are one."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(101, 32)
        self.layers = nn.ModuleList(Block(32) for _ in range(3))
        self.head = nn.Linear(32, 101, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Cross entropy."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def layered() -> TrainStep:
    """A step of the first."""
    model = Layered()
    batch = (torch.randn(2048, 16), torch.randint(5, (2048,)))
    return TrainStep(model, loss, torch.optim.AdamW(model.parameters()), batch)


def decoder() -> TrainStep:
    """A step of the second."""
    model = Decoder()
    batch = (torch.randint(101, (16, 64)), torch.randint(101, (16, 64)))
    return TrainStep(model, loss, torch.optim.AdamW(model.parameters()), batch)


WORKLOADS = {"layered": layered, "decoder": decoder}


def sharded(name: str, **options: Any) -> TrainStep:
    """The step of a model that is sharded as a person would, in a group that is there."""
    work = WORKLOADS[name]()
    for layer in work.model.layers:
        fully_shard(layer, **options)
    fully_shard(work.model, **options)
    optimizer = torch.optim.AdamW(work.model.parameters())
    return TrainStep(work.model, loss, optimizer, work.batch)


def measure(rank: int, world: int, folder: Path) -> None:
    """Train each for two steps, and leave what the second was measured to need."""
    torch.set_num_threads(1)
    meeting = (folder / "meeting").as_uri()
    torch.distributed.init_process_group("gloo", meeting, rank=rank, world_size=world)
    found = {name: _needed(profile_of(sharded(name))) for name in WORKLOADS}
    (folder / str(rank)).write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _needed(profile: Profile) -> int:
    return profile.peak_bytes - unused_bytes(profile)


def profile_of(work: TrainStep) -> Profile:
    """The profile of the second of two steps."""
    session = Session(Request(steps=0, warmup=1), Setting("cpu", "", str(Path.cwd())))
    session.watcher.optimizers.extend(work.optimizers)
    with session.watcher:
        work.step(0)
        work.step(0)
        session.step_ends()
    profile = session.finish().profile
    assert profile is not None
    return profile


def main() -> None:
    """`python -m run.gloo WORLD FOLDER`: so many processes, which are forks of this one."""
    world, folder = int(sys.argv[1]), Path(sys.argv[2])
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=measure, args=(rank, world, folder)) for rank in range(world)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(max(abs(rank.exitcode or 0) for rank in ranks))


if __name__ == "__main__":
    main()
