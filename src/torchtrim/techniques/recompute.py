"""Recompute: drop what a block saved for backward, and run the block again when backward comes to it.

The technique is that of Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), here chosen
block by block; `techniques.rerun` does it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torchtrim.errors import ApplyFailed
from torchtrim.records.finding import Equivalence
from torchtrim.records.plan import Technique
from torchtrim.records.profile import Profile
from torchtrim.techniques.base import Handle, Handles, Option
from torchtrim.techniques.blocks import blocks_of
from torchtrim.techniques.places import module_at

if TYPE_CHECKING:
    from torch import nn

_WHERE = re.compile(r"(?P<path>[^\[\]]+)(?:\[(?P<first>\d+):(?P<last>\d+)\])?")
Range = tuple[int, int]


class Recompute:
    """`where` holds module paths (`Net.blocks.3`) and ranges of a Sequential (`Net.layers[2:6]`)."""

    name = "recompute"
    equivalence: Equivalence = "BITWISE"

    def options(self, profile: Profile) -> Sequence[Option]:
        """Every block and every range of a chain that saves something for backward."""
        return [Option(self.name, *block) for block in blocks_of(profile)]

    def apply(self, roots: Mapping[str, nn.Module], technique: Technique) -> Handle:
        """Make the named modules run again in backward."""
        from torchtrim.techniques.rerun import rerun_ranges, rerun_whole

        whole, ranges = _sort(roots, technique.where)
        swapped = Handles()
        try:
            for module in whole:
                swapped.add(rerun_whole(module))
            for chain, spans in ranges:
                swapped.add(rerun_ranges(chain, spans))
        except BaseException:
            swapped.revert()
            raise
        return swapped


TECHNIQUE = Recompute()


def _sort(
    roots: Mapping[str, nn.Module], places: Sequence[str]
) -> tuple[list[nn.Module], list[tuple[nn.Sequential, list[Range]]]]:
    """Modules that are named whole, and Sequentials with the ranges that are named of them."""
    from torch import nn

    whole: list[nn.Module] = []
    ranges: dict[int, tuple[nn.Sequential, list[Range]]] = {}
    for where in places:
        module, span = _find(roots, where)
        if span is None:
            whole.append(module)
        elif not isinstance(module, nn.Sequential):
            raise ApplyFailed(f"`{where}` is a range, and that module is no nn.Sequential.")
        else:
            ranges.setdefault(id(module), (module, []))[1].append(span)
    return whole, list(ranges.values())


def _find(roots: Mapping[str, nn.Module], where: str) -> tuple[nn.Module, Range | None]:
    match = _WHERE.fullmatch(where)
    if match is None:
        raise ApplyFailed(
            f"cannot read {where!r} as a place. Write a module's path, such as Net.blocks.3, or a "
            "range of a Sequential, such as Net.layers[2:6]."
        )
    module = module_at(roots, match["path"])
    span = (int(match["first"]), int(match["last"])) if match["first"] else None
    return module, span
