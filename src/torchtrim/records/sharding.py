"""How a model is sharded over ranks: what a person says of it, and what an estimate finds."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

HalfType = Literal["bfloat16", "float16"]
Ranks = Annotated[int, Meta(ge=1)]


class Sharding(Struct, frozen=True, kw_only=True):
    """What `fully_shard` is to do. `blocks`: patterns of the modules that are sharded one by one, such as
    `"model.layers.*"`; none: those that repeat. `reshard`: free a block's parameters after its forward.
    `compute`: the type in which forward and backward run, empty for the parameters' own; gradients are then
    reduced in float32. `offload`: parameters, gradients and optimizer state are kept on the host.
    """

    blocks: tuple[str, ...] = ()
    reshard: bool = True
    compute: HalfType | Literal[""] = ""
    offload: bool = False


class Sharded(Struct, frozen=True, kw_only=True):
    """A sharded model: over how many ranks, which modules, and the options. The figures are of the rank
    that needs most, the first. `blocks` are empty where the script shards by itself, or not at all.
    """

    ranks: Ranks
    blocks: tuple[str, ...] = ()
    options: Sharding | None = None
