"""Measures alternatives to a model's relative positions, on its shape and on this machine.

Each alternative changes what the model computes (`SEMANTIC`), so the model has to be retrained. Times are
medians over alternating rounds of forward and backward of the attention alone.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from torchtrim.attention.buckets import Buckets
from torchtrim.attention.relative import relative_attention
from torchtrim.errors import UsageError

_LEAST_SECONDS = 0.01  # Long enough that the clock and one call's jitter do not count.
_FEWER_BUCKETS = 1.0  # 5 x 5 buckets; the published ratio of 1.9 has 7 x 7.
_HALVED = 2  # The change is called "2 x 2" and "half" in the advice.
Run = Callable[[], Tensor]


class AttentionShape(NamedTuple):
    """The shape of an attention: batch, heads, image rows and columns, skip tokens, head_dim."""

    batch: int
    heads: int
    height: int
    width: int
    skip: int = 0
    head_dim: int = 64

    @property
    def tokens(self) -> int:
        """The length of the sequence."""
        return self.skip + self.height * self.width


class Advice(NamedTuple):
    """One alternative and its measurements.

    `ms`: forward and backward, with half the interquartile range of the rounds as `spread`. `saved_bytes`:
    bytes that autograd saves. `times_faster` and `times_fewer_bytes` compare with the model's own positions.
    """

    change: str
    ms: float
    spread: float
    times_faster: float
    saved_bytes: int
    times_fewer_bytes: float
    equivalence: Literal["ROUNDING", "SEMANTIC"] = "SEMANTIC"


class _EncodingKind(NamedTuple):
    """Positions: the letters among q, k and v that have them, the method, the ratio, one table for all heads
    or one each, vectors (contextual) or numbers (bias), and the pooling of the grid, if any."""

    rpe_on: str
    method: str
    ratio: float
    shared_head: bool
    mode: Literal["contextual", "bias"] = "contextual"
    pooled: Literal["", "pool", "stride", "stage"] = ""


class _Alternative(NamedTuple):
    change: str
    run: Run
    leaves: list[Tensor]
    equivalence: Literal["ROUNDING", "SEMANTIC"] = "SEMANTIC"


def advise(
    batch: int,
    heads: int,
    tokens: int | None = None,
    *,
    height: int | None = None,
    width: int | None = None,
    skip: int = 0,
    head_dim: int = 64,
    rpe_on: str = "qkv",
    method: str = "product",
    ratio: float = 1.9,
    shared_head: bool = False,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    rounds: int = 5,
) -> list[Advice]:
    """Measure alternatives to the given relative positions on one shape.

    The first entry is the given attention, run by `relative_attention`. Others pool or stride before it,
    halve the resolution of the stage, drop encodings, use another method, a bias, shared heads, fewer
    buckets, or no positions. Alternatives that change nothing here are omitted.

    Args:
        batch, heads, head_dim: sizes of q, (B, H, L, D).
        tokens: the length L. The grid is the largest square that fits, the rest are skip tokens. For
            other grids, pass `height` and `width` (and `skip`) instead.
        rpe_on, method, ratio, shared_head: the current positions, as in `get_rpe_config`.
        device, dtype: device and type of the measurement.
        rounds: each round measures all entries once, in alternating order.

    Raises:
        UsageError: the numbers do not describe an attention.
    """
    shape = _shape(batch, heads, tokens, height, width, skip, head_dim)
    if rounds < 1 or not rpe_on or not set(rpe_on) <= set("qkv"):
        raise UsageError(
            f"rounds is {rounds} and rpe_on {rpe_on!r}. Pass at least one round, and letters among "
            "q, k and v."
        )
    kind = _EncodingKind(rpe_on, method, ratio, shared_head)
    ways = list(_alternatives(shape, kind, torch.empty(0, device=device, dtype=dtype)))
    times = _timed(ways, rounds)
    saved = [_saved(way) for way in ways]
    return [
        Advice(
            way.change,
            round(statistics.median(own) * 1e3, 4),
            round(_half_width(own) * 1e3, 4),
            round(statistics.median([a / b for a, b in zip(times[0], own, strict=True)]), 2),
            kept,
            round(saved[0] / max(kept, 1), 2),
            way.equivalence,
        )
        for way, own, kept in zip(ways, times, saved, strict=True)
    ]


def _shape(
    batch: int,
    heads: int,
    tokens: int | None,
    height: int | None,
    width: int | None,
    skip: int,
    head_dim: int,
) -> AttentionShape:
    if (height is None) != (width is None) or (height is None) == (tokens is None):
        raise UsageError(
            f"tokens is {tokens}, height {height}, width {width}. Pass either the number of tokens, or the "
            "height and width of the grid."
        )
    if tokens is not None:
        height = width = math.isqrt(max(tokens, 0))
        skip = tokens - height * width
    assert height is not None
    assert width is not None
    shape = AttentionShape(batch, heads, height, width, skip, head_dim)
    if min(batch, heads, height, width, head_dim) < 1 or skip < 0:
        raise UsageError(
            f"{shape} is invalid: skip must be at least 0, all other numbers at least 1."
        )
    return shape


def _alternatives(
    shape: AttentionShape, kind: _EncodingKind, like: Tensor
) -> Iterator[_Alternative]:
    yield _alternative("unchanged", shape, kind, like)._replace(equivalence="ROUNDING")
    for change, other in _changed(shape, kind):
        yield _alternative(change, shape, other, like)
    q, k, v = _tokens(shape, like)
    yield _Alternative("no positions", lambda: F.scaled_dot_product_attention(q, k, v), [q, k, v])


def _changed(shape: AttentionShape, kind: _EncodingKind) -> Iterator[tuple[str, _EncodingKind]]:
    if min(shape.height, shape.width) >= 2 * _HALVED:
        yield "average 2 x 2 tokens before, repeat after", kind._replace(pooled="pool")
        yield "take every second row and column, repeat after", kind._replace(pooled="stride")
        yield "half the resolution in this stage", kind._replace(pooled="stage")
    if "v" in kind.rpe_on and len(kind.rpe_on) > 1:
        on = kind.rpe_on.replace("v", "")
        yield f"positions on {' and '.join(on)}, not on v", kind._replace(rpe_on=on)
    if kind.rpe_on != "k":
        yield "positions on k alone", kind._replace(rpe_on="k")
    if kind.method != "cross":
        yield "cross instead of " + kind.method, kind._replace(method="cross")
    if kind.mode == "contextual":
        yield "a bias instead of vectors", kind._replace(mode="bias", rpe_on="k")
    if not kind.shared_head and shape.heads > 1:
        yield "one table for all heads", kind._replace(shared_head=True)
    if kind.ratio > _FEWER_BUCKETS:
        yield f"fewer buckets (ratio {_FEWER_BUCKETS:g})", kind._replace(ratio=_FEWER_BUCKETS)


def _tokens(shape: AttentionShape, like: Tensor) -> list[Tensor]:
    full = (shape.batch, shape.heads, shape.tokens, shape.head_dim)
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(full, generator=generator).to(like).requires_grad_() for _ in range(3)]


def _alternative(
    change: str, shape: AttentionShape, kind: _EncodingKind, like: Tensor
) -> _Alternative:
    inner = shape
    if kind.pooled:
        rows, columns = (-(-size // _HALVED) for size in (shape.height, shape.width))
        inner = shape._replace(height=rows, width=columns)
    tokens = _tokens(inner if kind.pooled == "stage" else shape, like)
    buckets = Buckets.of_ratio(
        kind.method, inner.height, inner.width, skip=inner.skip, ratio=kind.ratio
    )
    tables = _tables(kind, inner, buckets, like)

    def run() -> Tensor:
        q, k, v = tokens
        if kind.pooled in ("pool", "stride"):
            q, k, v = (_halved(x, shape, kind.pooled) for x in tokens)
        out = relative_attention(q, k, v, buckets=buckets, **tables)
        return _repeated(out, shape) if kind.pooled in ("pool", "stride") else out

    flat = [x for one in tables.values() for x in (one if isinstance(one, tuple) else (one,))]
    return _Alternative(change, run, [*tokens, *flat])


def _tables(
    kind: _EncodingKind, shape: AttentionShape, buckets: Buckets, like: Tensor
) -> dict[str, Any]:
    heads, dim, number = 1 if kind.shared_head else shape.heads, shape.head_dim, buckets.number
    generator = torch.Generator().manual_seed(1)

    def table(*sizes: int) -> Tensor | tuple[Tensor, Tensor]:
        one, other = (
            (0.1 * torch.randn(heads, *sizes, generator=generator)).to(like).requires_grad_()
            for _ in range(2)
        )
        return (one, other) if kind.method == "cross" else one

    if kind.mode == "bias":
        return {"bias": table(number)}
    shapes = {"q": (dim, number), "k": (dim, number), "v": (number, dim)}
    return {f"{letter}_table": table(*shapes[letter]) for letter in "qkv" if letter in kind.rpe_on}


def _halved(x: Tensor, shape: AttentionShape, how: str) -> Tensor:
    """Halve the rows and columns of the grid, and keep the skip tokens."""
    grid = torch.unflatten(x[:, :, shape.skip :], 2, (shape.height, shape.width))
    if how == "stride":
        small = grid[:, :, ::_HALVED, ::_HALVED].flatten(2, 3)
    else:
        images = grid.flatten(0, 1).permute(0, 3, 1, 2)
        pooled = F.avg_pool2d(images, _HALVED, ceil_mode=True)
        small = torch.unflatten(pooled.flatten(2).transpose(1, 2), 0, x.shape[:2])
    return torch.cat([x[:, :, : shape.skip], small], 2)


def _repeated(x: Tensor, shape: AttentionShape) -> Tensor:
    """Repeat every token of the halved grid in four places."""
    height, width = (-(-size // _HALVED) for size in (shape.height, shape.width))
    grid = torch.unflatten(x[:, :, shape.skip :], 2, (height, width))
    full = grid.repeat_interleave(_HALVED, 2).repeat_interleave(_HALVED, 3)
    full = full[:, :, : shape.height, : shape.width].flatten(2, 3)
    return torch.cat([x[:, :, : shape.skip], full], 2)


def _timed(ways: Sequence[_Alternative], rounds: int) -> list[list[float]]:
    """Return the seconds of each alternative in each round; every other round runs in reverse."""
    for way in ways:
        _both(way)
    calls = [max(1, math.ceil(_LEAST_SECONDS / _seconds(way, 1))) for way in ways]
    times: list[list[float]] = [[] for _ in ways]
    numbers = list(range(len(ways)))
    for number in range(rounds):
        for i in numbers if number % 2 == 0 else reversed(numbers):
            times[i].append(_seconds(ways[i], calls[i]))
    return times


def _seconds(way: _Alternative, calls: int) -> float:
    _wait(way)
    begin = time.perf_counter()
    for _ in range(calls):
        _both(way)
    _wait(way)
    return (time.perf_counter() - begin) / calls


def _both(way: _Alternative) -> None:
    out = way.run()
    torch.autograd.grad(out, way.leaves, torch.ones_like(out))


def _wait(way: _Alternative) -> None:
    device = way.leaves[0].device
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _half_width(times: list[float]) -> float:
    if len(times) < 2:
        return 0.0
    first, _, third = statistics.quantiles(times, n=4, method="inclusive")
    return (third - first) / 2


def _saved(way: _Alternative) -> int:
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        way.run()
    return sum(kept.values())
