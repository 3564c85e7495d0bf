"""A planned network, ready to draw: its operators in order, and the memory they share."""

from __future__ import annotations

from msgspec import Struct


class GraphMemory(Struct, frozen=True, kw_only=True):
    """Memory of one result, or of several in turn.

    Live during operators `first <= i < last` of the section. `offset`: its address in the arena, or -1 if it
    is allocated separately.
    """

    bytes: int
    first: int
    last: int
    offset: int = -1


class GraphOperator(Struct, frozen=True, kw_only=True):
    """One operator. `reads` and `writes` are indices of memories; `takes_over`: it overwrites its input.

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
    """Operators with one memory plan; `title` names their model or call. `height`: bytes of the arena."""

    title: str
    operators: tuple[GraphOperator, ...]
    memories: tuple[GraphMemory, ...]
    height: int


class NetworkGraph(Struct, frozen=True, kw_only=True):
    """All sections, in execution order."""

    model: str
    sections: tuple[Section, ...]
