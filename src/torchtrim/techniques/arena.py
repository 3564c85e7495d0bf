"""Arena: results are views into one block of memory, at offsets that are planned before the call.

The offsets come from `torchtrim.memory.pack`. What a call returns is outside of the block, so the next
call does not overwrite it. A network whose operators cannot write to a given place, so that a block would
take more than memory of their own, gets none (`memory.network.layout`).
"""

from __future__ import annotations

from torchtrim.executor.network.technique import ByGraph


class Arena(ByGraph):
    """`where` names modules."""

    name = "arena"


TECHNIQUE = Arena()
