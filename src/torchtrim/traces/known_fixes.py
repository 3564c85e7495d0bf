"""Waits that a newer version, or a setting, of a well-known library fixes; each with its source."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torchtrim.records.trace import TraceSite


@dataclass(frozen=True, kw_only=True)
class Mend:
    """Sites whose path ends so, or which are in such a function or operator, and what fixes them."""

    path: str = ""
    function: str = ""
    within: str = ""
    package: str
    says: str
    source: str

    def fits(self, site: TraceSite) -> bool:
        """Whether the site is one of these."""
        return (
            self.path in site.path.replace("\\", "/")
            and self.function in (site.function, "")
            and self.within in (site.within, site.op, "")
        )


_OPTIMIZER = (
    "its step counter is on the device, as after loading a checkpoint, and is read for each parameter; "
    "newer Lightning keeps it on the host, capturable=True or fused=True does not read it"
)
MENDS = (
    Mend(
        path="diffusers/schedulers/",
        function="index_for_timestep",
        package="diffusers",
        says="pipelines that call scheduler.set_begin_index(0), as newer Flux does, do not search",
        source="https://github.com/huggingface/diffusers/pull/11696",
    ),
    Mend(
        path="transformers/modeling_attn_mask_utils.py",
        function="_ignore_causal_mask_sdpa",
        package="transformers",
        says="the attention mask is read back to choose a kernel; pass none where nothing is padded",
        source="https://github.com/huggingface/transformers/blob/v4.49.0/src/transformers/modeling_attn_mask_utils.py",
    ),
    Mend(
        path="owlv2/modeling_owlv2.py",
        function="box_predictor",
        package="transformers",
        says="a constant is moved to the device at every call; register it as a buffer",
        source="https://github.com/huggingface/transformers/blob/v4.49.0/src/transformers/models/owlv2/modeling_owlv2.py",
    ),
    *(
        Mend(
            within=f"Optimizer.step#{name}.step",
            package="torch",
            says=_OPTIMIZER,
            source="https://github.com/Lightning-AI/pytorch-lightning/issues/19955",
        )
        for name in ("Adam", "AdamW")
    ),
    Mend(
        within="aten::multinomial",
        package="torch",
        says="it reads its input back to check it; PyTorch counts that among the waits to be removed",
        source="https://github.com/pytorch/pytorch/issues/108968",
    ),
    Mend(
        within="aten::nonzero",
        package="torch",
        says="newer PyTorch has nonzero_static(size=) on CUDA, which does not wait",
        source="https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cuda/Nonzero.cu",
    ),
)


def mended(sites: Iterable[TraceSite], versions: Mapping[str, str]) -> list[str]:
    """What is known of these sites, with the version that the trace was recorded with, if it tells."""
    notes = []
    every = list(sites)
    for mend in MENDS:
        found = next((site for site in every if mend.fits(site)), None)
        if found is not None:
            where = found.function or found.within or found.op
            version = versions.get(mend.package, "")
            used = f"{mend.package} {version}".strip()
            notes.append(f"{where} ({used}): {mend.says}. {mend.source}")
    return notes
