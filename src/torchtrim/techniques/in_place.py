"""In place: an operator overwrites an input that no later operator reads.

The result must have the geometry of the overwritten tensor, and each element must depend on that one element
only. Tensors of the caller, parameters and returned tensors are never overwritten. This is OptNet's `inplace`
(https://github.com/fmassa/optimize-net), extended to every operator and decided from the network's graph.
"""

from __future__ import annotations

from torchtrim.executor.network.technique import ByGraph


class InPlace(ByGraph):
    """`where` names modules."""

    name = "in_place"
    does = "write results over inputs that nothing reads again"


TECHNIQUE = InPlace()
