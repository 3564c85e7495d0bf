"""A report of a budget that is missed, and the points of other budgets."""

from __future__ import annotations

from typing import Literal

import msgspec

from torchtrim.records.certificate import Coverage
from torchtrim.records.figures import Lever, PeakPart
from torchtrim.records.finding import Equivalence
from torchtrim.records.report import FrontierPoint, Report

MIB = 2**20


POINTS = tuple(
    FrontierPoint(
        budget_bytes=mib * MIB,
        peak_bytes=(mib - 7) * MIB,
        step_seconds=0.9 - mib / 1000,
        where=("model.encoder.layers.0", "model.encoder.layers.1"),
        by_hand=hand,
    )
    for mib, hand in ((400, ""), (300, ""), (247, ""), (200, ""), (260, "each block checkpointed"))
)


def missed(fitted: Report) -> Report:
    """The report as it would be if no plan needed less than this one's, and less were asked for."""
    assert fitted.original is not None
    assert fitted.planned is not None
    before, after = fitted.original, fitted.planned
    return msgspec.structs.replace(
        fitted,
        budget_bytes=100 * MIB,
        floor_bytes=after.peak_bytes,
        peak_parts=(
            PeakPart(
                what="activations of model.encoder.layers.*", bytes=after.peak_bytes - 90 * MIB
            ),
            PeakPart(what="state", bytes=60 * MIB),
            PeakPart(what="loss", bytes=30 * MIB),
        ),
        levers=(
            lever("overwrite", before.peak_bytes - 3 * MIB, before.step_seconds),
            lever("overwrite + recompute", after.peak_bytes, after.step_seconds, source="measured"),
            lever(
                "relative_attention",
                before.peak_bytes - 40 * MIB,
                2 * before.step_seconds,
                equivalence="ROUNDING",
                needs="--allow rounding",
            ),
        ),
        next="torchtrim run train.py --plan torchtrim-out/train/plan.toml",
    )


def lever(
    technique: str,
    peak: int,
    seconds: float,
    *,
    equivalence: Equivalence = "BITWISE",
    needs: str = "",
    source: Literal["measured", "simulated"] = "simulated",
) -> Lever:
    return Lever(
        technique=technique,
        equivalence=equivalence,
        peak_bytes=peak,
        step_seconds=seconds,
        needs=needs,
        source=source,
    )


COVERAGE = Coverage(
    inputs=("Net: float32[16, 3, 224, 224]",),
    dtypes=("float32",),
    batch_sizes=(16,),
    dimensions=(4,),
    modes=("training",),
    steps=3,
    device="cpu",
)
