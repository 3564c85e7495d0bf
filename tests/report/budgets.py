"""What other budgets cost, in the samples."""

from __future__ import annotations

from torchtrim.records.report import FrontierPoint

_MIB = 2**20

POINTS = tuple(
    FrontierPoint(
        budget_bytes=mib * _MIB,
        peak_bytes=(mib - 7) * _MIB,
        step_seconds=0.9 - mib / 1000,
        where=("model.encoder.layers.0", "model.encoder.layers.1"),
        by_hand=hand,
    )
    for mib, hand in ((400, ""), (300, ""), (247, ""), (200, ""), (260, "each block checkpointed"))
)
