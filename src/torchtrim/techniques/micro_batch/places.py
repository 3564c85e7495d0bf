"""Has the parts of a model that a plan names run in parts of the batch."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from torch import nn

from torchtrim.executor.chains import Range, Ranges
from torchtrim.executor.handles import Handle
from torchtrim.executor.places import part_at
from torchtrim.executor.swap import Swapped
from torchtrim.techniques.micro_batch.running import InParts


def in_parts(roots: Mapping[str, nn.Module], where: str, parts: int) -> Handle:
    """A module, or a range of a Sequential, in so many parts. Raises `ApplyFailed` where there is none."""
    part = part_at(roots, where)
    if part.span is None:
        run = InParts(where, part.module, parts)
        return Swapped(part.module, functools.partial(functools.partial, run))
    first, last = part.span
    inner = nn.Sequential(*list(part.chain)[first:last])
    return Ranges(part.chain, [Range(first, last, InParts(where, inner, parts))])
