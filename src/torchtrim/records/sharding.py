"""The sharding of a model over ranks: requested by the user, and found by an estimate."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

HalfType = Literal["bfloat16", "float16"]
Ranks = Annotated[int, Meta(ge=1)]


class Sharding(Struct, frozen=True, kw_only=True):
    """Options of `fully_shard`.

    `blocks`: patterns of the modules to shard one by one, such as `"model.layers.*"`; if empty, the modules
    that repeat. `reshard`: free a block's parameters after its forward. `compute`: the type of forward and
    backward, empty for the parameters' own; if set, gradients are reduced in float32. `offload`: keep
    parameters, gradients and optimizer state on the host.
    """

    blocks: tuple[str, ...] = ()
    reshard: bool = True
    compute: HalfType | Literal[""] = ""
    offload: bool = False


class ShardedModel(Struct, frozen=True, kw_only=True):
    """A sharded model: the number of ranks, the sharded modules and the options.

    Its figures belong to the first rank, which needs the most memory. `blocks` is empty if the script shards
    the model itself, or not at all.
    """

    ranks: Ranks
    blocks: tuple[str, ...] = ()
    options: Sharding | None = None
