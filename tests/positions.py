"""Attention modules in the layouts of models with relative positions, their tensors written out.

Each has the attributes, parameters and arguments of the model that it stands for, and no more. The
last ones are plain attention, which no rule may mistake for the others.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attention.reference import published_ids

METHODS = {0: "euclidean", 1: "quantization", 3: "product", 4: "cross", 41: "cross", 42: "cross"}


def window_index(height: int, width: int, with_class: bool = False) -> Tensor:
    """The index of a bias table for each pair of places in a window, (L, L)."""
    down, right = torch.arange(height), torch.arange(width)
    rows, columns = down.repeat_interleave(width), right.repeat(height)
    index = (rows[:, None] - rows + height - 1) * (2 * width - 1)
    index = index + columns[:, None] - columns + width - 1
    if not with_class:
        return index
    number = (2 * height - 1) * (2 * width - 1)
    padded = torch.full((height * width + 1,) * 2, number + 2)
    padded[1:, 1:], padded[0, 1:], padded[1:, 0] = index, number, number + 1
    return padded


class Encoding(nn.Module):
    """iRPE's: a table, and the gathers and products that it takes part in."""

    def __init__(
        self, head_dim: int, heads: int, mode: str, method: int, transposed: bool, skip: int
    ) -> None:
        super().__init__()
        self.head_dim, self.num_heads, self.mode = head_dim, heads, mode
        self.method, self.transposed = method, transposed
        side = 2 * int(2 * 1.9) + 1
        self.num_buckets = (side * side if method == 3 else side) + (skip > 0)
        self.rpe_config = SimpleNamespace(alpha=1.9, beta=3.8, gamma=15.2, method=method)
        shape = [head_dim, self.num_buckets] if transposed else [self.num_buckets, head_dim]
        if mode == "bias":
            self.lookup_table_bias = nn.Parameter(torch.zeros(heads, self.num_buckets))
        else:
            self.lookup_table_weight = nn.Parameter(torch.zeros(heads, *shape))

    def forward(self, x: Tensor, height: int | None = None, width: int | None = None) -> Tensor:
        length = x.shape[2]
        side = int(length**0.5)
        height, width = height or side, width or side
        ids = published_ids(METHODS[self.method], height, width, length - height * width, 1.9)
        if self.method > 40:
            ids = ids[self.method - 41]
        if self.mode == "bias":
            return self.lookup_table_bias[:, ids.flatten()].view(1, -1, length, length)
        table = self.lookup_table_weight
        if self.transposed:
            flat = (ids + torch.arange(length)[:, None] * self.num_buckets).flatten()
            return (x @ table).flatten(2)[:, :, flat].view(*x.shape[:2], length, length)
        written_out = table[:, ids.flatten()].view(-1, length, length, self.head_dim)
        return torch.matmul(x.permute(1, 2, 0, 3), written_out).permute(2, 0, 1, 3)


class CrossEncoding(nn.Module):
    """iRPE's of the cross method."""

    def __init__(self, head_dim: int, heads: int, mode: str, transposed: bool, skip: int) -> None:
        super().__init__()
        self.method = 4
        self.rp_rows = Encoding(head_dim, heads, mode, 41, transposed, skip)
        self.rp_cols = Encoding(head_dim, heads, mode, 42, transposed, skip)

    def forward(self, x: Tensor, height: int | None = None, width: int | None = None) -> Tensor:
        rows: Tensor = self.rp_rows(x, height, width)
        columns: Tensor = self.rp_cols(x, height, width)
        return rows + columns


class Packed(nn.Module):
    """Queries, keys and values of one layer."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.scale = (dim // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return qkv[0], qkv[1], qkv[2]

    def merged(self, out: Tensor) -> Tensor:
        merged: Tensor = self.proj(out.transpose(1, 2).flatten(2))
        return merged


class RPEAttention(Packed):
    """iRPE's attention in DeiT."""

    def __init__(
        self,
        dim: int = 32,
        heads: int = 2,
        on: str = "qkv",
        method: int = 3,
        mode: str = "contextual",
        skip: int = 1,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(dim, heads)
        self.attn_drop = nn.Dropout(dropout)
        made = {
            letter: CrossEncoding(dim // heads, heads, mode, letter != "v", skip)
            if method == 4
            else Encoding(dim // heads, heads, mode, method, letter != "v", skip)
            for letter in on
        }
        self.rpe_q, self.rpe_k, self.rpe_v = (made.get(letter) for letter in "qkv")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        q = q * self.scale
        scores = q @ k.transpose(-2, -1)
        if self.rpe_k is not None:
            scores = scores + self.rpe_k(q)
        if self.rpe_q is not None:
            scores = scores + self.rpe_q(k * self.scale).transpose(2, 3)
        weights = self.attn_drop(scores.softmax(-1))
        out = weights @ v
        if self.rpe_v is not None:
            out = out + self.rpe_v(weights)
        return self.merged(out)


class WindowAttention(Packed):
    """Swin's, over windows that lie along the batch."""

    def __init__(self, dim: int = 32, heads: int = 2, window: tuple[int, int] = (7, 7)) -> None:
        super().__init__(dim, heads)
        self.window_size = window
        number = (2 * window[0] - 1) * (2 * window[1] - 1)
        self.relative_position_bias_table = nn.Parameter(torch.zeros(number, heads))
        self.register_buffer("relative_position_index", window_index(*window), persistent=False)

    def bias(self) -> Tensor:
        found = self.relative_position_bias_table[self.relative_position_index.view(-1)]
        return found.view(*self.relative_position_index.shape, -1).permute(2, 0, 1).contiguous()

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.split(x)
        scores = (q * self.scale) @ k.transpose(-2, -1) + self.bias()
        if mask is not None:
            by_window = scores.view(-1, mask.shape[0], *scores.shape[1:]) + mask[:, None]
            scores = by_window.view(scores.shape)
        return self.merged(scores.softmax(-1) @ v)


class ShiftedWindowAttention(WindowAttention):
    """torchvision's, which takes images (B, height, width, C) apart itself."""

    def __init__(
        self, dim: int = 32, heads: int = 2, window: tuple[int, int] = (4, 5), shift: int = 2
    ) -> None:
        super().__init__(dim, heads, window)
        self.window_size, self.shift_size = list(window), [shift, shift]
        self.attention_dropout = self.dropout = 0.0

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, dim = x.shape
        (down, right), shift = self.window_size, list(self.shift_size)
        rows, columns = -(-height // down), -(-width // right)
        x = F.pad(x, (0, 0, 0, columns * right - width, 0, rows * down - height))
        for axis, count in enumerate((rows, columns)):
            if count == 1:
                shift[axis] = 0
        x = torch.roll(x, (-shift[0], -shift[1]), (1, 2))
        region = torch.zeros(rows * down, columns * right)
        cuts = [
            (0, -size, -by if by else None) for size, by in zip((down, right), shift, strict=True)
        ]
        for i, top in enumerate(cuts[0]):
            for j, left in enumerate(cuts[1]):
                bottom, end = (*cuts[0][1:], None)[i], (*cuts[1][1:], None)[j]
                region[slice(top, bottom), slice(left, end)] = 3 * i + j
        places = self.cut(region[None, ..., None])[..., 0]
        mask = (places[:, None] != places[:, :, None]) * -100.0
        out = super().forward(self.cut(x), mask if any(shift) else None)
        out = out.view(batch, rows, columns, down, right, dim).transpose(2, 3)
        out = torch.roll(out.reshape(x.shape), shift, (1, 2))
        return out[:, :height, :width].contiguous()

    def cut(self, x: Tensor) -> Tensor:
        down, right = self.window_size
        x = x.view(len(x), x.shape[1] // down, down, x.shape[2] // right, right, -1)
        return x.transpose(2, 3).reshape(-1, down * right, x.shape[-1])


class BeitAttention(WindowAttention):
    """BEiT's: a class token, biases of queries and values, torch's own attention with a bias."""

    def __init__(self, dim: int = 32, heads: int = 2, window: tuple[int, int] = (8, 8)) -> None:
        super().__init__(dim, heads, window)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.q_bias, self.v_bias = (nn.Parameter(torch.zeros(dim)) for _ in range(2))
        number = (2 * window[0] - 1) * (2 * window[1] - 1) + 3
        self.relative_position_bias_table = nn.Parameter(torch.zeros(number, heads))
        index = window_index(*window, with_class=True)
        self.register_buffer("relative_position_index", index, persistent=False)

    def forward(self, x: Tensor, rel_pos_bias: Tensor | None = None) -> Tensor:
        bias = torch.cat([self.q_bias, torch.zeros_like(self.v_bias), self.v_bias])
        qkv = F.linear(x, self.qkv.weight, bias).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        added = self.bias()[None]
        if rel_pos_bias is not None:
            added = added + rel_pos_bias
        return self.merged(F.scaled_dot_product_attention(q, k, v, attn_mask=added))


class DecomposedAttention(Packed):
    """SAM's and ViTDet's, over (B, height, width, C)."""

    def __init__(
        self, dim: int = 32, heads: int = 2, grid: tuple[int, int] = (10, 12), fused: bool = False
    ) -> None:
        super().__init__(dim, heads)
        self.use_rel_pos, self.fused = True, fused
        self.rel_pos_h, self.rel_pos_w = (
            nn.Parameter(torch.zeros(2 * n - 1, dim // heads)) for n in grid
        )

    @staticmethod
    def table(parameter: Tensor, size: int) -> Tensor:
        place = torch.arange(size)
        return parameter[place[:, None] - place[None] + size - 1]

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, dim = x.shape
        q, k, v = (one.flatten(0, 1) for one in self.split(x.view(batch, -1, dim)))
        grid = q.unflatten(1, (height, width))
        down = torch.einsum("bhwc,hkc->bhwk", grid, self.table(self.rel_pos_h, height))
        right = torch.einsum("bhwc,wkc->bhwk", grid, self.table(self.rel_pos_w, width))
        added = down[..., :, None] + right[..., None, :]
        if self.fused:
            full = added.reshape(batch, self.num_heads, height * width, height * width)
            heads = [one.view(batch, self.num_heads, height * width, -1) for one in (q, k, v)]
            out = F.scaled_dot_product_attention(*heads, attn_mask=full)
        else:
            scores = ((q * self.scale) @ k.transpose(-2, -1)).view(-1, height, width, height, width)
            weights = (scores + added).view(len(q), height * width, -1).softmax(-1)
            out = (weights @ v).view(batch, self.num_heads, height * width, -1)
        return self.merged(out).view(batch, height, width, -1)


class RelativePosition(nn.Module):
    """AutoFormer's tables for rows and columns behind one class token."""

    def __init__(self, num_units: int, furthest: int) -> None:
        super().__init__()
        self.num_units, self.max_relative_position = num_units, furthest
        self.embeddings_table_v, self.embeddings_table_h = (
            nn.Parameter(torch.zeros(2 * furthest + 2, num_units)) for _ in range(2)
        )

    def forward(self, length: int) -> Tensor:
        side = int((length - 1) ** 0.5)
        place, most = torch.arange(length - 1), self.max_relative_position
        total = torch.zeros(())
        for table, own in (
            (self.embeddings_table_v, place // side),
            (self.embeddings_table_h, place % side),
        ):
            distance = (own[None] - own[:, None]).clamp(-most, most) + most + 1
            total = total + table[F.pad(distance, (1, 0, 1, 0))]
        return total


class AutoFormerAttention(Packed):
    """AutoFormer's, on keys and values."""

    def __init__(self, dim: int = 32, heads: int = 2, furthest: int = 3) -> None:
        super().__init__(dim, heads)
        self.rel_pos_embed_k = RelativePosition(dim // heads, furthest)
        self.rel_pos_embed_v = RelativePosition(dim // heads, furthest)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        batch, heads, length, dim = q.shape
        scores = (q @ k.transpose(-2, -1)) * self.scale
        on_keys, on_values = self.rel_pos_embed_k(length), self.rel_pos_embed_v(length)
        flat = q.permute(2, 0, 1, 3).reshape(length, batch * heads, dim)
        more = (flat @ on_keys.transpose(2, 1)).transpose(1, 0).reshape(scores.shape)
        weights = (scores + more * self.scale).softmax(-1)
        flat = weights.permute(2, 0, 1, 3).reshape(length, batch * heads, length)
        more = (flat @ on_values).transpose(1, 0).reshape(batch, heads, length, dim)
        return self.merged(weights @ v + more)


class T5Attention(nn.Module):
    """T5's, whose bias later layers are given."""

    def __init__(self, dim: int = 32, heads: int = 2, has_bias: bool = True) -> None:
        super().__init__()
        self.n_heads, self.key_value_proj_dim, self.is_decoder = heads, dim // heads, False
        self.has_relative_attention_bias = has_bias
        self.relative_attention_num_buckets, self.relative_attention_max_distance = 32, 128
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.dropout = 0.0
        if has_bias:
            self.relative_attention_bias = nn.Embedding(32, heads)

    def compute_bias(self, length: int) -> Tensor:
        ahead = torch.arange(length)[None] - torch.arange(length)[:, None]
        size = ahead.abs()
        far = 8 + (torch.log(size.clamp(min=1) / 8) / torch.log(torch.tensor(16.0)) * 8).long()
        ids = (ahead > 0) * 16 + torch.where(size < 8, size, far.clamp(max=15))
        return self.relative_attention_bias(ids).permute(2, 0, 1)[None]

    def forward(
        self, hidden_states: Tensor, mask: Tensor | None = None, position_bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        shape = (*hidden_states.shape[:-1], self.n_heads, self.key_value_proj_dim)
        q, k, v = (
            one(hidden_states).view(shape).transpose(1, 2) for one in (self.q, self.k, self.v)
        )
        if position_bias is None:
            position_bias = self.compute_bias(hidden_states.shape[1])
        scores = q @ k.transpose(3, 2) + position_bias
        if mask is not None:
            scores = scores + mask
        out = scores.softmax(-1) @ v
        return self.o(out.transpose(1, 2).flatten(2)), position_bias


class T5Stack(nn.Module):
    """T5's blocks, the first of which has the table."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 32)
        self.block = nn.ModuleList(nn.Module() for _ in range(layers))
        for number, block in enumerate(self.block):
            block.SelfAttention = T5Attention(has_bias=not number)

    def forward(self, ids: Tensor) -> Tensor:
        x, bias = self.embed(ids), None
        for block in self.block:
            out, bias = block.SelfAttention(x, position_bias=bias)
            x = x + out
        return x


class Net(nn.Module):
    """One attention behind an embedding, its parameters not zeros."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.embed, self.attn = nn.Embedding(11, 32), attention
        with torch.no_grad():
            for parameter in attention.parameters():
                parameter.normal_(std=0.2)

    def forward(self, ids: Tensor) -> Tensor:
        out = self.attn(self.embed(ids))
        return out[0] if isinstance(out, tuple) else out


SLOW: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "irpe": (lambda: RPEAttention(), (2, 65)),
    "irpe on keys": (lambda: RPEAttention(on="k"), (2, 65)),
    "irpe bias": (lambda: RPEAttention(on="qk", mode="bias"), (2, 65)),
    "irpe cross": (lambda: RPEAttention(method=4), (2, 65)),
    "irpe euclidean": (lambda: RPEAttention(method=0, skip=0), (2, 64)),
    "irpe quantization": (lambda: RPEAttention(method=1), (2, 65)),
    "swin": (lambda: WindowAttention(), (8, 49)),
    "torchvision": (lambda: ShiftedWindowAttention(), (2, 11, 9)),
    "beit": (lambda: BeitAttention(), (2, 65)),
    "sam": (lambda: DecomposedAttention(), (2, 10, 12)),
    "sam fused": (lambda: DecomposedAttention(fused=True), (2, 10, 12)),
    "autoformer": (lambda: AutoFormerAttention(), (2, 65)),
    "t5": (lambda: T5Attention(), (2, 80)),
}
"""Slow forms by name: how each is made, and the shape of the tokens that it takes in a `Net`."""
PLAIN = [
    f"{way} {mask}".strip() for way in ("", "sdpa") for mask in ("", "causal", "padding", "alibi")
]


def tokens(shape: tuple[int, ...]) -> Tensor:
    """Ids for a `Net`."""
    return torch.randint(11, shape, generator=torch.Generator().manual_seed(0))


class PlainAttention(Packed):
    """No positions: causal, with padding, with ALiBi, or none of them; by hand or by torch."""

    def __init__(self, kind: str = "", dim: int = 32, heads: int = 2) -> None:
        super().__init__(dim, heads)
        self.kind = kind

    def mask(self, x: Tensor) -> Tensor | None:
        length = x.shape[1]
        own = torch.arange(length)
        if "causal" in self.kind:
            return torch.full((length, length), float("-inf")).triu(1)
        if "padding" in self.kind:
            allowed = torch.ones(x.shape[:2], dtype=torch.bool)
            allowed[:, -3:] = False
            seen = allowed[torch.arange(len(x))[:, None, None, None], own[None, None, None, :]]
            return torch.where(seen, 0.0, -1e9).expand(len(x), 1, length, length).contiguous()
        if "alibi" in self.kind:
            slopes = torch.tensor([2.0**-h for h in range(1, self.num_heads + 1)])
            return -(own[:, None] - own).abs() * slopes[:, None, None]
        return None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        mask = self.mask(x)
        if "sdpa" in self.kind:
            return self.merged(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
        scores = (q * self.scale) @ k.transpose(-2, -1)
        if mask is not None:
            scores = scores + mask
        return self.merged(scores.softmax(-1) @ v)
