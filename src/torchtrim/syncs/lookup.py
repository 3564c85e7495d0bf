"""The host-device syncs of PyTorch on CUDA, each row with its source.

An operator of ATen that no row knows does not wait; one of another library is unknown (`libraries.py`).
The versions read are in `sources.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from importlib import metadata

from torchtrim.syncs import algebra, copies, explicit, hidden, libraries, reads, shapes, uploads
from torchtrim.syncs.base import Row

FAMILIES: dict[str, tuple[Row, ...]] = {
    "Values read on the host": reads.ROWS,
    "Linear algebra": algebra.ROWS,
    "Shapes that depend on data": shapes.ROWS,
    "Copies": copies.ROWS,
    "Small uploads inside operators": uploads.ROWS,
    "Where no operator shows it": hidden.ROWS,
    "Calls and races": explicit.ROWS,
    "Libraries beside ATen": libraries.ROWS,
}

ROWS: tuple[Row, ...] = tuple(row for rows in FAMILIES.values() for row in rows)


def row(name: str) -> Row:
    """The row of that name."""
    return _by_name()[name]


@cache
def rows_for(operator: str, torch_version: str) -> tuple[Row, ...]:
    """The rows to ask about an operator, such as `aten::index.Tensor` or `aten::nonzero.default`."""
    base, _, overload = operator.partition(".")
    known = _by_operator()
    found = known.get(base, ()) + known.get(f"{base}.{overload or 'default'}", ())
    return tuple(one for one in found if holds(one, torch_version))


def holds(row: Row, torch_version: str) -> bool:
    """Whether a row is about a version of torch."""
    version = _numbers(torch_version)
    begun = not row.since or version >= _numbers(row.since)
    return begun and (not row.until or version < _numbers(row.until))


@cache
def is_from(release: str) -> bool:
    """Whether the torch that is installed is of that release or a later one; false where none is."""
    try:
        return _numbers(metadata.version("torch")) >= _numbers(release)
    except metadata.PackageNotFoundError:
        return False


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


@cache
def _by_name() -> dict[str, Row]:
    return {one.name: one for one in ROWS}


@cache
def _by_operator() -> dict[str, tuple[Row, ...]]:
    found: dict[str, tuple[Row, ...]] = {}
    for operator, one in _pairs():
        found[operator] = (*found.get(operator, ()), one)
    return found


def _pairs() -> Iterable[tuple[str, Row]]:
    return ((operator, one) for one in ROWS for operator in one.operators)
