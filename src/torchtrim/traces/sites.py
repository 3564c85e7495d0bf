"""Waiting calls -> sites: the lines of user code that make the host wait, each with its count."""

from __future__ import annotations

import ast
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from torchtrim.errors import UnreadableInput
from torchtrim.records.files import read_bounded
from torchtrim.records.trace import Event, Phase, Trace
from torchtrim.traces.stacks import (
    CallMoment,
    Frame,
    frames_of,
    is_annotation,
    is_backward,
    lane_of,
    moments,
    parse_frame,
    place_of,
)
from torchtrim.traces.waiting import Wait, same_stand

_MOST_BYTES = 2**22
_MOST_PARTS = 64  # Arbitrary; paths in a file that is not trusted are no deeper.
_BUILT_IN = re.compile(r"<built-in (?:method|function) (\w+)")
_CALLED = re.compile(r"\(\d+\): (\w+)$")
_COPIES = frozenset(
    (
        "to",
        "cuda",
        "cpu",
        "copy_",
        "numpy",
        "float",
        "half",
        "double",
        "long",
        "int",
        "bool",
        "type",
    )
) | {"bfloat16", "tensor", "as_tensor", "new_tensor", "pin_memory", "asarray"}
_READS = frozenset(
    (
        "item",
        "tolist",
        "float",
        "int",
        "bool",
        "print",
        "range",
        "format",
        "equal",
        "allclose",
        "max",
    )
) | {"min", "any", "all", "str", "repr", "round", "len", "isinstance"}
_SHAPES = frozenset(
    ("nonzero", "argwhere", "where", "masked_select", "unique", "unique_consecutive")
)
_BY_OPERATOR = {
    "aten::item": _READS,
    "aten::is_nonzero": frozenset(("bool",)),
    "aten::_local_scalar_dense": _READS,
    "aten::nonzero": _SHAPES,
    "aten::_unique2": frozenset(("unique",)),
    "aten::copy_": _COPIES,
    "aten::_to_copy": _COPIES,
    "aten::to": _COPIES,
}
Scope = ast.AST
_SCOPES: dict[str, type[ast.AST]] = {
    "<lambda>": ast.Lambda,
    "<listcomp>": ast.ListComp,
    "<setcomp>": ast.SetComp,
    "<dictcomp>": ast.DictComp,
    "<genexpr>": ast.GeneratorExp,
}


@dataclass(kw_only=True)
class SourceFolder:
    """Source files below a folder, parsed on demand."""

    folder: Path
    parsed: dict[str, ast.Module | None] = field(default_factory=dict)
    found: dict[tuple[str, int, str, tuple[str, ...]], list[int]] = field(default_factory=dict)

    def lines(self, path: str, definition: int, function: str, hints: tuple[str, ...]) -> list[int]:
        """Return the lines of the function beginning at `first` from which the sync may come.

        `hints` name the call to look for, best first: a builtin, a function called from there, operators.
        Empty if the source is missing or has no such call.
        """
        asked = (path, definition, function, hints)
        if asked not in self.found:
            self.found[asked] = self._lines(*asked)
        return self.found[asked]

    def has(self, path: str) -> bool:
        """Return True if the file is below the folder."""
        return self._module(path) is not None

    def _lines(
        self, path: str, definition: int, function: str, hints: tuple[str, ...]
    ) -> list[int]:
        module = self._module(path)
        node = _function(module, definition, function) if module is not None else None
        if node is None:
            return []
        for hint in hints:
            found = sorted(set(_matching(node, hint)))
            if found:
                return found
        return []

    def _module(self, path: str) -> ast.Module | None:
        if path not in self.parsed:
            self.parsed[path] = self._parse(path)
        return self.parsed[path]

    def _parse(self, path: str) -> ast.Module | None:
        found = self._find(path)
        try:
            return ast.parse(read_bounded(found, _MOST_BYTES)) if found is not None else None
        except (UnreadableInput, SyntaxError, ValueError, RecursionError, MemoryError):
            return None

    def _find(self, path: str) -> Path | None:
        """Return the file whose path ends like this one, searched for only inside the folder."""
        parts = [part for part in re.split(r"[/\\]", path) if part not in ("", ".", "..")]
        root = self.folder.resolve()
        for start in range(min(len(parts), _MOST_PARTS)):
            candidate = root.joinpath(*parts[start:])
            try:
                inside = candidate.resolve().is_relative_to(root)
                if inside and candidate.suffix == ".py" and candidate.is_file():
                    return candidate
            except (OSError, ValueError):
                continue
        return None


def called_by(frame: str) -> str:
    """Return the called name of a frame: of a builtin, or of a function in a file."""
    found = _BUILT_IN.match(frame) or _CALLED.search(frame)
    return found[1] if found else ""


def hints_of(child: str, operators: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names to look for: the frame that the place called, then the operators, outermost first."""
    name = called_by(child)
    return ((f"call {name}",) if name else ()) + operators


def _function(module: ast.Module, line: int, name: str) -> Scope | None:
    if name == "<module>":
        return module
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            if first <= line <= node.lineno:
                return node
        if name in _SCOPES and isinstance(node, _SCOPES[name]) and _line(node) == line:
            return node
    return None


def _line(node: ast.AST) -> int:
    found = getattr(node, "lineno", 0)
    assert isinstance(found, int)
    return found


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of the function itself, not of functions defined inside it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            continue
        yield child
        yield from _own(child)


def _matching(function: Scope, hint: str) -> Iterator[int]:
    names = frozenset((hint.removeprefix("call "),)) if hint.startswith("call ") else None
    wanted = names or _BY_OPERATOR.get(hint) or frozenset((hint.rpartition("::")[2].strip("_"),))
    for node in _own(function):
        if isinstance(node, ast.Call) and _called(node) in wanted:
            yield _line_of(node)
        elif names is None and isinstance(node, ast.Subscript) and _indexes(hint, node):
            yield node.lineno
        elif names is None and hint == "aten::is_nonzero":
            yield from _tested(node)


def _called(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _line_of(node: ast.Call) -> int:
    """Return the line of the called name, which may not be the first line of a chain of calls."""
    if isinstance(node.func, ast.Attribute) and node.func.end_lineno is not None:
        return node.func.end_lineno
    return node.lineno


def _indexes(hint: str, node: ast.Subscript) -> bool:
    if isinstance(node.slice, ast.Constant | ast.Slice):
        return False
    stores = isinstance(node.ctx, ast.Store)
    return (hint == "aten::index" and not stores) or (hint in _PUTS and stores)


_PUTS = frozenset(("aten::index_put_", "aten::_index_put_impl_"))


def _tested(node: ast.AST) -> Iterator[int]:
    if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
        yield node.test.lineno
    elif isinstance(node, ast.BoolOp):
        yield from (value.lineno for value in node.values)


_STEP = "ProfilerStep"
_MOST_FRAMES = 20_000  # Arbitrary; bounds the search for one line.
Key = tuple[str, str, int, str, str, bool]


@dataclass(kw_only=True, eq=False)
class SyncSite:
    """A place and the waiting calls made from there; `stands` counts a copy and its sync once."""

    frame: Frame | None
    op: str
    within: str
    phase: Phase
    is_device: bool
    calls: list[Event] = field(default_factory=list)
    stands: int = 0
    lines: set[int] = field(default_factory=set)

    @property
    def wait_ms(self) -> float:
        """Recorded time of the calls."""
        return sum(call.dur for call in self.calls) / 1e3


def sites_of(trace: Trace, waits: Sequence[Wait], sources: SourceFolder | None) -> list[SyncSite]:
    """Return the sites, longest wait first, without the profiler's own calls."""
    own = [wait for wait in waits if not wait.is_profiler]
    forward = _forward(trace, own)
    is_users = sources.has if sources is not None else _nobodys
    found: dict[Key, SyncSite] = {}
    last: dict[tuple[str, str], Wait] = {}
    for wait in own:
        before = last.get(lane_of(wait.call))
        last[lane_of(wait.call)] = wait
        site = _site(wait, forward.get(id(wait)), found, is_users)
        site.calls.append(wait.call)
        site.stands += before is None or not same_stand(before, wait)
        if sources is not None and site.frame is not None and not site.frame.exact:
            site.lines.update(_lines(trace, wait, forward.get(id(wait)), site.frame, sources))
    return sorted(found.values(), key=lambda site: -site.wait_ms)


def _nobodys(path: str) -> bool:
    return False


def _site(
    wait: Wait,
    forward: CallMoment | None,
    found: dict[Key, SyncSite],
    is_users: Callable[[str], bool],
) -> SyncSite:
    frame = place_of(wait.frames, is_users)
    if frame is None and forward is not None:
        frame = place_of(frames_of(forward), is_users)
    innermost = wait.moment.innermost
    op = innermost.name if innermost is not None else wait.call.name
    within = _within(wait.moment)
    phase: Phase = "backward" if wait.moment.backward is not None else "forward"
    where = (frame.path, frame.function, frame.line) if frame else ("", "", 0)
    key = (*where, op, "" if frame else within, wait.is_device)
    if key not in found:
        found[key] = SyncSite(
            frame=frame, op=op, within=within, phase=phase, is_device=wait.is_device
        )
    return found[key]


def _within(moment: CallMoment) -> str:
    """Return the innermost annotation, else the outermost operator."""
    marks = [op.name for op in moment.operators if not op.name.startswith(_STEP)]
    named = [op.name for op in moment.operators if is_annotation(op) and op.name in marks]
    return (named[-1:] or marks[:1] or [""])[0]


def _forward(trace: Trace, waits: list[Wait]) -> dict[int, CallMoment]:
    """Return the forward operator's moment, for waits in backward without frames of their own."""
    asked = {
        id(wait): wait
        for wait in waits
        if wait.moment.backward is not None and place_of(wait.frames) is None
    }
    if not asked:
        return {}
    numbers = {_sequence(wait.moment.backward) for wait in asked.values()}
    made: dict[object, list[Event]] = defaultdict(list)
    for op in trace.operators:
        if op.args is not None and op.args.sequence in numbers and not is_backward(op):
            made[op.args.sequence].append(op)
    makers: dict[int, Event] = {}
    for key, wait in asked.items():
        earlier = [op for op in made[_sequence(wait.moment.backward)] if op.ts < wait.call.ts]
        elsewhere = [op for op in earlier if lane_of(op) != lane_of(wait.call)]
        if elsewhere or earlier:
            makers[key] = (elsewhere or earlier)[-1]
    around = moments(trace, makers.values())
    return dict(zip(makers, around, strict=True))


def _sequence(operator: Event | None) -> object:
    return operator.args.sequence if operator is not None and operator.args is not None else None


def _lines(
    trace: Trace, wait: Wait, forward: CallMoment | None, frame: Frame, sources: SourceFolder
) -> list[int]:
    """Return the lines that may have waited; one if the source and the frames' order determine it."""
    moment = wait.moment if place_of(wait.frames) is not None else (forward or wait.moment)
    parsed = [parse_frame(one.name, exact=False) for one in moment.frames]
    at = max((i for i, one in enumerate(parsed) if one == frame), default=-1)
    child = moment.frames[at + 1] if 0 <= at < len(parsed) - 1 else None
    began = moment.frames[at].ts if at >= 0 else 0.0
    operators = tuple(
        op.name for op in moment.operators if op.ts >= began and not is_annotation(op)
    )
    hints = hints_of(child.name if child is not None else "", operators)
    lines = sources.lines(frame.path, frame.line, frame.function, hints)
    if len(lines) > 1 and child is not None:
        siblings = _siblings(trace, moment.frames[at], child)
        if len(siblings) == len(lines):
            return [lines[siblings.index(child.ts)]]
    return lines


def _siblings(trace: Trace, parent: Event, child: Event) -> list[float]:
    """Return the start times of the parent frame's calls with the child's name, the child included."""
    lane, name, until = lane_of(parent), called_by(child.name), parent.ts
    found = []
    begin = bisect_right(trace.frames, parent.ts, key=lambda frame: frame.ts)
    for frame in islice(trace.frames, begin, begin + _MOST_FRAMES):
        if frame.ts > parent.end:
            break
        if frame.ts >= until and frame is not parent and lane_of(frame) == lane:
            until = frame.end
            if called_by(frame.name) == name:
                found.append(frame.ts)
    return found if child.ts in found else []
