"""The modules of iRPE, with their published names and `state_dict`.

Wu et al., "Rethinking and Improving Relative Position Encoding for Vision Transformer", ICCV 2021.
Each module holds a table; `RelativeAttention` passes the tables to `relative_attention`. Called directly,
the modules return the same L x L tensors as the published ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchtrim.attention.buckets import Buckets, Coefficients
from torchtrim.errors import UsageError


class METHOD:
    """The published numbers of the methods."""

    EUCLIDEAN = 0
    QUANT = 1
    PRODUCT = 3
    CROSS = 4
    CROSS_ROWS = 41
    CROSS_COLS = 42


NAMED = {
    METHOD.EUCLIDEAN: "euclidean",
    METHOD.QUANT: "quantization",
    METHOD.PRODUCT: "product",
    **dict.fromkeys((METHOD.CROSS, METHOD.CROSS_ROWS, METHOD.CROSS_COLS), "cross"),
}
_ALIASES = {
    "euc": METHOD.EUCLIDEAN,
    "quant": METHOD.QUANT,
    "cross": METHOD.CROSS,
    "product": METHOD.PRODUCT,
}


@dataclass(kw_only=True)
class RPEConfig:
    """The configuration of one encoding, on queries, keys or values."""

    shared_head: bool
    mode: str | None
    method: int
    alpha: float
    beta: float
    gamma: float
    num_buckets: int
    skip: int = 0


@dataclass(kw_only=True)
class RPEConfigs:
    """The configurations on queries, keys and values, each may be None."""

    rpe_q: RPEConfig | None
    rpe_k: RPEConfig | None
    rpe_v: RPEConfig | None


def get_num_buckets(method: int, alpha: float, beta: float, gamma: float) -> int:
    """Return the number of buckets of a method, excluding that of skip tokens."""
    side = 2 * int(beta) + 1
    return side**2 if method == METHOD.PRODUCT else side


def get_single_rpe_config(
    ratio: float = 1.9,
    method: int = METHOD.PRODUCT,
    mode: str | None = "contextual",
    shared_head: bool = True,
    skip: int = 0,
) -> RPEConfig:
    """Return the configuration of one encoding; see `get_rpe_config`."""
    alpha, beta, gamma = Coefficients.of_ratio(ratio)
    return RPEConfig(
        shared_head=shared_head,
        mode=mode,
        method=method,
        alpha=alpha,
        beta=beta,
        gamma=gamma,
        num_buckets=get_num_buckets(method, alpha, beta, gamma) + (skip > 0),
        skip=skip,
    )


def get_rpe_config(
    ratio: float = 1.9,
    method: int | str = METHOD.PRODUCT,
    mode: str | None = "contextual",
    shared_head: bool = True,
    skip: int = 0,
    rpe_on: str = "k",
) -> RPEConfigs:
    """Return the configuration of a model.

    Args:
        ratio: determines the number of buckets; 1.9 gives 49 for product.
        method: a `METHOD`, or euc, quant, cross, product.
        mode: contextual (or ctx), bias, or None.
        shared_head: use one table for all heads.
        skip: number of leading tokens without a position, such as a class token.
        rpe_on: letters among q, k and v.

    Raises:
        UsageError: unknown method, mode or letter.
    """
    number = _ALIASES.get(method.lower(), -1) if isinstance(method, str) else method
    mode = "contextual" if mode == "ctx" else mode
    if number not in _ALIASES.values():
        raise UsageError(f"Unknown method {method!r}. Choose one of {', '.join(_ALIASES)}.")
    if mode not in (None, "bias", "contextual"):
        raise UsageError(f"Unknown mode {mode!r}. Choose contextual, bias or None.")
    if not set(rpe_on) <= set("qkv"):
        raise UsageError(f"rpe_on is {rpe_on!r}; it may only contain the letters q, k and v.")
    one = [
        get_single_rpe_config(ratio, number, mode, shared_head, skip) if letter in rpe_on else None
        for letter in "qkv"
    ]
    return RPEConfigs(rpe_q=one[0], rpe_k=one[1], rpe_v=one[2])


class iRPE(nn.Module):  # noqa: N801
    """The table of one encoding.

    `lookup_table_weight` is (H or 1, head_dim, buckets), or (H or 1, buckets, head_dim) on values
    (`transposed` is false); `lookup_table_bias` is (H or 1, buckets). Both start as zeros.
    """

    def __init__(
        self,
        head_dim: int,
        num_heads: int = 8,
        mode: str | None = None,
        method: int | None = None,
        transposed: bool = True,
        num_buckets: int | None = None,
        initializer: Callable[[Tensor], object] | None = None,
        rpe_config: RPEConfig | None = None,
    ) -> None:
        """Create the table; `num_heads` is 1 if the heads share it."""
        super().__init__()
        if method not in NAMED or num_buckets is None or mode not in (None, "bias", "contextual"):
            raise UsageError(
                f"iRPE got the method {method!r}, the mode {mode!r} and {num_buckets} buckets. "
                "Create it with build_rpe(get_rpe_config(...), head_dim, num_heads)."
            )
        self.head_dim, self.num_heads, self.num_buckets = head_dim, num_heads, num_buckets
        self.mode, self.method, self.transposed = mode, method, transposed
        self.initializer = initializer
        self.rpe_config = rpe_config
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Create the table again, with zeros or by the initializer."""
        if self.mode is None:
            return
        if self.mode == "bias" and not self.transposed:
            raise NotImplementedError(
                "Values cannot have a bias: nothing would multiply it. Use mode='contextual' for values, "
                "or remove v from rpe_on."
            )
        name, shape = "lookup_table_weight", [self.head_dim, self.num_buckets]
        if self.mode == "bias":
            name, shape = "lookup_table_bias", [self.num_buckets]
        elif not self.transposed:
            shape.reverse()
        table = nn.Parameter(torch.zeros(self.num_heads, *shape))
        self.register_parameter(name, table)
        if self.initializer is not None:
            self.initializer(table)

    @property
    def table(self) -> Tensor | None:
        """The table, under either name, or None."""
        if self.mode is None:
            return None
        found = self.lookup_table_bias if self.mode == "bias" else self.lookup_table_weight
        assert isinstance(found, Tensor)
        return found

    def buckets(self, length: int, height: int | None = None, width: int | None = None) -> Buckets:
        """Return the buckets of a sequence. Without height and width, the grid is a square."""
        return buckets_of(self.method, self.rpe_config, length, height, width)

    def forward(self, x: Tensor, height: int | None = None, width: int | None = None) -> Tensor:
        """Return the materialized encoding.

        On queries and keys, x is (B, H, L, head_dim) and the result (B or 1, H or 1, L, L). On values, x has
        the probabilities (B, H, L, L) and the result is (B, H, L, head_dim).
        """
        table = self.table
        if table is None:
            raise UsageError("This iRPE has mode None and encodes nothing. Remove it.")
        ids = self._ids(x, height, width)
        if self.mode == "bias":
            return table[:, ids][None]
        ids = ids.expand(*x.shape[:3], -1)
        if self.transposed:
            return (x @ table).gather(-1, ids)
        sums = x.new_zeros(*x.shape[:3], self.num_buckets)
        return sums.scatter_add(-1, ids, x) @ table

    def _ids(self, x: Tensor, height: int | None, width: int | None) -> Tensor:
        buckets = self.buckets(x.shape[2], height, width)
        ids = buckets.ids()
        if self.method in (METHOD.CROSS_ROWS, METHOD.CROSS_COLS):
            extra, side = buckets.rows * buckets.columns, buckets.columns
            one = ids // side if self.method == METHOD.CROSS_ROWS else ids % side
            ids = torch.where(ids == extra, side, one)
        return ids.to(x.device)

    def extra_repr(self) -> str:
        """Return the arguments for `repr`."""
        return (
            f"head_dim={self.head_dim}, num_heads={self.num_heads}, mode={self.mode!r}, "
            f"method={self.method}, transposed={self.transposed}, num_buckets={self.num_buckets}"
        )


class iRPE_Cross(nn.Module):  # noqa: N801
    """The tables of the cross method: `rp_rows` and `rp_cols`."""

    def __init__(
        self,
        method: int,
        head_dim: int,
        num_heads: int = 8,
        mode: str | None = None,
        transposed: bool = True,
        num_buckets: int | None = None,
        initializer: Callable[[Tensor], object] | None = None,
        rpe_config: RPEConfig | None = None,
    ) -> None:
        """Create both tables; see `iRPE`."""
        super().__init__()
        rest = (transposed, num_buckets, initializer, rpe_config)
        self.method = method
        self.rp_rows = iRPE(head_dim, num_heads, mode, METHOD.CROSS_ROWS, *rest)
        self.rp_cols = iRPE(head_dim, num_heads, mode, METHOD.CROSS_COLS, *rest)

    @property
    def mode(self) -> str | None:
        """The mode of both tables."""
        return self.rp_rows.mode

    @property
    def rpe_config(self) -> RPEConfig | None:
        """The configuration of both tables."""
        return self.rp_rows.rpe_config

    @property
    def table(self) -> tuple[Tensor, Tensor] | None:
        """The tables of rows and columns, or None."""
        rows, columns = self.rp_rows.table, self.rp_cols.table
        return None if rows is None or columns is None else (rows, columns)

    def buckets(self, length: int, height: int | None = None, width: int | None = None) -> Buckets:
        """Return the buckets of a sequence; see `iRPE.buckets`."""
        return self.rp_rows.buckets(length, height, width)

    def forward(self, x: Tensor, height: int | None = None, width: int | None = None) -> Tensor:
        """Return the materialized sum of both encodings."""
        rows: Tensor = self.rp_rows(x, height, width)
        columns: Tensor = self.rp_cols(x, height, width)
        return rows + columns


Encoding = iRPE | iRPE_Cross


def build_rpe(
    config: RPEConfigs | None, head_dim: int, num_heads: int
) -> tuple[Encoding | None, Encoding | None, Encoding | None]:
    """Return the modules on queries, keys and values, each or None."""
    if config is None:
        return None, None, None

    def one(rpe: RPEConfig | None, transposed: bool) -> Encoding | None:
        if rpe is None:
            return None
        heads = 1 if rpe.shared_head else num_heads
        rest = (transposed, rpe.num_buckets, None, rpe)
        if rpe.method == METHOD.CROSS:
            return iRPE_Cross(METHOD.CROSS, head_dim, heads, rpe.mode, *rest)
        return iRPE(head_dim, heads, rpe.mode, rpe.method, *rest)

    return one(config.rpe_q, True), one(config.rpe_k, True), one(config.rpe_v, False)


def buckets_of(
    method: int | None,
    config: RPEConfig | None,
    length: int,
    height: int | None = None,
    width: int | None = None,
) -> Buckets:
    """Return the buckets of a sequence of `length` tokens; its grid is a square unless given."""
    skip = config.skip if config is not None else 0
    if height is None or width is None:
        height = width = math.isqrt(max(length - skip, 0))
    surplus = length - height * width
    if surplus < 0 or (config is not None and surplus != skip):
        raise UsageError(
            f"{length} tokens do not match {skip} skip tokens and a grid of {height} x {width}. "
            "Pass the height and width of this input, and the number of tokens without a position as "
            "skip to get_rpe_config."
        )
    if method not in NAMED:
        raise UsageError(f"Unknown method {method!r}. Choose one of METHOD.")
    return Buckets(NAMED[method], height, width, surplus, "piecewise", coefficients_of(config))


def coefficients_of(config: RPEConfig | None) -> Coefficients:
    """Return the coefficients of a configuration, by default the published ones."""
    if config is None:
        return Coefficients.of_ratio(1.9)
    return Coefficients(config.alpha, config.beta, config.gamma)
