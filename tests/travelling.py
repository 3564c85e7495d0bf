"""Plans made on one device and applied on another: what each run computes, and the places that it lacks.

plan = planned("cpu", MODELS["gpt"])
assert run("a100", MODELS["gpt"], plan).digest == run("a100", MODELS["gpt"]).digest
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import models
import steps
import torchtrim
from cases import nets
from torchtrim import TrainStep
from torchtrim.emulator import emulate
from torchtrim.emulator.runtime import MODELS as GPUS
from torchtrim.executor import notices
from torchtrim.executor.apply import apply_plan, named_roots
from torchtrim.planner.planner import Planner
from torchtrim.records.budget import Budget
from torchtrim.records.plan import Plan

DEVICES = ("cpu", "v100", "a100", "h100")
STEPS = 2


class Attention(nn.Module):
    """Causal attention by torch's function, or by hand with both factors scaled."""

    def __init__(self, width: int, dropout: float, *, by_hand: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dropout = dropout
        self.by_hand = by_hand

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        if self.by_hand:
            scale = q.shape[-1] ** -0.25
            weights = F.dropout((q * scale @ (k * scale).mT).softmax(-1), dropout, self.training)
            made = weights @ v
        else:
            made = F.scaled_dot_product_attention(q, k, v, None, dropout, is_causal=True)
        return self.out(made.transpose(1, 2).reshape(x.shape))


class OwnNorm(nn.Module):
    """RMSNorm as many programs write it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Gated(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.gate, self.down = (
            *(nn.Linear(width, 3 * width, bias=False) for _ in range(2)),
            nn.Linear(3 * width, width, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Dropped(nn.Module):
    """An MLP whose dropout, and the depth's, are functions."""

    def __init__(self, width: int, depth: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.depth = depth

    def forward(self, x: Tensor) -> Tensor:
        made = F.dropout(self.down(F.gelu(self.up(x))), 0.1, self.training)
        if not self.depth:
            return made
        kept = x.new_empty(len(x), *(1,) * (x.dim() - 1)).bernoulli_(1 - self.depth)
        return made * kept.div_(1 - self.depth)


class Blocks(nn.Module):
    """Residual blocks of a mixer of positions and one of channels, each after a norm."""

    def __init__(
        self,
        width: int,
        norm: Callable[[int], nn.Module],
        mixes: Callable[[int], nn.Module],
        inner: Callable[[int], nn.Module],
        depth: int = 2,
    ) -> None:
        super().__init__()
        self.norms = nn.ModuleList(norm(width) for _ in range(2 * depth))
        self.parts = nn.ModuleList(part(width) for _ in range(depth) for part in (mixes, inner))

    def forward(self, x: Tensor) -> Tensor:
        for norm, part in zip(self.norms, self.parts, strict=True):
            x = x + part(norm(x))
        return x


class Mixer(nn.Module):
    """Mixes positions by an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Dropout(0.1), nn.Linear(96, 48))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x.transpose(1, 2)).transpose(1, 2)


class ConvNext(nn.Module):
    """Depthwise convolutions of channels that come last, then an MLP."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 2, stride=2)
        self.deep = nn.ModuleList(
            nn.Conv2d(width, width, 7, padding=3, groups=width) for _ in range(2)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.mlps = nn.ModuleList(Dropped(width, 0.2) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for deep, norm, mlp in zip(self.deep, self.norms, self.mlps, strict=True):
            x = x + mlp(norm(deep(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        return x


class Dense(nn.Module):
    """Each convolution reads the results of all before it."""

    def __init__(self, growth: int = 8) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(3 + growth * i) for i in range(3))
        self.convs = nn.ModuleList(
            nn.Conv2d(3 + growth * i, growth, 3, padding=1) for i in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = torch.cat([x, conv(F.relu(norm(x)))], 1)
        return x


class Squeezed(nn.Module):
    """Hardswish, and channels weighed by their means."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.Hardswish()
        )
        self.weigh = nn.Sequential(nn.Conv2d(width, width, 1), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return x * self.weigh(x.mean((2, 3), keepdim=True))


class Crossed(nn.Module):
    """A decoder that attends to what it reads."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(width, 4, 2 * width, 0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x.flip(1))


class Traveller(NamedTuple):
    """A model, its batch and its loss."""

    model: nn.Module
    batch: Tensor
    loss: Callable[[nn.Module, Tensor], Tensor] = steps.squared


Make = Callable[[], Traveller]


def _sequence(*blocks: Callable[[int], nn.Module]) -> Make:
    return lambda: Traveller(Blocks(64, *blocks), torch.randn(8, 48, 64))


def _image(model: Callable[[], nn.Module], size: int = 32) -> Make:
    return lambda: Traveller(model(), torch.randn(8, 3, size, size))


def _tokens(model: Callable[[], nn.Module]) -> Make:
    return lambda: Traveller(model(), torch.randint(100, (8, 32)))


def _sample(name: str) -> Make:
    def make() -> Traveller:
        sample = models.SAMPLES[name]()
        return Traveller(sample.model, sample.inputs.repeat(64, *(1,) * (sample.inputs.dim() - 1)))

    return make


MODELS: dict[str, Make] = {
    "gpt": _sequence(nn.LayerNorm, partial(Attention, dropout=0.0), Dropped),
    "gpt with dropout": _sequence(nn.LayerNorm, partial(Attention, dropout=0.1), Dropped),
    "llama": _sequence(nn.RMSNorm, partial(Attention, dropout=0.0), Gated),
    "llama with its own norm": _sequence(OwnNorm, partial(Attention, dropout=0.0), Gated),
    "whisper": _sequence(nn.LayerNorm, partial(Attention, dropout=0.1, by_hand=True), Dropped),
    "mixer": _sequence(nn.LayerNorm, Mixer, partial(Dropped, depth=0.1)),
    "encoder": lambda: Traveller(steps.encoder(32, 2), torch.randn(8, 48, 32)),
    "decoder": lambda: Traveller(Crossed(), torch.randn(8, 48, 32)),
    "tokens": _tokens(partial(nets.Encoder, 48, 2, 100)),
    "lstm": _tokens(partial(nets.Recurrent, nn.LSTM, 32, 100)),
    "gru": _tokens(partial(nets.Recurrent, nn.GRU, 32, 100)),
    "convolutions": _image(partial(steps.ConvNet, 8, 2)),
    "flat": _image(partial(steps.flat, 8, 3)),
    "u-net": _image(nets.UNet),
    "autoencoder": _image(nets.Autoencoder),
    "convnext": _image(ConvNext),
    "dense": _image(Dense),
    "squeezed": _image(Squeezed),
    "audio": lambda: Traveller(nets.Audio(), torch.randn(4, 1, 2000)),
    "video": lambda: Traveller(nets.Video(), torch.randn(2, 3, 4, 32, 32)),
    "mlp": _sample("mlp"),
    "resnet": _sample("resnet"),
    "groupnorm": _sample("groupnorm"),
    "checkpointed": _sample("checkpointed"),
}


class Travelled(NamedTuple):
    """A digest of losses, parameters and buffers, and what was said of the plan's places."""

    digest: str
    said: tuple[str, ...]


_LEFT = re.compile(r"(\d+) of \d+ places? of \w+ apply in part")


def left(found: Travelled) -> int:
    """How many places of a plan a run lacked, in part or whole."""
    return sum(int(said[1]) for text in found.said if (said := _LEFT.search(text)))


_WHY = re.compile(r"not at all here \((.*)\): the plan")


def reasons(found: Travelled) -> Counter[str]:
    """Why places were left, without the ordinals of operators."""
    texts = [said[1] for text in found.said if (said := _WHY.search(text))]
    return Counter(re.sub(r"\.\d+", "", why) for text in texts for why in text.split(", "))


@contextlib.contextmanager
def on(device: str, make: Make) -> Iterator[TrainStep]:
    """A model's step on a device, after what earlier steps left: a CPU's peak would count it."""
    gc.collect()
    with contextlib.nullcontext() if device == "cpu" else emulate(GPUS[device]):
        where = "cpu" if device == "cpu" else "cuda"
        torch.manual_seed(0)
        model, batch, loss = make()
        model.to(where)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        yield TrainStep(model, loss, optimizer, batch.to(where))


def planned(
    device: str,
    make: Make,
    exclude: Collection[str] = (),
    budget: int = 0,
    host_bytes: int | None = None,
) -> Plan:
    """The plan for a budget whose results are the same, bit for bit; the smallest peak if that is higher."""
    with on(device, make) as step:
        profile = torchtrim.record(step)
        planner = Planner(
            profile, step_seconds=1.0, fingerprint={}, exclude=exclude, host_bytes=host_bytes
        )
        return planner.plan(Budget(max(budget, planner.floor.outcome.peak_bytes)))


def run(device: str, make: Make, plan: Plan | None = None) -> Travelled:
    """A few steps on a device, planned or not."""
    said: list[str] = []

    def listen(where: str, text: str) -> None:
        said.append(f"{where}: {text}")

    with on(device, make) as step:
        notices.listeners.append(listen)
        try:
            if plan is not None:
                apply_plan(plan, named_roots((step.model, *step.optimizers)))
            torch.manual_seed(1)
            losses = [step.step(number) for number in range(STEPS)]
        finally:
            notices.listeners.remove(listen)
        digest = hashlib.sha256(repr(losses).encode())
        for tensor in (*step.model.parameters(), *step.model.buffers()):
            plain = tensor.detach().cpu().contiguous().reshape(-1)
            digest.update(plain.view(torch.uint8).numpy().tobytes())
    return Travelled(digest.hexdigest(), tuple(said))
