"""No single lever and no simple plan by hand beats a plan: floors, times, redundant options, and predictions.

    python -m bench.simple_plans [MODEL ...]

For each model: the floor must not exceed the peak of any technique alone, or of any simple plan by hand, both
as simulated, nor the peak measured with torch's own checkpointing. At 90, 75, 60 and 50 % of the peak, no
simple plan that fits may take less time, no option of the plan may be superfluous, and the measured peak must
be within half a percent of the predicted one.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tests.cases import nets, zoo
from torch import Tensor, nn

from bench.by_hand import Trained, checkpointed, peak
from bench.machine import saved
from torchtrim import TrainStep
from torchtrim.errors import InfeasibleBudget, TorchtrimError
from torchtrim.executor.registry import names
from torchtrim.planner.by_hand import by_hand
from torchtrim.planner.planner import Choice, Planner
from torchtrim.records.budget import Budget
from torchtrim.records.finding import Equivalence
from torchtrim.records.terms import Terms
from torchtrim.records.trial import Request
from torchtrim.step.from_profile import step_of
from torchtrim.step.simulate import simulate
from torchtrim.workflows.optimize.fitting import Fitting

SHARES = (90, 75, 60, 50)
NEAR = 0.005  # of the measured peak


class Points(nn.Module):
    """A max over points, a transform of the features that is nearly orthogonal, and a class."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = self._layers(3, width)
        self.transform = nn.Sequential(*self._layers(width, 4 * width))
        self.turn = nn.Linear(4 * width, width * width)
        self.second = nn.Sequential(
            *self._layers(width, 2 * width), *self._layers(2 * width, 8 * width)
        )
        self.head = nn.Sequential(
            nn.Linear(8 * width, 128),
            nn.BatchNorm1d(128),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(128, 10),
        )

    def _layers(self, inner: int, outer: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv1d(inner, outer, 1), nn.BatchNorm1d(outer), nn.ReLU())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        turn = self.turn(self.transform(x).max(2)[0]).view(len(x), x.shape[1], x.shape[1])
        turn = turn + torch.eye(x.shape[1])
        x = torch.bmm(x.transpose(1, 2), turn).transpose(1, 2)
        return self.head(self.second(x).max(2)[0]), turn


def of_points(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy, and how far the transform is from orthogonal."""
    logits, turn = model(batch[0])
    product = torch.bmm(turn, turn.transpose(1, 2)) - torch.eye(turn.shape[1])
    return F.cross_entropy(logits, batch[1]) + 1e-3 * product.norm(dim=(1, 2)).mean()


class Field(nn.Module):
    """Color and density from a position that is embedded outside."""

    def __init__(self, width: int = 64, depth: int = 4, given: int = 39) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width if i else given, width) for i in range(depth))
        self.last = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.last(x)


def embedded(x: Tensor, bands: int = 6) -> Tensor:
    """A position, and sines and cosines of it at several frequencies."""
    waves = [f(x * 2.0**band) for band in range(bands) for f in (torch.sin, torch.cos)]
    return torch.cat([x, *waves], -1)


def composited(raw: Tensor, depths: Tensor) -> Tensor:
    """The color of each ray from those of its samples."""
    gaps = torch.cat(
        [depths[..., 1:] - depths[..., :-1], torch.full_like(depths[..., :1], 1e10)], -1
    )
    alpha = 1 - torch.exp(-F.relu(raw[..., 3]) * gaps)
    passed = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], -1), -1)
    return ((alpha * passed[:, :-1])[..., None] * torch.sigmoid(raw[..., :3])).sum(-2)


def rendered(model: nn.Module, batch: Any, samples: int = 32) -> Tensor:
    """The difference between rendered and wanted colors."""
    origins, directions, wanted = batch
    depths = torch.linspace(2.0, 6.0, samples).expand(len(origins), samples)
    positions = origins[:, None] + directions[:, None] * depths[..., None]
    raw = model(embedded(positions).reshape(-1, 39)).reshape(*positions.shape[:2], 4)
    return F.mse_loss(composited(raw, depths), wanted)


class Splines(nn.Module):
    """A layer of splines: a basis of Gaussians on a grid for each input, and a sum over them."""

    def __init__(self, inner: int, outer: int, grid: int = 8) -> None:
        super().__init__()
        self.register_buffer("grid", torch.linspace(-2, 2, grid))
        self.coefficients = nn.Parameter(torch.randn(outer, inner, grid) / grid)
        self.base = nn.Parameter(torch.randn(outer, inner) / inner)

    def forward(self, x: Tensor) -> Tensor:
        basis = torch.exp(-((x[..., None] - self.grid) ** 2) * 4)
        edges = torch.einsum("big,oig->boi", basis, self.coefficients)
        return (edges + self.base * F.silu(x)[:, None]).sum(2)


class Gpt(nn.Module):
    """A decoder, wide in its vocabulary."""

    def __init__(
        self, width: int = 64, layers: int = 4, vocabulary: int = 8000, heads: int = 4
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Decoder(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Decoder(nn.Module):
    """Causal attention and an MLP, with dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in (q, k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Residual(nn.Module):
    """Two convolutions with norms, and a way around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (
            nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2)
        )
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(inner)))


class Pair(nn.Module):
    """A generator and a discriminator, trained in one step against each other."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.ConvTranspose2d(32, 2 * width, 4), nn.BatchNorm2d(2 * width), nn.ReLU(),
            nn.ConvTranspose2d(2 * width, width, 4, 2, 1), nn.BatchNorm2d(width), nn.ReLU(),
            nn.ConvTranspose2d(width, 3, 4, 2, 1), nn.Tanh(),
        )  # fmt: skip
        self.discriminator = nn.Sequential(
            nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Conv2d(width, 2 * width, 4, 2, 1), nn.BatchNorm2d(2 * width), nn.LeakyReLU(0.2),
            nn.Conv2d(2 * width, 1, 4),
        )  # fmt: skip


def against(model: nn.Module, batch: Any) -> Tensor:
    """Both losses of a GAN."""
    made = model.generator(batch[0])
    real, fake = model.discriminator(batch[1]), model.discriminator(made.detach())
    fooled = model.discriminator(made)
    return (F.softplus(-real) + F.softplus(fake)).mean() + F.softplus(-fooled).mean()


def in_bfloat16(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy of each position's token, under autocast."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(batch[0])
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), batch[1].view(-1))


class OwnLoss(nn.Module):
    """A decoder that returns its own loss, of capped logits in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = Gpt(vocabulary=4000)

    def forward(self, tokens: Tensor, wanted: Tensor) -> Tensor:
        logits = self.gpt(tokens).float()
        logits = 15 * torch.tanh(logits / 15)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), wanted.view(-1))


def _sequential(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*layers)


def _mlp() -> nn.Module:
    inner = (
        nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128), nn.Tanh())
        for _ in range(6)
    )
    return nn.Sequential(*inner)


def _resnet() -> nn.Module:
    blocks = nn.Sequential(*(Residual(12) for _ in range(6)))
    return nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1),
        blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(12, 10),
    )


def _squared(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()


MODELS: dict[str, zoo.Maker] = {
    "mlp": zoo.own(_mlp, lambda: torch.randn(1024, 128), _squared),
    "resnet": zoo.own(_resnet, lambda: zoo.images(48, 8, 10)),
    "u-net": zoo.own(nets.UNet, lambda: zoo.pixels(4, 64)),
    "transformer": zoo.own(nets.Encoder, lambda: zoo.tokens(8, 96), zoo.next_token),
    "gan": zoo.own(Pair, lambda: (torch.randn(32, 32, 5, 5), torch.randn(32, 3, 32, 32)), against),
    "points": zoo.own(
        Points, lambda: (torch.randn(8, 3, 512), torch.randint(10, (8,))), of_points
    ),
    "nerf": zoo.own(
        Field, lambda: (torch.randn(256, 3), torch.randn(256, 3), torch.rand(256, 3)), rendered
    ),
    "lstm": zoo.own(
        lambda: nets.Recurrent(nn.LSTM, 64, 1000),
        lambda: tuple(t % 1000 for t in zoo.tokens(16, 64)),
        zoo.next_token,
    ),
    "gpt": zoo.own(Gpt, lambda: zoo.tokens(4, 128), zoo.next_token),
    "gpt in bfloat16": zoo.own(Gpt, lambda: zoo.tokens(4, 128), in_bfloat16),
    "gpt with its loss": zoo.own(OwnLoss, lambda: zoo.tokens(8, 128), lambda m, b: m(*b)),
    "splines": zoo.own(
        lambda: nn.Sequential(Splines(2, 16), Splines(16, 16), Splines(16, 1)),
        lambda: torch.randn(2000, 2).clamp(-2, 2),
        _squared,
    ),
}  # fmt: skip
ALLOWED: tuple[Equivalence, ...] = ("BITWISE", "ROUNDING")


class Simple(NamedTuple):
    """A simple plan: its peak in bytes and the seconds that it adds."""

    name: str
    peak: int
    seconds: float


def simple_plans(fitting: Fitting, original: Any, planner: Planner) -> Iterator[Simple]:
    """Yield what each technique reaches alone, and the plans of a person, as simulated."""
    bias = original.peak_bytes - planner.simulated_original
    for name in names():
        try:
            alone = fitting.planner(original, only=name)
            for share in (*SHARES, 0):
                try:
                    plan = alone.plan(Budget(original.peak_bytes * share // 100, bias=bias))
                except InfeasibleBudget:
                    plan = alone.floor_plan(Budget(0, bias=bias))
                if plan.techniques and _allowed(plan, planner):
                    added = plan.predicted.step_seconds - planner.priced[1]
                    yield Simple(f"{name} alone", plan.predicted.peak_bytes - bias, added)
        except TorchtrimError as error:
            print(f"  {name}: {error}")
    step = step_of(original.profile, original.seconds)
    for way in by_hand(step):
        if (
            all(option.technique == "recompute" for option in way.options)
            or planner._allow == "ROUNDING"
        ):
            outcome = simulate(step, way.edits)
            yield Simple(way.name, outcome.peak_bytes, outcome.added_seconds)


def _allowed(plan: Any, planner: Planner) -> bool:
    return all(
        one.equivalence in ALLOWED[: ALLOWED.index(planner._allow) + 1] for one in plan.techniques
    )


def redundant(planner: Planner, choice: Choice, budget: int) -> list[str]:
    """Return the options without which the plan would fit as well."""
    problem = planner._problem
    chosen = [n for n, option in enumerate(problem.options) if option in choice.options]
    return [
        f"{problem.options[n].technique} {problem.options[n].where}"
        for n in chosen
        if problem.seconds[n] > 1e-7
        and problem.run(tuple(o for o in chosen if o != n)).peak_bytes <= budget
    ]


def by_checkpoints(make: zoo.Maker, base: int) -> Iterator[tuple[str, int]]:
    """Yield the peaks with every module of each family of siblings checkpointed, measured."""
    other = Trained.of(make)
    model = other.sample.model
    offset = peak(other.step) - base
    families = [
        model,
        *(
            m
            for m in model.modules()
            if isinstance(m, (nn.Sequential, nn.ModuleList)) and m is not model
        ),
    ]
    for family in families:
        blocks = [child for child in family.children() if not isinstance(child, nn.ModuleList)]
        for name, some in (("each", blocks), ("second", blocks[::2])):
            if some:
                with checkpointed(some):
                    yield f"{name} of {type(family).__name__}", peak(other.step) - offset
    sample = other.sample
    from torch.utils.checkpoint import checkpoint

    whole = TrainStep(
        model,
        lambda m, b: checkpoint(sample.loss, m, b, use_reentrant=False),
        other.optimizer,
        sample.batch,
    )
    yield "the whole loss", peak(partial(whole.step, 0)) - offset


def measure(make: zoo.Maker, allow: Equivalence) -> dict[str, Any]:
    """One model under one allowance."""
    trained = Trained.of(make)
    fitting = Fitting(trained.work, Request(steps=2), lambda _: None, Terms(allow=allow))
    original = fitting.observe()
    planner = fitting.planner(original)
    bias = original.peak_bytes - planner.simulated_original
    floor = planner.floor.outcome.peak_bytes
    simple = list(simple_plans(fitting, original, planner))
    found: dict[str, Any] = {"peak": original.peak_bytes, "floor": floor + bias, "faults": []}
    faults = found["faults"]
    faults += [
        f"floor {floor / 2**20:.3f}: {one.name} reaches {one.peak / 2**20:.3f}"
        for one in simple
        if one.peak < floor
    ]
    for name, reached in by_checkpoints(make, original.peak_bytes):
        if reached < floor + bias - 4096:
            faults.append(
                f"floor {(floor + bias) / 2**20:.3f}: {name} by hand measured {reached / 2**20:.3f}"
            )
    for share in SHARES:
        budget = original.peak_bytes * share // 100 - bias
        choice = planner._within(budget)
        if choice is None:
            found[f"{share}"] = "below the floor"
            continue
        plan = planner.plan(Budget(budget + bias, bias=bias))
        trial = fitting.run_planned(plan)
        error = plan.predicted.peak_bytes / trial.peak_bytes - 1
        found[f"{share}"] = {
            "predicted": plan.predicted.peak_bytes / original.peak_bytes,
            "error": error,
            "added": choice.outcome.added_seconds / planner.priced[0],
            "techniques": {one.name: len(one.where) for one in plan.techniques},
            "optimal": choice.optimal,
        }
        if abs(error) > NEAR:
            faults.append(
                f"{share} %: predicted {plan.predicted.peak_bytes / 2**20:.3f} measured "
                f"{trial.peak_bytes / 2**20:.3f} {found[f'{share}']['techniques']}"
            )
        quicker = [
            one
            for one in simple
            if one.peak <= budget and one.seconds < choice.outcome.added_seconds - 1e-7
        ]
        faults += [
            f"{share} %: {one.name} adds {one.seconds:.2e} for {choice.outcome.added_seconds:.2e}"
            for one in quicker
        ]
        faults += [f"{share} %: {one} is superfluous" for one in redundant(planner, choice, budget)]
    return found


def main() -> None:
    """The named models, or all; keep the results of the others."""
    torch.set_num_threads(1)
    models = saved("simple_plans").get("models", {})
    for name in sys.argv[1:] or MODELS:
        for allow in ALLOWED:
            models[f"{name}, {allow}"] = measure(MODELS[name], allow)
            gc.collect()
            print(name, allow, json.dumps(models[f"{name}, {allow}"], indent=1), flush=True)
    print(
        json.dumps({name: one["faults"] for name, one in models.items() if one["faults"]}, indent=1)
    )


if __name__ == "__main__":
    main()
