"""The table of host-device syncs of PyTorch on CUDA, each row with its source.

ATen operators without a row do not synchronize; operators of other libraries are unknown (`is_unknown`).
`base.py` names the versions of the sources.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import metadata

from torchtrim.syncs import algebra, copies, explicit, reads, shapes, uploads
from torchtrim.syncs.base import Row

FAMILIES: dict[str, tuple[Row, ...]] = {
    "Values read on the host": reads.ROWS,
    "Linear algebra": algebra.ROWS,
    "Shapes that depend on data": shapes.ROWS,
    "Copies": copies.ROWS,
    "Small uploads inside operators": uploads.ROWS,
    "Where no operator shows it": explicit.HIDDEN,
    "Calls and races": explicit.ROWS,
    "Libraries beside ATen": explicit.LIBRARIES,
}

ROWS: tuple[Row, ...] = tuple(row for rows in FAMILIES.values() for row in rows)
_BY_NAME = {row.name: row for row in ROWS}


def row(name: str) -> Row:
    """Return the row of that name."""
    return _BY_NAME[name]


@cache
def rows_for(operator: str, torch_version: str) -> tuple[Row, ...]:
    """Return the rows that apply to an operator, such as `aten::index.Tensor` or `aten::nonzero.default`."""
    base, _, overload = operator.partition(".")
    known = _by_operator()
    found = known.get(base, ()) + known.get(f"{base}.{overload or 'default'}", ())
    return tuple(one for one in found if holds(one, torch_version))


def holds(row: Row, torch_version: str) -> bool:
    """Return True if a row applies to a version of torch."""
    version = _numbers(torch_version)
    begun = not row.since or version >= _numbers(row.since)
    return begun and (not row.until or version < _numbers(row.until))


@cache
def is_from(release: str) -> bool:
    """Return True if the installed torch is that release or later; False if torch is not installed."""
    try:
        return _numbers(metadata.version("torch")) >= _numbers(release)
    except metadata.PackageNotFoundError:
        return False


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


@cache
def _by_operator() -> dict[str, tuple[Row, ...]]:
    rows: dict[str, tuple[Row, ...]] = {}
    for row in ROWS:
        for operator in row.operators:
            rows[operator] = (*rows.get(operator, ()), row)
    return rows
