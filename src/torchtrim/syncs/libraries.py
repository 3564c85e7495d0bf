"""Rows about operators of libraries beside ATen, and which of theirs were read and await nothing.

What an operator of any other namespace does is unknown, and is said to be.
"""

from __future__ import annotations

from torchtrim.syncs.asks import filled
from torchtrim.syncs.base import Evidence, Row

_VISION, _VISION_REF = "pytorch/vision", "a88eed4f034bcd65d8189f716d5c7cfc40ad75e9"
_NMS = "torchvision/csrc/ops/cuda/nms_kernel.cu"


def _vision(path: str, line: int, note: str) -> Evidence:
    return Evidence(repository=_VISION, ref=_VISION_REF, path=path, line=line, note=note)


NMS = Row(
    name="torchvision-nms",
    code="TT102",
    what="`torchvision.ops.nms`, and `batched_nms`, which calls it",
    when="the boxes are on the device, and there are any",
    operators=("torchvision::nms",),
    waits=filled("dets"),
    evidence=(
        _vision(_NMS, 135, "copies which boxes overlap to the host"),
        _vision(_NMS, 164, "copies the boxes that are kept back to the device"),
    ),
    advice="Suppress once for a batch, after the step's last launch; for a fixed number of boxes keep scores "
    "and a mask.",
)

ROWS = (NMS,)
FREE = frozenset(("torchvision::roi_align", "torchvision::_roi_align_backward"))
"""Read at pytorch/vision 072a51fe, `torchvision/csrc/ops/cuda/roi_align_kernel.cu`: launches, and no wait."""

_KNOWN = frozenset(
    (
        *("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "fsdp", "inductor"),
        "torchtrim",
    )
)
_ASKED = frozenset(operator for row in ROWS for operator in row.operators)


def is_unknown(operator: str) -> bool:
    """Whether nobody has read what an operator does, such as `xformers::efficient_attention.default`."""
    base = operator.partition(".")[0]
    namespace, found, _ = base.partition("::")
    return bool(found) and namespace not in _KNOWN and base not in FREE | _ASKED
