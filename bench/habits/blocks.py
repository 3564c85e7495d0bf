# ruff: noqa: E501 (lines of scripts)
"""The networks of generated scripts: a block that keeps its input's shape, and that shape."""

from __future__ import annotations

from typing import NamedTuple


class Block(NamedTuple):
    """Text of a block: what stands before it, its layers, and lines from `x` to `x`; the input's shape.

    `sample`: how an input is made. `sparse`: its gradients are.
    """

    shape: tuple[int, ...]
    layers: str
    forward: str
    before: str = ""
    sample: str = "torch.randn({shape})"
    sparse: bool = False


AT_RANDOM = "depth at random"
_MLP = (
    "self.up = nn.Linear({d}, 4 * {d})\nself.act = nn.ReLU()\nself.down = nn.Linear(4 * {d}, {d})"
)
_MLP_FORWARD = "x = x + self.down(self.act(self.up(x)))"
_LINEAR = "self.up = nn.Linear({d}, {d})"

_SQUARE = """
class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad
"""

_PRESERVED = """
class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2
"""

BLOCKS: dict[str, Block] = {
    "mlp of tokens": Block((16, 32, 32), _MLP, _MLP_FORWARD),
    "mlp of rows": Block((512, 32), _MLP, _MLP_FORWARD),
    "sequential": Block(
        (512, 32),
        "self.net = nn.Sequential(nn.Linear({d}, 4 * {d}), nn.Tanh(), nn.Dropout(0.1), nn.Linear(4 * {d}, {d}))",
        "x = x + self.net(x)",
    ),
    "functional activations": Block(
        (16, 32, 32),
        _MLP,
        "x = x + self.down(torch.nn.functional.gelu(self.up(x)))",
    ),
    "activations in place": Block(
        (512, 32),
        "self.up = nn.Linear({d}, 4 * {d})\nself.act = nn.ReLU(inplace=True)\nself.down = nn.Linear(4 * {d}, {d})",
        "x = self.down(self.act(self.up(x)))\nx += 1\nx.mul_(0.5)",
    ),
    "norms": Block(
        (16, 32, 32),
        "self.norm = nn.LayerNorm({d})\n" + _MLP,
        "x = x + self.down(self.act(self.up(self.norm(x))))",
    ),
    "convolutions": Block(
        (8, 8, 16, 16),
        "self.conv = nn.Conv2d(8, 8, 3, padding=1)\nself.norm = nn.BatchNorm2d(8)\nself.act = nn.ReLU(inplace=True)",
        "x = self.act(self.norm(self.conv(x))) + x",
    ),
    "channels last": Block(
        (8, 8, 16, 16),
        "self.conv = nn.Conv2d(8, 8, 3, padding=1)\nself.norm = nn.BatchNorm2d(8)",
        "x = torch.relu(self.norm(self.conv(x))) + x",
        sample="torch.randn({shape}).to(memory_format=torch.channels_last)",
    ),
    "convolutions of sequences": Block(
        (16, 8, 128),
        "self.conv = nn.Conv1d(8, 8, 3, padding=1)\nself.norm = nn.GroupNorm(2, 8)",
        "x = x + nn.functional.silu(self.norm(self.conv(x)))",
    ),
    "convolutions of volumes": Block(
        (2, 4, 8, 8, 16),
        "self.conv = nn.Conv3d(4, 4, 3, padding=1)\nself.act = nn.LeakyReLU(0.1)",
        "x = x + self.act(self.conv(x))",
    ),
    "pooling": Block(
        (8, 8, 16, 16),
        "self.conv = nn.Conv2d(8, 8, 3, padding=1)\nself.pool = nn.MaxPool2d(2)\nself.up = nn.Upsample(scale_factor=2)",
        "x = x + self.up(self.pool(self.conv(x)))",
    ),
    "attention": Block(
        (8, 32, 32),
        "self.att = nn.MultiheadAttention({d}, 4, batch_first=True)\n" + _MLP,
        "x = x + self.att(x, x, x, need_weights=False)[0]\n" + _MLP_FORWARD,
    ),
    "attention by hand": Block(
        (8, 32, 32),
        "self.qkv = nn.Linear({d}, 3 * {d})",
        "q, k, v = self.qkv(x).chunk(3, -1)\n"
        "x = x + (q @ k.transpose(-2, -1)).mul(0.2).softmax(-1) @ v",
    ),
    "encoder layers": Block(
        (8, 32, 32),
        "self.layer = nn.TransformerEncoderLayer({d}, 4, 4 * {d}, batch_first=True)",
        "x = self.layer(x)",
    ),
    "scaled dot products": Block(
        (8, 32, 32),
        "self.qkv = nn.Linear({d}, 3 * {d})",
        "q, k, v = (one.unflatten(-1, (4, -1)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))\n"
        "x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)",
    ),
    "lstm": Block(
        (16, 12, 32),
        "self.rnn = nn.LSTM({d}, {d}, batch_first=True)",
        "x = x + self.rnn(x)[0]",
    ),
    "packed sequences": Block(
        (16, 12, 32),
        "self.rnn = nn.GRU({d}, {d}, batch_first=True)",
        "packed = pack_padded_sequence(x, [12] * 8 + [7] * 8, batch_first=True)\n"
        "x = x + pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=12)[0]",
        before="from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence",
    ),
    "cells": Block(
        (64, 6, 32),
        "self.cell = nn.GRUCell({d}, {d})",
        "h = x[:, 0]\nouts = []\nfor t in range(x.shape[1]):\n    h = self.cell(x[:, t], h)\n    outs.append(h)\n"
        "x = torch.stack(outs, 1)",
    ),
    "complex": Block(
        (64, 8, 32),
        "self.filter = nn.Parameter(torch.ones({d} // 2 + 1, dtype=torch.complex64))\n" + _LINEAR,
        "x = self.up(torch.fft.irfft(torch.fft.rfft(x.float()) * self.filter, n={d}).to(x.dtype)).tanh()",
    ),
    "own function": Block(
        (512, 32), _LINEAR, "x = x + Square.apply(self.up(x)).sigmoid()", before=_SQUARE
    ),
    "checkpoints of its own": Block(
        (16, 32, 32),
        _MLP,
        "x = checkpoint(lambda y: y + self.down(self.act(self.up(y))), x, use_reentrant=False)",
        before="from torch.utils.checkpoint import checkpoint",
    ),
    "reentrant checkpoints": Block(
        (16, 32, 32),
        _MLP,
        "x = checkpoint(lambda y: y + self.down(self.act(self.up(y))), x, use_reentrant=True)",
        sample="torch.randn({shape}).requires_grad_()",
        before="from torch.utils.checkpoint import checkpoint",
    ),
    "weight norm": Block(
        (512, 32),
        "self.up = nn.utils.parametrizations.weight_norm(nn.Linear({d}, {d}))\nself.act = nn.ELU()",
        "x = x + self.act(self.up(x))",
    ),
    "spectral norm": Block(
        (512, 32),
        "self.up = nn.utils.parametrizations.spectral_norm(nn.Linear({d}, {d}))",
        "x = x + torch.sigmoid(self.up(x))",
    ),
    "parametrization": Block(
        (512, 32),
        "self.up = nn.Linear({d}, {d})\nnn.utils.parametrize.register_parametrization(self.up, 'weight', Doubled())",
        "x = x + torch.tanh(self.up(x))",
        before=_PRESERVED,
    ),
    "views": Block(
        (16, 32, 32),
        _MLP + "\nself.mix = nn.Linear(32, 32)",
        "x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)\nx[:, 0].mul_(0.5)\n"
        "x = self.down(self.act(self.up(x.reshape(-1, {d})))).view_as(x)",
    ),
    "expanded": Block(
        (64, 8, 32),
        _MLP,
        "mean = x.mean(1, keepdim=True).expand_as(x)\nx = x + self.down(self.act(self.up(mean)))",
    ),
    "masks": Block(
        (512, 32),
        "self.a = nn.Linear({d}, {d})\nself.b = nn.Linear({d}, {d})",
        "keep = x[:, 0] > 0\ny = torch.zeros_like(x)\ny[keep] = self.a(x[keep]).relu().to(x.dtype)\n"
        "y[~keep] = self.b(x[~keep]).tanh().to(x.dtype)\nx = x + y",
    ),
    "empty parts": Block(
        (512, 32),
        _MLP,
        "x = torch.cat([self.down(self.act(self.up(part))) for part in (x[:0], x)])",
    ),
    "scalars": Block(
        (512, 32),
        "self.scale = nn.Parameter(torch.tensor(0.5))\nself.shift = nn.Parameter(torch.zeros(1))\n"
        + _LINEAR,
        "x = x * self.scale + self.shift + (self.up(x).exp() + 1).log() * x.mean()",
    ),
    "half within": Block(
        (512, 32),
        "self.up = nn.Linear({d}, 4 * {d}).bfloat16()\nself.down = nn.Linear(4 * {d}, {d}).bfloat16()",
        "x = x + self.down(torch.relu(self.up(x.bfloat16()))).to(x.dtype)",
    ),
    "noise": Block(
        (512, 32),
        _LINEAR + "\nself.drop = nn.Dropout(0.2)",
        "x = x + self.drop(self.up(x)) * torch.rand_like(x) + 0.01 * torch.randn(())",
    ),
    "buffers": Block(
        (512, 32),
        _LINEAR + "\nself.register_buffer('mean', torch.zeros({d}))",
        "if self.training:\n    self.mean.lerp_(x.detach().float().mean(0), 0.1)\nx = x + torch.tanh(self.up(x - self.mean))",
    ),
    "lists of its own": Block(
        (512, 32),
        _LINEAR + "\nself.seen = []\nself.calls = 0",
        "self.calls += 1\nself.seen.append(tuple(x.shape))\nx = x + torch.tanh(self.up(x)) * (1 + self.calls % 2)",
    ),
    AT_RANDOM: Block(
        (512, 32),
        _LINEAR,
        "if torch.rand(()) < 0.5:\n    x = x + torch.tanh(self.up(x))\nelse:\n    x = x * 1.0",
    ),
    "bilinear": Block(
        (128, 16),
        "self.mix = nn.Bilinear({d}, {d}, {d})",
        "x = x + self.mix(x, x.flip(0)).tanh()",
    ),
    "products of einsum": Block(
        (8, 4, 16, 16),
        "self.weight = nn.Parameter(torch.randn(4, 16, 16) * 0.1)",
        "x = x + torch.einsum('bhij,hjk->bhik', x, self.weight).softmax(-1)",
    ),
    "embeddings": Block(
        (32, 16, 32),
        "self.table = nn.Embedding(64, {d}, sparse=True)\n" + _LINEAR,
        "x = x + self.up(self.table((x[..., 0].abs() * 16).long() % 64)).relu()",
        sparse=True,
    ),
}
"""By what is special about them."""
