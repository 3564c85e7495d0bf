"""Split batch: the first layers run in parts of the batch, and the rest on all of it.

No placement of buffers can need less than the bytes alive at once, but parts of the batch can. The first
layers are those that keep samples apart, up to the point with the least data to carry over
(`executor.network.parts`). Kernels may add in another order for fewer samples, so the technique is ROUNDING;
if every bit agrees at the checked size, the certificate says BITWISE.
"""

from __future__ import annotations

from torchtrim.executor.network.technique import ByGraph


class SplitBatch(ByGraph):
    """`where` names modules. Option `parts`: the number of parts, 2 or more."""

    name = "split_batch"
    does = "run the first layers in parts of the batch"
    takes = ("parts",)
    equivalence = "ROUNDING"


TECHNIQUE = SplitBatch()
