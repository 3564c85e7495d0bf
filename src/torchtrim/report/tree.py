"""The modules as a tree, each with the bytes that it and what is inside it hold at the peak."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torchtrim.analysis.timeline import alive, peak_operator
from torchtrim.records import Profile
from torchtrim.records.operator_names import module_paths, owner
from torchtrim.report.safe import clean, keep_right

_DEEPEST = 6
_MOST_CHILDREN = 12
_SMALL = 0.005
_OUTSIDE = "outside modules"


@dataclass(frozen=True, kw_only=True)
class Node:
    """A module: its name in its parent, its bytes, its share in percent, and the modules in it."""

    name: str
    bytes: int
    share: float
    children: Sequence[Node]


@dataclass(frozen=True)
class _Held:
    """Bytes by path, those of modules inside included, and the paths inside each."""

    total: dict[str, int]
    inside: dict[str, list[str]]


def tree(profile: Profile) -> Sequence[Node]:
    """The roots, largest first. Modules with less than a two-hundredth are summed as `others`."""
    held = _held(profile)
    whole = sum(held.total[root] for root in held.inside[""])
    return list(_nodes(held, "", whole, 0)) if whole else []


def _held(profile: Profile) -> _Held:
    modules = module_paths(profile)
    total: dict[str, int] = defaultdict(int)
    inside: dict[str, list[str]] = defaultdict(list)
    for index in alive(profile, peak_operator(profile)):
        size = profile.storages[index].counted
        path = owner(profile, index, modules) or _OUTSIDE
        parts = path.split(".")[:_DEEPEST] if path in modules else [path]
        above = ""
        for depth in range(len(parts)):
            here = ".".join(parts[: depth + 1])
            if here not in total:
                inside[above].append(here)
            total[here] += size
            above = here
    return _Held(total, inside)


def _nodes(held: _Held, path: str, whole: int, depth: int) -> Iterator[Node]:
    ordered = sorted(held.inside.get(path, ()), key=lambda one: (-held.total[one], one))
    large = [one for one in ordered if held.total[one] >= _SMALL * whole][:_MOST_CHILDREN]
    for one in large:
        name = one.removeprefix(f"{path}.") if path else one
        children = list(_nodes(held, one, whole, depth + 1))
        yield _node(name, held.total[one], whole, children)
    rest = ordered[len(large) :]
    if rest:
        size = sum(held.total[one] for one in rest)
        yield _node(f"{len(rest)} other{'s' if len(rest) > 1 else ''}", size, whole, ())


def _node(name: str, size: int, whole: int, children: Sequence[Node]) -> Node:
    shown = keep_right(clean(name), 40)
    return Node(name=shown, bytes=size, share=100 * size / whole, children=children)


def count(nodes: Sequence[Node]) -> int:
    """How many there are, those inside included."""
    return sum(1 + count(node.children) for node in nodes)
