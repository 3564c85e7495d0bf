"""Waiting calls -> sites: the lines of user code that make the host wait, each with its count."""

from __future__ import annotations

import ast
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
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

_MOST_BYTES = 2**22  # Arbitrary: far above any source file written by hand.
_MOST_PARTS = 64  # Arbitrary: bounds the search for a path from an untrusted file.
_BUILT_IN = re.compile(r"<built-in (?:method|function) (\w+)")
_CALLED = re.compile(r"\(\d+\): (\w+)$")
_COPIES = frozenset(
    (
        *("to", "cuda", "cpu", "copy_", "numpy", "float", "half", "double", "long", "int", "bool"),
        *("type", "bfloat16", "tensor", "as_tensor", "new_tensor", "pin_memory", "asarray"),
    )
)
_READS = frozenset(
    (
        *("item", "tolist", "float", "int", "bool", "print", "range", "format", "equal"),
        *("allclose", "max", "min", "any", "all", "str", "repr", "round", "len", "isinstance"),
    )
)
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
_SCOPES: dict[str, type[ast.expr]] = {
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
        """Return the lines of the function defined at a line that may contain the sync.

        `hints` name the call to look for, best first: a builtin, a function called from there, operators.
        Empty if the source is missing or has no such call.
        """
        key = (path, definition, function, hints)
        if key not in self.found:
            module = self._module(path)
            node = _function(module, definition, function) if module is not None else None
            by_hint = (sorted(set(_matching(node, hint))) for hint in hints if node is not None)
            self.found[key] = next(filter(None, by_hint), [])
        return self.found[key]

    def has(self, path: str) -> bool:
        """Return True if the file is below the folder."""
        return self._module(path) is not None

    def _module(self, path: str) -> ast.Module | None:
        if path not in self.parsed:
            file, module = self._find(path), None
            with suppress(UnreadableInput, SyntaxError, ValueError, RecursionError, MemoryError):
                module = ast.parse(read_bounded(file, _MOST_BYTES)) if file is not None else None
            self.parsed[path] = module
        return self.parsed[path]

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
    match = _BUILT_IN.match(frame) or _CALLED.search(frame)
    return match[1] if match else ""


def hints_of(child: str, operators: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names to look for: the called frame's, then the operators', outermost first."""
    name = called_by(child)
    return ((f"call {name}",) if name else ()) + operators


def _function(module: ast.Module, line: int, name: str) -> ast.AST | None:
    if name == "<module>":
        return module
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            if first <= line <= node.lineno:
                return node
        if name in _SCOPES and isinstance(node, _SCOPES[name]) and node.lineno == line:
            return node
    return None


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of the function itself, not of functions defined inside it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            continue
        yield child
        yield from _own(child)


def _matching(function: ast.AST, hint: str) -> Iterator[int]:
    by_name = hint.startswith("call ")
    name = hint.removeprefix("call ") if by_name else hint.rpartition("::")[2].strip("_")
    names = frozenset((name,)) if by_name else _BY_OPERATOR.get(hint, frozenset((name,)))
    for node in _own(function):
        if isinstance(node, ast.Call) and _called(node) in names:
            # The line of the called name, which may not be the first line of a chain of calls.
            chained = isinstance(node.func, ast.Attribute)
            yield (node.func.end_lineno if chained else None) or node.lineno
        elif by_name:
            continue
        elif isinstance(node, ast.Subscript) and _indexes(hint, node):
            yield node.lineno
        elif hint == "aten::is_nonzero":
            if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
                yield node.test.lineno
            elif isinstance(node, ast.BoolOp):
                yield from (value.lineno for value in node.values)


def _called(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _indexes(hint: str, node: ast.Subscript) -> bool:
    if isinstance(node.slice, ast.Constant | ast.Slice):
        return False
    if isinstance(node.ctx, ast.Store):
        return hint in ("aten::index_put_", "aten::_index_put_impl_")
    return hint == "aten::index"


_STEP = "ProfilerStep"
_MOST_FRAMES = 20_000  # Arbitrary; bounds the search for one line.
Key = tuple[str, str, int, str, str, bool]


@dataclass(kw_only=True, eq=False)
class SyncSite:
    """A place and its waiting calls; `stands` counts a copy and its sync once."""

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
    sites: dict[Key, SyncSite] = {}
    last: dict[tuple[str, str], Wait] = {}
    for wait in own:
        before = last.get(lane_of(wait.call))
        last[lane_of(wait.call)] = wait
        of_forward = forward.get(id(wait))
        key, site = _site(wait, of_forward, sources)
        site = sites.setdefault(key, site)
        site.calls.append(wait.call)
        site.stands += before is None or not same_stand(before, wait)
        if sources is not None and site.frame is not None and not site.frame.exact:
            site.lines.update(_lines(trace, wait, of_forward, site.frame, sources))
    return sorted(sites.values(), key=lambda site: -site.wait_ms)


def _site(
    wait: Wait, forward: CallMoment | None, sources: SourceFolder | None
) -> tuple[Key, SyncSite]:
    has = sources.has if sources is not None else lambda path: False
    frame = place_of(wait.frames, has)
    if frame is None and forward is not None:
        frame = place_of(frames_of(forward), has)
    innermost = wait.moment.innermost
    op = innermost.name if innermost is not None else wait.call.name
    within = _within(wait.moment)
    phase: Phase = "backward" if wait.moment.backward is not None else "forward"
    where = (frame.path, frame.function, frame.line) if frame else ("", "", 0)
    site = SyncSite(frame=frame, op=op, within=within, phase=phase, is_device=wait.is_device)
    return (*where, op, "" if frame else within, wait.is_device), site


def _within(moment: CallMoment) -> str:
    """Return the innermost annotation, else the outermost operator."""
    marks = [op.name for op in moment.operators if not op.name.startswith(_STEP)]
    named = [op.name for op in moment.operators if is_annotation(op) and op.name in marks]
    return (named[-1:] or marks[:1] or [""])[0]


def _forward(trace: Trace, waits: list[Wait]) -> dict[int, CallMoment]:
    """Return the forward operator's moment, for waits in backward that have no frames."""
    unplaced = [
        (wait, backward.args.sequence)
        for wait in waits
        if (backward := wait.moment.backward) is not None and backward.args is not None
        if place_of(wait.frames) is None
    ]
    if not unplaced:
        return {}
    numbers = {number for _, number in unplaced}
    by_number: dict[object, list[Event]] = defaultdict(list)
    for op in trace.operators:
        if op.args is not None and op.args.sequence in numbers and not is_backward(op):
            by_number[op.args.sequence].append(op)
    makers: dict[int, Event] = {}
    for wait, number in unplaced:
        earlier = [op for op in by_number[number] if op.ts < wait.call.ts]
        elsewhere = [op for op in earlier if lane_of(op) != lane_of(wait.call)]
        if elsewhere or earlier:
            makers[id(wait)] = (elsewhere or earlier)[-1]
    return dict(zip(makers, moments(trace, makers.values()), strict=True))


def _lines(
    trace: Trace, wait: Wait, forward: CallMoment | None, frame: Frame, sources: SourceFolder
) -> list[int]:
    """Return the lines that may have waited; one if the source and the frames' order determine it."""
    moment = wait.moment if place_of(wait.frames) is not None else (forward or wait.moment)
    parsed = [parse_frame(event.name, exact=False) for event in moment.frames]
    at = max((i for i, candidate in enumerate(parsed) if candidate == frame), default=-1)
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
    starts = []
    begin = bisect_right(trace.frames, parent.ts, key=lambda frame: frame.ts)
    for frame in islice(trace.frames, begin, begin + _MOST_FRAMES):
        if frame.ts > parent.end:
            break
        if frame.ts >= until and frame is not parent and lane_of(frame) == lane:
            until = frame.end
            if called_by(frame.name) == name:
                starts.append(frame.ts)
    return starts if child.ts in starts else []
