"""Whether a certificate ever calls a step unequal that computes the same function in another way.

python -m bench.rewritten [--pairs 500] [--first SEED] [--only WAY] [--json]

A pair is a training step of a small model, drawn by its seed with sizes, optimizer and batch, beside one
that is written in another way (`WAYS`): other kernels, layouts, threads, orders of sums, micro-batches,
fused updates, and what libraries put in a model's place, in their public form with gradients written out:
Liger's norm, product and loss, trl's preference loss in chunks, PEFT's merged adapter. Every verdict but
BITWISE and ROUNDING is a false alarm. Beside the verdicts: the smallest change of the gradients that would
have been seen, the middle one of each way. Each run replaces the pairs of the result that it draws.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.machine import RESULTS, save, slug
from torchtrim.capture.workload import TrainStep
from torchtrim.records.certificate import Certificate
from torchtrim.records.trial import Request
from torchtrim.workflows.verify import verify_pair

STEPS = Request(steps=1, measured=False)
Tensor = torch.Tensor
Way = Callable[..., Any]


class Sizes(NamedTuple):
    """What a pair draws."""

    batch: int
    length: int
    width: int
    heads: int
    classes: int


class _Norm(torch.autograd.Function):
    """The root-mean-square norm, with its gradient written out."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        ctx.save_for_backward(x, weight, scale)
        return x * scale * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, scale = ctx.saved_tensors
        of_row = grads[0] * weight
        inner = (of_row * x).sum(-1, keepdim=True) / x.shape[-1]
        of_weight = (grads[0] * x * scale).reshape(-1, x.shape[-1]).sum(0)
        return scale * (of_row - scale.square() * inner * x), of_weight


class _Product(torch.autograd.Function):
    """`silu(a) * b`, which computes the sigmoid again in backward."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return F.silu(a) * b

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        open_ = torch.sigmoid(a)
        swish = a * open_
        return grads[0] * (swish * (1 - open_) + open_) * b, grads[0] * swish


class _Loss(torch.autograd.Function):
    """The cross-entropy of a head in chunks of rows, which has its gradients when forward ends."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, head: Tensor, labels: Tensor) -> Tensor:
        total, of_rows, of_head = rows.new_zeros(()), [], torch.zeros_like(head)
        for part, wanted in zip(rows.split(5), labels.split(5), strict=True):
            scores = part @ head.T
            share = scores.softmax(-1)
            total = total + F.cross_entropy(scores, wanted, reduction="sum")
            share[torch.arange(len(part)), wanted] -= 1
            share /= len(rows)
            of_rows.append(share @ head)
            of_head += share.T @ part
        ctx.save_for_backward(torch.cat(of_rows), of_head)
        return total / len(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        of_rows, of_head = ctx.saved_tensors
        return grads[0] * of_rows, grads[0] * of_head, None


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-6)


def _centred(x: Tensor, weight: Tensor) -> Tensor:
    apart = x - x.mean(-1, keepdim=True)
    return apart / (apart.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def _in_parts(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply in two halves of what is summed, the last first."""
    half = x.shape[-1] // 2
    return x[..., half:] @ weight[:, half:].T + x[..., :half] @ weight[:, :half].T


def _by_rows(x: Tensor, weight: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1]).split(3)
    return torch.cat([one @ weight.T for one in rows]).reshape(*x.shape[:-1], -1)


def _softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1) @ v


def _by_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention over blocks of keys, with a running maximum and sum."""
    most = torch.full((*q.shape[:-1], 1), -1e30, dtype=q.dtype)
    total, result = torch.zeros_like(most), torch.zeros_like(q)
    for keys, values in zip(k.split(3, -2), v.split(3, -2), strict=True):
        scores = q @ keys.transpose(-1, -2) / q.shape[-1] ** 0.5
        higher = torch.maximum(most, scores.amax(-1, keepdim=True).detach())
        parts, fade = (scores - higher).exp(), (most - higher).exp()
        total = total * fade + parts.sum(-1, keepdim=True)
        result = result * fade + parts @ values
        most = higher
    return result / total


def _by_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    parts = q.split(2, -2)
    return torch.cat([F.scaled_dot_product_attention(one, k, v) for one in parts], -2)


def _plain_kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v)


def _turned(x: Tensor) -> Tensor:
    """Rotate pairs of features by their position."""
    angles = _angles(x)
    one, other = x.chunk(2, -1)
    turned = torch.cat((-other, one), -1)
    return x * torch.cat((angles.cos(),) * 2, -1) + turned * torch.cat((angles.sin(),) * 2, -1)


def _turned_as_complex(x: Tensor) -> Tensor:
    pairs = torch.complex(*x.chunk(2, -1)) * torch.polar(torch.ones_like(_angles(x)), _angles(x))
    return torch.cat((pairs.real, pairs.imag), -1)


def _angles(x: Tensor) -> Tensor:
    places = torch.arange(x.shape[-2], dtype=x.dtype)[:, None]
    return places * 0.5 ** torch.arange(x.shape[-1] // 2, dtype=x.dtype)


def _by_logarithms(scores: Tensor, labels: Tensor) -> Tensor:
    chosen = scores.gather(-1, labels[:, None]).squeeze(-1)
    return (scores.logsumexp(-1) - chosen).sum() / len(labels)


def _unfolded(x: Tensor, weight: Tensor) -> Tensor:
    columns = F.unfold(x, 3, padding=1)
    return (weight.flatten(1) @ columns).view(len(x), -1, *x.shape[2:])


def _channels_last(x: Tensor, weight: Tensor) -> Tensor:
    layout = torch.channels_last
    inputs = x.contiguous(memory_format=layout), weight.contiguous(memory_format=layout)
    return F.conv2d(*inputs, padding=1).contiguous()


def _native_conv(x: Tensor, weight: Tensor) -> Tensor:
    with torch.backends.mkldnn.flags(enabled=False):
        return F.conv2d(x, weight, padding=1)


def _batch_normed(x: Tensor) -> Tensor:
    variance, mean = torch.var_mean(x, (0, 2, 3), correction=0, keepdim=True)
    return (x - mean) * torch.rsqrt(variance + 1e-5)


def _preferred(margins: Tensor) -> Tensor:
    return -F.logsigmoid(0.1 * margins).mean()


def _preferred_in_chunks(margins: Tensor) -> Tensor:
    return sum(F.softplus(-0.1 * one).sum() for one in margins.split(2)) / len(margins)  # type: ignore[return-value]


PLAIN: dict[str, Way] = {
    "linear": lambda x, w: F.linear(x, w),
    "gate": lambda a, b: F.silu(a) * b,
    "norm": _normed,
    "centre": lambda x, w: F.layer_norm(x, (x.shape[-1],), w),
    "attention": F.scaled_dot_product_attention,
    "turn": _turned,
    "head": lambda rows, head, labels: F.cross_entropy(F.linear(rows, head), labels),
    "adapter": lambda x, w, a, b: F.linear(x, w) + 2.0 * F.linear(F.linear(x, a), b),
    "convolution": lambda x, w: F.conv2d(x, w, padding=1),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "preference": _preferred,
}
WAYS: dict[str, dict[str, Any]] = {
    "sums of products in another order": {"linear": _in_parts},
    "products of chunks of rows": {"linear": _by_rows},
    "products as einsum": {"linear": lambda x, w: torch.einsum("...i,oi->...o", x, w)},
    "Liger's RMSNorm": {"norm": _Norm.apply},
    "Liger's SwiGLU": {"gate": _Product.apply},
    "Liger's fused linear cross-entropy": {"head": _Loss.apply},
    "loss by logarithms": {
        "head": lambda rows, head, labels: _by_logarithms(F.linear(rows, head), labels)
    },
    "LayerNorm by hand": {"centre": _centred},
    "attention by softmax": {"attention": _softmax},
    "attention by blocks of keys": {"attention": _by_blocks},
    "attention by chunks of queries": {"attention": _by_queries},
    "attention's plain kernel": {"attention": _plain_kernel},
    "rotation by complex numbers": {"turn": _turned_as_complex},
    "PEFT's merged adapter": {"adapter": lambda x, w, a, b: F.linear(x, w + 2.0 * (b @ a))},
    "trl's loss in chunks": {"preference": _preferred_in_chunks},
    "convolution by unfolding": {"convolution": _unfolded},
    "convolution in channels-last": {"convolution": _channels_last},
    "torch's own convolution": {"convolution": _native_conv},
    "batch norm by hand": {"batch norm": _batch_normed},
    "GELU by hand": {
        "gelu": lambda x: x * torch.sigmoid(2 * 0.7978845608028654 * (x + 0.044715 * x.pow(3)))
    },
    "two threads": {"threads": 2},
    "micro-batches": {"parts": 2},
    "fused update": {"update": {"fused": True}},
    "update of one parameter at a time": {"update": {"foreach": False}},
}
OPTIMIZERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("SGD", {"lr": 0.05, "momentum": 0.9}),
    ("Adam", {"lr": 1e-3}),
    ("AdamW", {"lr": 1e-3, "weight_decay": 0.1}),
    ("Adagrad", {"lr": 1e-2}),
)


class Net(nn.Module):
    """A convolution, gated layers with attention, an adapter, and a head; each operation as it is given."""

    def __init__(self, sizes: Sizes, ways: dict[str, Way]) -> None:
        super().__init__()
        width, inner = sizes.width, 2 * sizes.width
        shapes = {
            **{"conv": (width, 3, 3, 3), "norm": (width,), "centre": (width,)},
            **{"qkv": (3 * width, width), "out": (width, width), "gates": (2 * inner, width)},
            **{
                "down": (width, inner),
                "base": (width, width),
                "low": (2, width),
                "high": (width, 2),
            },
            **{"head": (sizes.classes, width)},
        }
        for name, shape in shapes.items():
            start = torch.randn(shape) * 0.3 + (1.0 if len(shape) == 1 else 0.0)
            self.register_parameter(name, nn.Parameter(start))
        # A function is no attribute that a certificate compares.
        self._way: Callable[[str], Way] = lambda name: ways.get(name, PLAIN[name])
        self._heads: Callable[[], int] = lambda: sizes.heads

    def forward(self, pictures: Tensor) -> Tensor:
        way, of = self._way, self.get_parameter
        x = way("batch norm")(way("convolution")(pictures, of("conv"))).flatten(2).transpose(1, 2)
        normed = way("norm")(x, of("norm"))
        q, k, v = (
            one.unflatten(-1, (self._heads(), -1)).transpose(1, 2)
            for one in way("linear")(normed, of("qkv")).chunk(3, -1)
        )
        seen = way("attention")(way("turn")(q), way("turn")(k), v).transpose(1, 2).flatten(2)
        x = x + way("linear")(seen, of("out"))
        a, b = way("linear")(way("centre")(x, of("centre")), of("gates")).chunk(2, -1)
        x = x + way("linear")(way("gate")(a, b), of("down"))
        return way("gelu")(way("adapter")(x, of("base"), of("low"), of("high")))


def _loss(model: Net, pictures: Tensor, labels: Tensor, ways: dict[str, Way]) -> Tensor:
    rows = model(pictures).flatten(0, 1)
    head = model.get_parameter("head")
    margins = (rows.unflatten(0, labels.shape).mean(1) @ head.T).diff(dim=-1).flatten()
    loss = ways.get("head", PLAIN["head"])(rows, head, labels.flatten())
    result: Tensor = loss + ways.get("preference", PLAIN["preference"])(margins)
    return result


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def step_of(seed: int, ways: dict[str, Any]) -> TrainStep:
    """Return the step that a seed draws, with these operations in place of the plain ones."""
    rng = random.Random(seed)
    heads = rng.choice((1, 2, 4))
    sizes = Sizes(
        rng.choice((2, 4)), rng.choice((3, 4)), heads * rng.choice((4, 6)), heads, rng.randint(3, 9)
    )
    name, options = rng.choice(OPTIMIZERS)
    torch.manual_seed(seed)
    model = Net(sizes, ways)
    optimizer = getattr(torch.optim, name)(
        model.parameters(), **{**options, **ways.get("update", {})}
    )
    pictures = torch.randn(sizes.batch, 3, sizes.length, sizes.length)
    labels = torch.randint(sizes.classes, (sizes.batch, sizes.length**2))
    parts = ways.get("parts", 1)

    def loss(model: Net, batch: tuple[Tensor, Tensor]) -> Tensor:
        with _threads(ways.get("threads", 1)):
            return _loss(model, *batch, ways)

    def whole(model: Net, batch: tuple[Tensor, Tensor]) -> Tensor:
        # Statistics of a batch are of the whole batch, so only the loss is in parts.
        rows = model(batch[0]).flatten(0, 1)
        head, wanted = model.get_parameter("head"), batch[1].flatten()
        pairs = zip(rows.chunk(parts), wanted.chunk(parts), strict=True)
        margins = (rows.unflatten(0, batch[1].shape).mean(1) @ head.T).diff(dim=-1).flatten()
        losses = [F.cross_entropy(a @ head.T, b, reduction="sum") for a, b in pairs]
        return torch.stack(losses).sum() / len(wanted) + _preferred(margins)

    return TrainStep(model, whole if parts > 1 else loss, optimizer, (pictures, labels))


def certified(seed: int, way: str) -> Certificate:
    """Return the verdict on a pair."""
    found = verify_pair(step_of(seed, {}), step_of(seed, WAYS[way]), STEPS).report.certificate
    assert found is not None
    return found


def summary(pairs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the figures over all pairs, and by way."""
    ways: dict[str, list[dict[str, Any]]] = {}
    for pair in pairs.values():
        ways.setdefault(pair["way"], []).append(pair)
    return {
        "pairs": len(pairs),
        "verdicts": dict(Counter(one["verdict"] for one in pairs.values())),
        "false_alarms": {
            seed: one
            for seed, one in pairs.items()
            if one["verdict"] not in ("BITWISE", "ROUNDING")
        },
        "of": {
            way: {
                "verdicts": dict(Counter(one["verdict"] for one in found)),
                "sees_of_gradients": statistics.median(
                    [one["sees"] for one in found if one["sees"]] or [0.0]
                ),
            }
            for way, found in sorted(ways.items())
        },
    }


def main() -> None:
    """Draw pairs, and put the verdicts beside those of other seeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=500)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--only", default="", choices=["", *WAYS])
    parser.add_argument("--json", action="store_true", help="write the result")
    options = parser.parse_args()
    path = RESULTS / slug() / "rewritten.json"
    pairs = json.loads(path.read_text())["each"] if options.json and path.exists() else {}
    ways = [options.only] if options.only else [*WAYS]
    for seed in range(options.first, options.first + options.pairs):
        way = ways[seed % len(ways)]
        found = certified(seed, way)
        sees = found.sees.get("gradient", 0.0)
        pairs[str(seed)] = {"way": way, "verdict": found.verdict, "sees": sees}
        if found.verdict not in ("BITWISE", "ROUNDING"):
            print(seed, way, found.verdict, found.reason, flush=True)
        if options.json:
            save("rewritten", {**summary(pairs), "each": pairs})
    print(json.dumps(summary(pairs), indent=1))


if __name__ == "__main__":
    main()
