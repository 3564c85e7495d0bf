"""Split batch: the first layers run in parts of the batch, the rest on all of it.

Below the bytes that are alive at once no plan of places can come; parts of the batch can. The first
layers are as many as keep samples apart, up to where the least is left to carry over
(`executor.network.parts`). Kernels may choose another order of additions for fewer samples, so it is
ROUNDING; where every bit agrees at the size that was checked, the certificate says BITWISE.
"""

from __future__ import annotations

from torchtrim.executor.network.technique import ByGraph
from torchtrim.records.finding import Equivalence


class SplitBatch(ByGraph):
    """`where` names modules. Option `parts`: in how many parts, 2 or more."""

    name = "split_batch"
    takes = ("parts",)
    equivalence: Equivalence = "ROUNDING"


TECHNIQUE = SplitBatch()
