"""A planned network as a picture shows it: operators in their order, and the memory they share."""

from __future__ import annotations

from msgspec import Struct


class Memory(Struct, frozen=True, kw_only=True):
    """Memory that one result, or several one after the other, lie in.

    Alive at operators `first <= i < last` of the section. `offset`: its place in the arena, -1 for
    memory of its own.
    """

    bytes: int
    first: int
    last: int
    offset: int = -1


class Operator(Struct, frozen=True, kw_only=True):
    """One operator. `reads` and `writes` are memories by number; `takes_over`: it overwrites what it reads.

    `needs`: operators of the section whose results it reads. A view writes nothing.
    """

    name: str
    module: str
    shape: tuple[int, ...]
    dtype: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    needs: tuple[int, ...]
    takes_over: bool = False


class Section(Struct, frozen=True, kw_only=True):
    """Operators that run by one plan; `title` says of what. `height`: bytes of its arena."""

    title: str
    operators: tuple[Operator, ...]
    memories: tuple[Memory, ...]
    height: int


class NetworkGraph(Struct, frozen=True, kw_only=True):
    """All sections, in the order in which they run."""

    model: str
    sections: tuple[Section, ...]
