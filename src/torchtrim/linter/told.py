"""What lint knows of the parts of a match, as a fix asks for it."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from torchtrim.linter.kinds import UNKNOWN, Kind
from torchtrim.rewriter.fix import Match
from torchtrim.source.facts import NoTensor, Told

_NO_TENSORS = frozenset(
    ("plain", "array", "sequence", "device", "dtype", "mapping", "layer", "function")
)
_DTYPES = {"bool": "bool", "int": "int64"}


def told_of(match: Match, kinds: Mapping[ast.AST, Kind]) -> dict[str, Told]:
    """What the source tells of each part of a match."""
    return {name: _told(kinds.get(node, UNKNOWN)) for name, node in match.parts.items()}


def _told(kind: Kind) -> Told:
    if kind.what in _NO_TENSORS:
        return Told(kind=NoTensor(kind.what))
    if kind.what != "tensor":
        return Told()
    fields: dict[str, object] = {"kind": "tensor"}
    if kind.dtype:
        fields["dtype"] = _DTYPES[kind.dtype]
    if kind.single:
        fields["shape"] = ()
    return Told(**fields)
