"""Lints one file: finds its syncs, assuming its tensors are on a device, and the fixes for them.

Nothing runs, so a fix is safe only if it depends on nothing but the form of the source.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cache, lru_cache
from pathlib import Path, PurePath
from typing import NamedTuple

from torchtrim.analysis.allow_list import ignored_codes
from torchtrim.errors import UnreadableInput
from torchtrim.linter.kinds import UNKNOWN, ValueKind, is_open
from torchtrim.linter.scope import FileFacts, Outside
from torchtrim.linter.static_syncs import StaticSync, facts_of, outline_of, static_syncs
from torchtrim.records.files import read_head
from torchtrim.records.finding import Finding, Suggestion
from torchtrim.rewriter.edits import compatible, diff_of, patch
from torchtrim.rewriter.fix import Match, Rewrite, matches
from torchtrim.source.facts import Facts, FixRefused, NoTensor, StaticValue
from torchtrim.source.source import SourceFile, spot
from torchtrim.syncs.base import SYNC_CODES
from torchtrim.syncs.lookup import row

_DEPTH = 2  # re-exports followed: a package's `__init__.py`, and one more
_FILES = 512  # files whose facts stay in memory: more than one package's imports
_TREES = 4  # trees are large, and each is needed twice in a row
_MOST_BYTES = 2**20  # larger files are generated code or data
_CLASS = re.compile(rb"^class ([A-Za-z_]\w*)", re.MULTILINE)
_TEST = re.compile(r"test_\w+|\w+_test")
_TESTS = re.compile(r"^(async def|def|class) (test_|Test)", re.MULTILINE)
_DEVICES = re.compile(r"cuda|device|gpu|xpu|npu|hpu|accelerat", re.IGNORECASE)


def outside_of(path: str, used: set[str] | None = None) -> Outside:
    """Return a resolver for functions imported from sibling files and the same package.

    `used`: collects the files that were read.
    """

    @cache
    def outside(full: str) -> ValueKind:
        kind, files = _returned(full, path, _DEPTH)
        if used is not None:
            used.update(files)
        return kind

    return outside


def is_test(path: str, text: str) -> bool:
    """Return True for a file of unit tests: its code runs in no step.

    A script may have the name of one, such as `test_model.py`; without a device its tensors are on the host.
    """
    tests = _TESTS.search(text) is not None or _DEVICES.search(text) is None
    return bool(_TEST.fullmatch(PurePath(path).stem)) and tests


def _returned(full: str, path: str, depth: int) -> tuple[ValueKind, tuple[str, ...]]:
    """Return the result of a function given by full name, such as `..losses.masked_loss`, and the files it
    depends on."""
    within = full.lstrip(".")
    module, _, name = within.rpartition(".")
    file = _file_of(full[: len(full) - len(within)] + module, path)
    if file is None or file == path:
        return UNKNOWN, ()
    stamp = _stamp(file)
    if name in _classes(file, stamp):
        return UNKNOWN, (file,)
    outline = _outline(file, stamp)
    known = outline.returns.get(name)
    if known is not None and is_open(known):
        known = _facts(file, stamp).returns.get(name)
    if known in (None, UNKNOWN) and depth and name in outline.imports:
        known, files = _returned(outline.imports[name], file, depth - 1)
        return known, (file, *files)
    return known if known is not None and known.what != "function" else UNKNOWN, (file,)


def _stamp(file: str) -> tuple[int, int]:
    try:
        status = Path(file).stat()
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns


@lru_cache(_FILES)
def _classes(file: str, stamp: tuple[int, int]) -> frozenset[str]:
    """Return a file's top-level classes, matched in its text without parsing: most imports are classes."""
    try:
        text = read_head(Path(file), _MOST_BYTES) if stamp[0] <= _MOST_BYTES else b""
    except OSError:
        return frozenset()
    return frozenset(name.decode() for name in _CLASS.findall(text))


@lru_cache(_FILES)
def _outline(file: str, stamp: tuple[int, int]) -> FileFacts:
    return outline_of(_tree(file, stamp), file)


@lru_cache(_FILES)
def _facts(file: str, stamp: tuple[int, int]) -> FileFacts:
    try:
        return facts_of(_tree(file, stamp), file, lambda full: UNKNOWN)
    except RecursionError:
        return FileFacts()


@lru_cache(_TREES)
def _tree(file: str, stamp: tuple[int, int]) -> ast.Module:
    """Return a file's tree, empty if it is unreadable or large."""
    try:
        if stamp[0] <= _MOST_BYTES:
            return ast.parse(read_head(Path(file), _MOST_BYTES))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        pass
    return ast.Module([], [])


def _file_of(module: str, path: str) -> str | None:
    dots = len(module) - len(module.lstrip("."))
    parts = [part for part in module.split(".") if part]
    here = Path(path).parent
    for _ in range(dots - 1):
        here = here.parent
    for folder in (here,) if dots else (here, _root(str(here))):
        base = folder.joinpath(*parts)
        for file in (*([base.with_name(f"{base.name}.py")] if parts else []), base / "__init__.py"):
            if file.is_file():
                return str(file)
    return None


@cache
def _root(folder: str) -> Path:
    """Return the folder that contains the package around a file: the first without `__init__.py`."""
    here = Path(folder)
    while (here / "__init__.py").is_file():
        here = here.parent
    return here


WORD = "torch"
"""Files whose text lacks this word do not use torch."""

_SHOWN = 60  # characters of code in a message, which then fits a terminal's line
_MOST_ROUNDS = 20  # far more than fixes of fixes that any file has needed
_MOST_FIXED = 250
"""Lines of a file with syncs that get a search for fixes: bounds the time for long files."""
_LATER = (
    f"No fix was searched for: the search covers only the first {_MOST_FIXED} places of a file. "
)
_NO_TENSORS = frozenset(
    ("plain", "array", "sequence", "device", "dtype", "mapping", "layer", "function")
)
_DTYPES = {"bool": "bool", "int": "int64"}
_RANKS = ("safe", "unsafe", "advice", "refused")
Selected = Callable[[str], bool]


class Candidate(NamedTuple):
    """A possible fix: the rewrite and the text with it, or the reason for refusing it."""

    match: Match
    rewrite: Rewrite | None
    reason: str
    text: str = ""

    @property
    def rank(self) -> str:
        """One of `_RANKS`."""
        if self.rewrite is None:
            return "refused"
        return "advice" if self.rewrite.advice else "safe" if self.rewrite.safe else "unsafe"


class LineSyncs(NamedTuple):
    """Syncs of one code that begin on one line, and the best fix for them."""

    code: str
    syncs: tuple[StaticSync, ...]
    candidate: Candidate | None
    looked: bool = True

    @property
    def lines(self) -> tuple[int, int]:
        """First and last line."""
        nodes = [sync.node for sync in self.syncs]
        return nodes[0].lineno, max(node.end_lineno or node.lineno for node in nodes)


def lint_source(
    source: SourceFile,
    selected: Selected = lambda code: True,
    *,
    whole: bool = True,
    used: set[str] | None = None,
) -> list[LineSyncs]:
    """Return the syncs of a file by line, except those that its comments ignore.

    Search for fixes in the `whole` file, or only in functions and classes with a sync, skipping the
    unchanged branches of guards. `used` collects the files whose functions it calls. Raises
    `UnreadableInput` for code nested too deeply.
    """
    kinds: dict[ast.AST, ValueKind] = {}
    try:
        outside = outside_of(source.path, used)
        syncs = static_syncs(source.tree, source.path, outside, source.text, kinds)
    except RecursionError:
        raise UnreadableInput(f"{source.path} is nested too deeply to be followed.") from None
    groups: dict[tuple[int, str], list[StaticSync]] = {}
    for sync in syncs:
        groups.setdefault((sync.node.lineno, row(sync.row).code), []).append(sync)
    ignored = ignored_codes(source.text) if "torchtrim" in source.text else {}
    found = [
        line
        for (_, code), group in groups.items()
        if selected(code) and not _is_ignored(line := LineSyncs(code, tuple(group), None), ignored)
    ]
    if not whole and found:
        source = source.only(line.lines[0] for line in found)
    if not found:
        return []
    later = [line._replace(looked=False) for line in found[_MOST_FIXED:]]
    return [*_with_candidates(source, found[:_MOST_FIXED], kinds), *later]


def lint_text(
    path: str, text: str, selected: Selected = lambda code: True, used: set[str] | None = None
) -> list[Finding]:
    """Return the findings of a file's text. Raises `UnreadableInput` if it is not Python.

    Texts without torch, and unit tests that name no device, are not parsed. `used` collects the files whose
    functions the text calls.
    """
    if WORD not in text or is_test(path, text):
        return []
    source = SourceFile(path, text)
    return [
        finding_of(source, found) for found in lint_source(source, selected, whole=False, used=used)
    ]


def finding_of(source: SourceFile, found: LineSyncs) -> Finding:
    """Turn syncs and their fix into a finding."""
    shown = dict.fromkeys(_short(source.segment(sync.node)) for sync in found.syncs)
    first, last = found.lines
    return Finding(
        code=found.code,
        path=source.path,
        line=first,
        end_line=last,
        message=f"host-device sync in {', '.join(shown)}: {SYNC_CODES[found.code]}",
        count_per_step=0,
        source="modelled",
        fix=_suggestion(source, found),
    )


def fixed_text(
    path: str, text: str, selected: Selected = lambda code: True, *, unsafe: bool = False
) -> tuple[str, int]:
    """Apply fixes in rounds until nothing changes. Return the text and the number of fixes.

    `unsafe`: also apply fixes that depend on facts only a run could show. Raises `UnreadableInput` as
    `lint_text` does.
    """
    applied = 0
    written: set[tuple[str, str]] = set()
    for _ in range(_MOST_ROUNDS):
        if WORD not in text:
            break
        source = SourceFile(path, text)
        rewrites = compatible(_applicable(lint_source(source, selected), written, unsafe=unsafe))
        if not rewrites:
            break
        text, count = _patched(source, rewrites)
        written |= {
            (rewrite.match.fix.name, edit.text.strip())
            for rewrite in rewrites
            for edit in rewrite.edits
        }
        applied += count
    return text, applied


def _patched(source: SourceFile, rewrites: list[Rewrite]) -> tuple[str, int]:
    """Apply all of the rewrites, or if the result is not Python, one by one those that keep it valid."""
    try:
        return patch(source, rewrites).text, len(rewrites)
    except FixRefused:
        if len(rewrites) == 1:
            return source.text, 0
    for rewrite in rewrites:
        try:
            return patch(source, [rewrite]).text, 1
        except FixRefused:
            continue
    return source.text, 0


def _applicable(
    found: Iterable[LineSyncs], written: set[tuple[str, str]], *, unsafe: bool
) -> Iterator[Rewrite]:
    """Return the rewrites to apply. A fix does not apply again to its own output."""
    seen = set()
    for line in found:
        rewrite = line.candidate.rewrite if line.candidate is not None else None
        if rewrite is None or rewrite.advice or not (rewrite.safe or unsafe):
            continue
        match = rewrite.match
        text = match.source.segment(match.node)
        is_own = any(name == match.fix.name and new and new in text for name, new in written)
        if not is_own and match.node not in seen:
            seen.add(match.node)
            yield rewrite


def _is_ignored(line: LineSyncs, ignored: Mapping[int, Collection[str]]) -> bool:
    first, last = line.lines
    return any(line.code in ignored.get(number, ()) for number in range(first, last + 1))


def _with_candidates(
    source: SourceFile, found: list[LineSyncs], kinds: Mapping[ast.AST, ValueKind]
) -> list[LineSyncs]:
    """Give each line its best fix: one for its code whose match handles one of its syncs."""
    within: defaultdict[ast.AST, set[ast.AST]] = defaultdict(set)
    for node in {sync.node for line in found for sync in line.syncs}:
        for outer in (node, *source.around(node)):
            within[outer].add(node)
    handled = [
        (match, nodes)
        for match in matches(source, {line.code for line in found})
        if (nodes := _handled(match, within))
    ]
    tried: dict[int, Candidate] = {}
    chosen = []
    for line in found:
        own = {sync.node for sync in line.syncs}
        fitting = [
            match for match, nodes in handled if line.code in match.fix.codes and nodes & own
        ]
        for match in fitting:
            tried[id(match)] = tried.get(id(match)) or _candidate(match, kinds)
        candidates = (tried[id(match)] for match in fitting)
        best = min(candidates, key=lambda candidate: _order(candidate, line.code), default=None)
        chosen.append(line._replace(candidate=best))
    return chosen


def _handled(match: Match, within: Mapping[ast.AST, set[ast.AST]]) -> set[ast.AST]:
    """Return the syncs that a match handles, given those within each node."""
    if match.syncs:
        return set(match.syncs)
    if match.begin is None:
        return within.get(match.node, set())
    begin, end = spot(match.begin)[:2], spot(match.node)[2:]
    nodes = within.get(match.source.tree, set())
    return {node for node in nodes if begin <= spot(node)[:2] and spot(node)[2:] <= end}


def _order(candidate: Candidate, code: str) -> tuple[int, bool, int]:
    """Sort key: safe fixes first, then fixes for this code, then those with fewer assumptions."""
    needs = len(candidate.rewrite.open_needs) if candidate.rewrite is not None else 0
    return _RANKS.index(candidate.rank), candidate.match.fix.codes[0] != code, needs


def _candidate(match: Match, kinds: Mapping[ast.AST, ValueKind]) -> Candidate:
    try:
        rewrite = match.fix.rewrite(match, Facts(static=static_values(match, kinds)))
        text = patch(match.source, [rewrite]).text
    except FixRefused as error:
        return Candidate(match, None, str(error))
    if rewrite.advice:
        return Candidate(match, rewrite, rewrite.advice, text)
    reasons = [rewrite.risk] if rewrite.risk else []
    if rewrite.open_needs:
        reasons.append(f"no run has shown that {' and that '.join(rewrite.open_needs)}")
    return Candidate(match, rewrite, "; ".join(reasons), text)


def static_values(match: Match, kinds: Mapping[ast.AST, ValueKind]) -> dict[str, StaticValue]:
    """Return the inferred facts about each part of a match."""
    return {name: _static_value(kinds.get(node, UNKNOWN)) for name, node in match.parts.items()}


def _static_value(kind: ValueKind) -> StaticValue:
    if kind.what in _NO_TENSORS:
        return StaticValue(kind=NoTensor(kind.what))
    if kind.what != "tensor":
        return StaticValue()
    fields: dict[str, object] = {"kind": "tensor"}
    if kind.dtype:
        fields["dtype"] = _DTYPES[kind.dtype]
    if kind.single:
        fields["shape"] = ()
    return StaticValue(**fields)


def _suggestion(source: SourceFile, found: LineSyncs) -> Suggestion:
    if (candidate := found.candidate) is None:
        advice = " ".join(dict.fromkeys(row(sync.row).advice for sync in found.syncs))
        return Suggestion(kind="advice", reason=advice if found.looked else _LATER + advice)
    name = candidate.match.fix.name
    if candidate.rewrite is None:
        return Suggestion(kind="refused", reason=f"{name}: {candidate.reason}")
    diff = diff_of(source.path, source.text, candidate.text)
    if candidate.rewrite.advice:
        return Suggestion(kind="advice", diff=diff, reason=candidate.reason)
    reason = name if candidate.rewrite.safe else f"unsafe, {name}: {candidate.reason}"
    return Suggestion(
        kind="code", equivalence=candidate.rewrite.equivalence, diff=diff, reason=reason
    )


def _short(text: str) -> str:
    line = " ".join(text.split())
    return f"`{line if len(line) <= _SHOWN else line[: _SHOWN - 3] + '...'}`"
