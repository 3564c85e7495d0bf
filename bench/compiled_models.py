"""Small models of twelve kinds for `bench.compiled`, which compile in seconds."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, LENGTH, WORDS = 128, 128, 512


class Attention(nn.Module):
    """Attention of some heads, to itself or to others."""

    def __init__(self, width: int = WIDTH, heads: int = 4, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.both = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor, other: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        def split(y: Tensor) -> Tensor:
            return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        keys, values = self.both(x if other is None else other).chunk(2, -1)
        mixed = F.scaled_dot_product_attention(
            split(self.query(x)),
            split(keys),
            split(values),
            attn_mask=mask,
            is_causal=self.causal and mask is None,
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A transformer's block, norms first. `crosses`: it also attends to another sequence."""

    def __init__(
        self, width: int = WIDTH, p: float = 0.0, causal: bool = False, crosses: bool = False
    ) -> None:
        super().__init__()
        self.attention = Attention(width, causal=causal)
        self.crossing = Attention(width) if crosses else None
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.grow, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        x = x + self.drop(self.attention(self.norms[0](x)))
        if self.crossing is not None:
            x = x + self.drop(self.crossing(self.norms[2](x), other))
        return x + self.drop(self.shrink(F.gelu(self.grow(self.norms[1](x)))))


class After(Block):
    """BERT's block: norms come after the sums."""

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        x = self.norms[0](x + self.drop(self.attention(x)))
        return self.norms[1](x + self.drop(self.shrink(F.gelu(self.grow(x)))))


class Text(nn.Module):
    """A language model of blocks, its loss inside."""

    def __init__(self, block: Callable[[], nn.Module], layers: int, p: float = 0.0) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.drop = nn.Dropout(p)

    def features(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.words(tokens) + self.places(torch.arange(tokens.shape[1])))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.features(tokens)).flatten(0, 1), target.flatten())


class Llama(nn.Module):
    """Llama's block: root mean square norms, rotary positions, a gated layer."""

    def __init__(self, width: int = WIDTH, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            one.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for one in self.qkv(self.first(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(_turned(q), _turned(k), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def _turned(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    speed = 10000 ** -(torch.arange(half) / half)
    angle = torch.arange(x.shape[-2])[:, None] * speed
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


class T5(nn.Module):
    """An encoder, and a decoder that attends to it."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.ModuleList(Block(p=0.1) for _ in range(layers))
        self.decoder = nn.ModuleList(Block(p=0.1, causal=True, crosses=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x, y = self.words(tokens), self.words(target)
        for block in self.encoder:
            x = block(x)
        for block in self.decoder:
            y = block(y, x)
        return F.cross_entropy(self.head(self.norm(y)).flatten(0, 1), target.flatten())


class Experts(nn.Module):
    """A block whose second half is a mixture of experts, each taken for all tokens and weighted."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.attention, self.route = Attention(causal=True), nn.Linear(WIDTH, count)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.grow = nn.Parameter(torch.randn(count, WIDTH, 2 * WIDTH) / 12)
        self.shrink = nn.Parameter(torch.randn(count, 2 * WIDTH, WIDTH) / 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        y = self.second(x)
        best, which = self.route(y).softmax(-1).topk(2, -1)
        share = torch.zeros(*y.shape[:2], len(self.grow)).scatter(-1, which, best)
        every = F.gelu(torch.einsum("btd,edh->ebth", y, self.grow))
        return x + torch.einsum("ebth,ehd,bte->btd", every, self.shrink, share)


class Scan(nn.Module):
    """Mamba-like: a short convolution, a gate, and a linear recurrence over time, as a loop over chunks."""

    def __init__(self, states: int = 8, chunk: int = 32) -> None:
        super().__init__()
        self.chunk = chunk
        self.norm, self.enter = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 4, padding=3, groups=WIDTH)
        self.decay, self.mix = nn.Linear(WIDTH, states), nn.Linear(WIDTH, 2 * states)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y, gate = self.enter(self.norm(x)).chunk(2, -1)
        y = F.silu(self.conv(y.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        decay = -F.softplus(self.decay(y))
        keys, queries = self.mix(y).chunk(2, -1)
        state, parts = torch.zeros(x.shape[0], keys.shape[-1], WIDTH), []
        for begin in range(0, x.shape[1], self.chunk):
            part = slice(begin, begin + self.chunk)
            log = decay[:, part].cumsum(1)
            k, q = keys[:, part] * (-log).exp(), queries[:, part] * log.exp()
            inner = (q @ k.transpose(1, 2)).tril() @ y[:, part]
            parts.append(inner + q @ state)
            last = log[:, -1:].exp().transpose(1, 2)
            state = last * (state + k.transpose(1, 2) @ y[:, part])
        return x + self.out(torch.cat(parts, 1) * F.silu(gate))


class Patches(nn.Module):
    """ViT: blocks on patches of an image."""

    def __init__(self, layers: int = 6, patch: int = 8, side: int = 96) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, WIDTH, patch, patch)
        self.place = nn.Parameter(torch.randn(1, (side // patch) ** 2, WIDTH) / 50)
        self.blocks = nn.ModuleList(Block(p=0.1) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.cut(x).flatten(2).transpose(1, 2) + self.place
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x).mean(1)), y)


class Windows(nn.Module):
    """Swin: blocks in windows that shift, and patches that merge."""

    def __init__(self, window: int = 6) -> None:
        super().__init__()
        self.window = window
        self.cut = nn.Conv2d(3, 64, 4, 4)
        self.early = nn.ModuleList(Block(64) for _ in range(2))
        self.merge = nn.Linear(256, 128)
        self.late = nn.ModuleList(Block(128) for _ in range(4))
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.cut(x).permute(0, 2, 3, 1)
        x = self._stage(x, self.early)
        x = self.merge(x.unflatten(1, (-1, 2)).unflatten(3, (-1, 2)).transpose(2, 3).flatten(3))
        x = self._stage(x, self.late)
        return F.cross_entropy(self.head(x.mean((1, 2))), y)

    def _stage(self, x: Tensor, blocks: nn.ModuleList) -> Tensor:
        for number, block in enumerate(blocks):
            shift = number % 2 * (self.window // 2)
            x = x.roll((-shift, -shift), (1, 2))
            batch, side, w = x.shape[0], x.shape[1], self.window
            x = x.view(batch, side // w, w, side // w, w, -1).transpose(2, 3)
            x = block(x.reshape(-1, w * w, x.shape[-1]))
            x = x.view(batch, side // w, side // w, w, w, -1).transpose(2, 3)
            x = x.reshape(batch, side, side, -1).roll((shift, shift), (1, 2))
        return x


class ConvNeXt(nn.Module):
    """Depthwise convolutions, norms over channels, and an inverted bottleneck."""

    def __init__(self, width: int = 64, layers: int = 6) -> None:
        super().__init__()
        self.cut, self.head = nn.Conv2d(3, width, 4, 4), nn.Linear(width, 10)
        self.deep = nn.ModuleList(nn.Conv2d(width, width, 7, 1, 3, 1, width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.grow = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.shrink = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.cut(x)
        for deep, norm, grow, shrink in zip(
            self.deep, self.norms, self.grow, self.shrink, strict=True
        ):
            z = norm(deep(x).permute(0, 2, 3, 1))
            x = x + shrink(F.gelu(grow(z))).permute(0, 3, 1, 2)
        return F.cross_entropy(self.head(x.mean((2, 3))), y)


class Residual(nn.Module):
    """A block of two convolutions with norms. `time`: a vector that is added in between."""

    def __init__(self, before: int, after: int, stride: int = 1, group: bool = False) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            (nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.Conv2d(after, after, 3, 1, 1))
        )
        self.norms = nn.ModuleList(
            nn.GroupNorm(8, after) if group else nn.BatchNorm2d(after) for _ in range(2)
        )
        self.past = nn.Conv2d(before, after, 1, stride) if (before, stride) != (after, 1) else None

    def forward(self, x: Tensor, time: Tensor | None = None) -> Tensor:
        y = F.relu(self.norms[0](self.convs[0](x)))
        y = y if time is None else y + time[:, :, None, None]
        y = self.norms[1](self.convs[1](y))
        return F.relu(y + (x if self.past is None else self.past(x)))


class ResNet(nn.Module):
    """Residual blocks with batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32)
        sizes = ((32, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1))
        self.blocks = nn.Sequential(*(Residual(*size) for size in sizes))
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.first(x))))
        return F.cross_entropy(self.head(x.mean((2, 3))), y)


class UNet(nn.Module):
    """Down, and up again with what was kept. `diffuses`: noise is predicted, given its time."""

    def __init__(self, width: int = 24, diffuses: bool = False) -> None:
        super().__init__()
        widths = (width, 2 * width, 4 * width)
        self.first, self.last = nn.Conv2d(3, width, 3, 1, 1), nn.Conv2d(width, 3, 1)
        self.down = nn.ModuleList(Residual(a, b, 2, diffuses) for a, b in pairwise(widths))
        self.up = nn.ModuleList(Residual(a + b, b, 1, diffuses) for a, b in pairwise(widths[::-1]))
        self.times = nn.ModuleList(nn.Linear(32, b) for b in widths[-2::-1]) if diffuses else None
        self.middle = Attention(4 * width) if diffuses else None

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        kept = [self.first(x)]
        for block in self.down:
            kept.append(block(kept[-1]))
        y = kept.pop()
        if self.middle is not None:
            y = y + self.middle(y.flatten(2).transpose(1, 2)).transpose(1, 2).unflatten(
                2, y.shape[2:]
            )
        time = torch.linspace(0, 1, 32).cos().expand(len(x), -1)
        for number, block in enumerate(self.up):
            y = torch.cat((F.interpolate(y, scale_factor=2.0), kept.pop()), 1)
            y = block(y, None if self.times is None else self.times[number](time))
        return F.mse_loss(self.last(y), target)


class Broken(Text):
    """A language model with a graph break in its middle: two graphs."""

    def features(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks[:3]:
            x = block(x)
        torch._dynamo.graph_break()
        for block in self.blocks[3:]:
            x = block(x)
        return self.norm(x)


class Sample(NamedTuple):
    """A model, a batch, and options of `torch.compile`. `eager_loss`: outside of the graph."""

    model: nn.Module
    batch: tuple[Tensor, ...]
    options: dict[str, Any] = {}
    eager_loss: bool = False


class Logits(Text):
    """A language model whose loss is computed outside."""

    def forward(self, tokens: Tensor, target: Tensor | None = None) -> Tensor:
        return self.head(self.features(tokens))


def _text(model: nn.Module, batch: int = 8, **rest: Any) -> Sample:
    tokens = torch.randint(WORDS, (2, batch, LENGTH))
    return Sample(model, (tokens[0], tokens[1]), **rest)


def _image(model: nn.Module, side: int, batch: int) -> Sample:
    return Sample(model, (torch.randn(batch, 3, side, side), torch.randint(10, (batch,))))


def _pixels(model: nn.Module, side: int = 64, batch: int = 8) -> Sample:
    return Sample(model, (torch.randn(batch, 3, side, side), torch.randn(batch, 3, side, side)))


def _causal(p: float = 0.0) -> Callable[[], nn.Module]:
    return lambda: Block(p=p, causal=True)


MODELS: dict[str, Callable[[], Sample]] = {
    "gpt": lambda: _text(Text(_causal(0.1), 6, 0.1)),
    "llama": lambda: _text(Text(Llama, 6)),
    "bert": lambda: _text(Text(lambda: After(p=0.1), 6, 0.1)),
    "t5": lambda: _text(T5()),
    "vit": lambda: _image(Patches(), 96, 8),
    "swin": lambda: _image(Windows(), 96, 8),
    "convnext": lambda: _image(ConvNeXt(), 128, 8),
    "resnet": lambda: _image(ResNet(), 96, 16),
    "u-net": lambda: _pixels(UNet()),
    "diffusion u-net": lambda: _pixels(UNet(diffuses=True)),
    "mamba-like": lambda: _text(Text(Scan, 4)),
    "moe": lambda: _text(Text(Experts, 4)),
}
OTHERS: dict[str, Callable[[], Sample]] = {
    "two graphs": lambda: _text(Broken(_causal(), 6)),
    "dynamic shapes": lambda: _text(Text(_causal(), 6), options={"dynamic": True}),
    "eager loss": lambda: _text(Logits(_causal(), 6), eager_loss=True),
}
