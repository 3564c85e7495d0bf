"""In place: an operator overwrites what no operator looks at again.

Only where the result has the geometry of what it overwrites and computes each element from that one
element. Nothing of the caller's, no parameter and nothing that is returned is overwritten. It is OptNet's
`inplace` (https://github.com/fmassa/optimize-net), for every operator, and decided by the network's graph.
"""

from __future__ import annotations

from torchtrim.executor.network.technique import ByGraph


class InPlace(ByGraph):
    """`where` names modules."""

    name = "in_place"


TECHNIQUE = InPlace()
