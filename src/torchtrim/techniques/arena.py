"""Arena: results are views into one block of memory, at offsets planned before the call.

The offsets come from `torchtrim.memory.pack`. Results that a call returns are outside of the block, so the
next call does not overwrite them. A network whose operators cannot write to a given place gets no block if
that would need more memory than separate results do (`memory.network`).
"""

from __future__ import annotations

from torchtrim.executor.network.technique import ByGraph


class Arena(ByGraph):
    """`where` names modules."""

    name = "arena"
    does = "put results into one block of memory"


TECHNIQUE = Arena()
