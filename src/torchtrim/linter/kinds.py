"""What can be told of a value from the source alone: a tensor, where it may lie, or something else."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, reduce
from typing import Literal, NamedTuple

What = Literal[
    "unknown",
    "plain",
    "tensor",
    "sequence",
    "array",
    "device",
    "dtype",
    "layer",
    "mapping",
    "function",
]
On = Literal["", "host", "device", "mixed"]
_MOST_FUNCTIONS = 8


class Kind(NamedTuple):
    """What an expression is.

    `plain` is what Python itself has: numbers, text, shapes, None. A `sequence` holds `part`, and has
    `items` by place where it is a tuple of several kinds. A `layer` gives a tensor where it is called. A
    `mapping` has a `part` for all its values, and `items` for those whose key is text that is there. A
    `function` has the names of those that it may be as keys of `items`, `""` for one that is not known;
    `part` is what one without a name returns. `on` is where a tensor is, or which a device is: `""` where
    that is not known, `"mixed"` where it was computed from one of the host and something unknown. `dtype` is
    `"bool"` or `"int"`, `""` otherwise. `single`: of no dimensions. `sure`: computed as a tensor,
    where an annotation alone may be wrong.
    """

    what: What = "unknown"
    on: On = ""
    dtype: str = ""
    single: bool = False
    sure: bool = False
    part: Kind | None = None
    items: tuple[tuple[str, Kind], ...] = ()

    @property
    def waits(self) -> bool:
        """Whether it is a tensor that may lie on a device."""
        return self.what == "tensor" and self.on in ("", "device")


UNKNOWN = Kind()
PLAIN = Kind("plain")
ARRAY = Kind("array")
DTYPE = Kind("dtype")
LAYER = Kind("layer")
NUMBERS = Kind("sequence", part=PLAIN)


@cache
def tensor(on: On = "", dtype: str = "", *, single: bool = False, sure: bool = True) -> Kind:
    """A tensor."""
    return Kind("tensor", on, dtype, single, sure)


@cache
def sequence(part: Kind) -> Kind:
    """A list or tuple of a kind."""
    return Kind("sequence", part=part)


def places(kinds: Sequence[Kind]) -> Kind:
    """A tuple of some kinds: a sequence of what they all are, which knows its places where they differ."""
    part = reduce(joined, kinds) if kinds else UNKNOWN
    if len(set(kinds)) < 2:
        return sequence(part)
    return Kind(
        "sequence", part=part, items=tuple((str(at), kind) for at, kind in enumerate(kinds))
    )


def placed(kind: Kind, count: int) -> list[Kind] | None:
    """What the places of a tuple are, None where it does not have that many that are known."""
    known = kind.what == "sequence" and len(kind.items) == count
    return [item for _, item in kind.items] if known else None


def function(name: str = "", gives: Kind | None = None) -> Kind:
    """A function, by its name or by what it returns."""
    return Kind("function", part=gives, items=((name, UNKNOWN),) if name else ())


def mapping(items: dict[str, Kind], rest: Kind | None = None) -> Kind:
    """A dict: its values by key, and what those of other keys are, None for no others."""
    kinds = [*items.values(), *([rest] if rest is not None else [])]
    return Kind(
        "mapping", part=reduce(joined, kinds) if kinds else None, items=tuple(items.items())
    )


def valued(kind: Kind, key: str | None) -> Kind:
    """The value of a key of a mapping, None for a key that the source does not tell."""
    return (
        dict(kind.items).get(key, kind.part or UNKNOWN) if key is not None else kind.part or UNKNOWN
    )


@cache
def device(on: On) -> Kind:
    """A device."""
    return Kind("device", on)


def is_open(kind: Kind) -> bool:
    """Whether code may tell more of it: nothing is known, or an annotation alone says a tensor."""
    if kind.what == "sequence" and kind.items:
        return any(is_open(item) for _, item in kind.items)
    return kind == UNKNOWN or (kind.what == "tensor" and not kind.sure)


def refined(said: Kind, learned: Kind) -> Kind:
    """What an annotation says of a value, and where that is open what its code does."""
    if not is_open(said) or said == UNKNOWN:
        return learned if said == UNKNOWN else said
    if said.what == "tensor":
        return learned if learned.what == "tensor" and learned.sure else said
    found = placed(learned, len(said.items))
    if found is None:
        return said
    return places([refined(a, b) for (_, a), b in zip(said.items, found, strict=True)])


def part_of(kind: Kind) -> Kind:
    """What iterating over it, or one of its places, gives."""
    if kind.what == "sequence":
        return kind.part or UNKNOWN
    if kind.what == "tensor":
        return tensor(kind.on, kind.dtype)
    return kind if kind.what in ("plain", "array") else UNKNOWN


def joined(one: Kind, other: Kind) -> Kind:
    """What it is where it may be either. None is left out: a value used in a computation is not None."""
    if one == other:
        return one
    if one.what == other.what == "tensor":
        return Kind(
            "tensor",
            one.on if one.on == other.on else "",
            one.dtype if one.dtype == other.dtype else "",
            one.single and other.single,
            one.sure and other.sure,
        )
    if one.what == other.what == "sequence":
        theirs = placed(other, len(one.items)) if one.items else None
        if theirs is not None:
            return places([joined(a, b) for (_, a), b in zip(one.items, theirs, strict=True)])
        return sequence(joined(one.part or UNKNOWN, other.part or UNKNOWN))
    if "function" in (one.what, other.what):
        return _one_of(one, other)
    if one.what == other.what == "mapping":
        mine, yours = dict(one.items), dict(other.items)
        both = {key: joined(mine[key], yours[key]) for key in mine if key in yours}
        return mapping(both, joined(one.part or UNKNOWN, other.part or UNKNOWN))
    return UNKNOWN


def _one_of(one: Kind, other: Kind) -> Kind:
    """What may be one function or another, known or not."""
    is_open = UNKNOWN in (one, other)
    if one.what != other.what and not is_open:
        return UNKNOWN
    items = dict(one.items) | dict(other.items)
    if is_open or len(items) > _MOST_FUNCTIONS:
        items = {"": UNKNOWN} | items
    parts = [kind.part for kind in (one, other) if kind.part is not None]
    return Kind(
        "function",
        part=reduce(joined, parts) if parts else None,
        items=tuple(items.items())[:_MOST_FUNCTIONS],
    )


def together(*kinds: Kind) -> On:
    """Where a tensor is that is computed from these; what is unknown goes with what is known."""
    places: set[On] = {kind.on for kind in kinds if kind.what == "tensor"}
    if "device" in places:
        return "device"
    if not places & {"host", "mixed"} or "" in places:
        return ""
    return "mixed" if "mixed" in places or any(kind.what == "unknown" for kind in kinds) else "host"


def unsure(kind: Kind) -> Kind:
    """The same, which may be something else than a tensor."""
    if kind.what == "sequence":
        part = None if kind.part is None else unsure(kind.part)
        items = tuple((at, unsure(item)) for at, item in kind.items)
        return kind._replace(part=part, items=items)
    return kind._replace(sure=False)


def singled(kind: Kind) -> Kind:
    """The same, of no dimensions."""
    return kind._replace(single=True)
