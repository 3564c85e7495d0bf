"""Recompute: drop what a block saved for backward, and run the block again when backward comes to it.

The technique is that of Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), here chosen
block by block; `techniques.recompute.rerun` does it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from torchtrim.executor.registry import Handle, Option, Plain
from torchtrim.records.finding import Equivalence
from torchtrim.records.plan import Technique
from torchtrim.step.edits import Edit
from torchtrim.step.rerun import rerun
from torchtrim.step.step import Step
from torchtrim.techniques.recompute.blocks import blocks_of

if TYPE_CHECKING:
    from torch import nn


class Recompute:
    """`where` holds module paths (`Net.blocks.3`) and ranges of a Sequential (`Net.layers[2:6]`)."""

    name = "recompute"
    equivalence: Equivalence = "BITWISE"

    def options(self, step: Step) -> Sequence[Option]:
        """Every block and every range of a chain that saves something for backward."""
        return [Option(self.name, *block) for block in blocks_of(step)]

    def refusals(self, step: Step) -> Iterator[str]:
        """The modules whose code must not run twice, those of one line together."""
        found: dict[str, list[str]] = {}
        for module in step.modules:
            if module.writes:
                found.setdefault(module.writes, []).append(module.path)
        for writes, paths in found.items():
            more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
            yield (
                f"recompute is not for `{paths[0]}`{more}: {writes}, and running it again would do that twice"
            )

    def edits(self, step: Step, option: Option) -> Edit | None:
        """Its calls run again."""
        return rerun(step, option.spans)

    def apply(self, roots: Mapping[str, nn.Module], technique: Technique) -> Handle:
        """Make the named modules run again in backward."""
        from torchtrim.executor.failing import Place
        from torchtrim.techniques.recompute.rerun import rerun_places

        return rerun_places(roots, technique.where, Place)

    def export(self) -> Plain:
        """What runs again by itself."""
        return Plain("torchtrim.techniques.recompute.rerun", "rerun_places")


TECHNIQUE = Recompute()
