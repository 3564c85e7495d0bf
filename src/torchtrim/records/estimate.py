"""An estimate: what a step would need, by what it is for, and how far it can grow. It was not run."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from torchtrim.records.sharding import Sharded

Bytes = Annotated[int, Meta(ge=0)]


class ModuleBytes(Struct, frozen=True, kw_only=True):
    """Bytes at the peak that belong to a module itself, not to those in it. Empty path: to none."""

    path: str
    bytes: Bytes


class Probed(Struct, frozen=True, kw_only=True):
    """A length at which it was run, and not only estimated. `peak_bytes` is null where it does not run,
    `predicted_bytes` where nothing was predicted."""

    length: int
    predicted_bytes: Bytes | None
    peak_bytes: Bytes | None
    fits: bool


class Growth(Struct, frozen=True, kw_only=True):
    """How far one length of the batch can grow within a budget.

    `now` is the length of the batch that was given. `peak_bytes` is what `largest` needs, null where
    not even a length of 1 fits; `next_bytes` what one more would, null where one more does not run,
    of which `limited_by` is the reason. `tried` is the longest length that was tried; where memory was
    seen to fall as the length grew (`falls`), lengths between `largest` and others that were not tried
    may fit. `unused_bytes` of the budget go to tensors of the process that the step does not use.
    Where there are `probes` all figures are of runs, and `exact` says that one more was run too.
    """

    what: Literal["batch", "sequence"]
    budget_bytes: Bytes
    now: int
    largest: int
    peak_bytes: Bytes | None
    next_bytes: Bytes | None
    limited_by: str = ""
    tried: int = 0
    falls: bool = False
    unused_bytes: Bytes = 0
    probes: tuple[Probed, ...] = ()
    exact: bool = False


class Estimated(Struct, frozen=True, kw_only=True):
    """What only an estimate says. The first three are exact to the byte.

    `unused_bytes`, a part of the peak, is what was alive before the step and is not used in it: tensors
    of the process that are not the workload's.

    `recomputed_bytes` is the smallest peak that recomputation is predicted to reach, `recomputed` the
    places where it would; null and none where it would not help. `sharded`: over how many ranks, and how;
    null for a program that runs alone.
    """

    parameter_bytes: Bytes
    gradient_bytes: Bytes
    optimizer_bytes: Bytes
    modules: tuple[ModuleBytes, ...] = ()
    recomputed_bytes: Bytes | None = None
    recomputed: tuple[str, ...] = ()
    growth: tuple[Growth, ...] = ()
    unused_bytes: Bytes = 0
    sharded: Sharded | None = None
