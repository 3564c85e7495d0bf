"""One file's source -> findings: its syncs, were its tensors on a device, and what would fix them.

No run is watched, so a fix is safe only if it rests on nothing but the form of the source.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from torchtrim.analysis.ignores import ignored_codes
from torchtrim.errors import UnreadableInput
from torchtrim.linter.kinds import UNKNOWN, Kind
from torchtrim.linter.project import is_cpu_test, outside_of
from torchtrim.linter.static_syncs import StaticSync, static_syncs
from torchtrim.records.finding import Finding, Suggestion
from torchtrim.rewriter.edits import compatible, diff_of, patch
from torchtrim.rewriter.fix import Match, Rewrite
from torchtrim.rewriter.registry import matches
from torchtrim.source.branches import is_fallback
from torchtrim.source.facts import Facts, NoTensor, Refused, Told
from torchtrim.source.source import Source, spot
from torchtrim.syncs.lookup import row

WORD = "torch"
"""What is not in a file's text has nothing of torch in it."""

_WHAT = {
    "TT101": "a tensor's value is read on the host",
    "TT102": "a shape depends on the data",
    "TT103": "data is copied to the device while the host waits",
    "TT104": "the program asks for it",
}
_SHOWN = 60
_MOST_ROUNDS = 20
_MOST_FIXED = 250
"""How many places of a file a fix is looked for, so that the time is linear in the file."""
_LATER = f"No fix was looked for: only the first {_MOST_FIXED} places of a file are. "
_NO_TENSORS = frozenset(
    ("plain", "array", "sequence", "device", "dtype", "mapping", "layer", "function")
)
_DTYPES = {"bool": "bool", "int": "int64"}
_RANK = ("safe", "unsafe", "refused")
Selected = Callable[[str], bool]


class Candidate(NamedTuple):
    """A fix for a place: the rewrite and the text with it, or why there is none."""

    match: Match
    rewrite: Rewrite | None
    reason: str
    text: str = ""

    @property
    def rank(self) -> str:
        """`"safe"`, `"unsafe"` or `"refused"`."""
        return "refused" if self.rewrite is None else "safe" if self.rewrite.safe else "unsafe"


class Found(NamedTuple):
    """The syncs of one code that begin on one line, and the best fix of them."""

    code: str
    syncs: tuple[StaticSync, ...]
    candidate: Candidate | None
    looked: bool = True

    @property
    def lines(self) -> tuple[int, int]:
        """First and last line."""
        nodes = [sync.node for sync in self.syncs]
        return nodes[0].lineno, max(node.end_lineno for node in nodes)  # type: ignore[attr-defined]


def every_code(code: str) -> bool:
    """Each code is wanted."""
    return True


def lint_source(
    source: Source,
    selected: Selected = every_code,
    *,
    whole: bool = True,
    used: set[str] | None = None,
) -> list[Found]:
    """The syncs of a file, by line, but for those that its comments ignore.

    Fixes are looked for in the `whole` file, else only in the functions and classes with a sync, and what
    a guard keeps as it was is left out. `used` gets the files whose functions it calls. Raises
    `UnreadableInput` for code that is nested too deeply to be followed.
    """
    kinds: dict[ast.AST, Kind] = {}
    try:
        outside = outside_of(source.path, used)
        syncs = static_syncs(source.tree, source.path, outside, source.text, kinds)
    except RecursionError:
        raise UnreadableInput(f"{source.path} is nested too deeply to be followed.") from None
    groups: dict[tuple[int, str], list[StaticSync]] = {}
    for sync in syncs:
        groups.setdefault((sync.node.lineno, row(sync.row).code), []).append(sync)  # type: ignore[attr-defined]
    found = [
        Found(code, tuple(group), None) for (_, code), group in groups.items() if selected(code)
    ]
    kept = list(_not_ignored(source.text, found))
    looked = source
    if not whole and kept:
        looked = source.only(one.lines[0] for one in kept)
        kept = [one for one in kept if not _is_kept(looked, one)]
    if not kept:
        return []
    later = [one._replace(looked=False) for one in kept[_MOST_FIXED:]]
    return [*_with_candidates(looked, kept[:_MOST_FIXED], kinds), *later]


def lint_text(
    path: str, text: str, selected: Selected = every_code, used: set[str] | None = None
) -> list[Finding]:
    """The findings of a file's text. Raises `UnreadableInput` where it is no Python.

    A text in which nothing is of torch is not parsed, nor unit tests that name no device. `used` gets the
    files whose functions it calls.
    """
    if WORD not in text or is_cpu_test(path, text):
        return []
    source = Source(path, text)
    return [
        finding_of(source, found) for found in lint_source(source, selected, whole=False, used=used)
    ]


def finding_of(source: Source, found: Found) -> Finding:
    """What a report says of syncs and their fix."""
    shown = dict.fromkeys(_short(source.segment(sync.node)) for sync in found.syncs)
    first, last = found.lines
    return Finding(
        code=found.code,
        path=source.path,
        line=first,
        end_line=last,
        message=f"host-device sync in {', '.join(shown)}: {_WHAT[found.code]}",
        count_per_step=0,
        source="modelled",
        fix=_suggestion(source, found),
    )


def fixed_text(
    path: str, text: str, selected: Selected = every_code, *, unsafe: bool = False
) -> tuple[str, int]:
    """The text with its fixes applied, round by round until nothing changes, and how many were.

    `unsafe`: also those that rest on what no run has shown. Raises `UnreadableInput` as `lint_text`.
    """
    applied = 0
    written: set[tuple[str, str]] = set()
    for _ in range(_MOST_ROUNDS):
        if WORD not in text:
            break
        source = Source(path, text)
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


def _patched(source: Source, rewrites: list[Rewrite]) -> tuple[str, int]:
    """The text with all of the rewrites, else with those that leave it Python."""
    try:
        return patch(source, rewrites).text, len(rewrites)
    except Refused:
        if len(rewrites) == 1:
            return source.text, 0
    for rewrite in rewrites:
        try:
            return patch(source, [rewrite]).text, 1
        except Refused:
            continue
    return source.text, 0


def _applicable(
    found: Iterable[Found], written: set[tuple[str, str]], *, unsafe: bool
) -> Iterator[Rewrite]:
    """The rewrites to apply. None is applied again of what the same fix wrote."""
    seen = set()
    for one in found:
        rewrite = one.candidate.rewrite if one.candidate is not None else None
        if rewrite is None or not (rewrite.safe or unsafe) or _is_own(rewrite.match, written):
            continue
        if id(rewrite.match.node) not in seen:
            seen.add(id(rewrite.match.node))
            yield rewrite


def _is_own(match: Match, written: set[tuple[str, str]]) -> bool:
    text = match.source.segment(match.node)
    return any(name == match.fix.name and new and new in text for name, new in written)


def _not_ignored(text: str, found: Iterable[Found]) -> Iterator[Found]:
    codes = ignored_codes(text) if "torchtrim" in text else {}
    for one in found:
        first, last = one.lines
        if not any(one.code in codes.get(line, ()) for line in range(first, last + 1)):
            yield one


def _with_candidates(
    source: Source, found: list[Found], kinds: Mapping[ast.AST, Kind]
) -> list[Found]:
    every = list(matches(source, {one.code for one in found}))
    spans = [match.lines for match in every]
    tried: dict[int, Candidate] = {}
    chosen = []
    for one in found:
        fitting = [
            match for match, span in zip(every, spans, strict=True) if _fits(match, span, one)
        ]
        candidates = [tried.setdefault(id(match), _candidate(match, kinds)) for match in fitting]
        best = min(candidates, key=lambda candidate: _order(candidate, one.code), default=None)
        chosen.append(one._replace(candidate=best))
    return chosen


def _is_kept(source: Source, found: Found) -> bool:
    return all(is_fallback(source, sync.node) for sync in found.syncs)


def _fits(match: Match, span: tuple[int, int], found: Found) -> bool:
    """Whether the match has one of the syncs in it, and its fix is for such."""
    (first, last), (start, end) = span, found.lines
    if first > end or start > last or found.code not in match.fix.codes:
        return False
    if match.syncs:
        return any(one.node is node for one in found.syncs for node in match.syncs)
    begin, close = spot(match.begin or match.node)[:2], spot(match.node)[2:]
    return any(
        begin <= at[:2] and at[2:] <= close for at in (spot(one.node) for one in found.syncs)
    )


def _order(candidate: Candidate, code: str) -> tuple[int, bool, int]:
    """The best fix first: safe ones, those for this code before all, those that rest on less."""
    needs = len(candidate.rewrite.open_needs) if candidate.rewrite is not None else 0
    return _RANK.index(candidate.rank), candidate.match.fix.codes[0] != code, needs


def _candidate(match: Match, kinds: Mapping[ast.AST, Kind]) -> Candidate:
    try:
        rewrite = match.fix.rewrite(match, Facts(told=told_of(match, kinds)))
        text = patch(match.source, [rewrite]).text
    except Refused as error:
        return Candidate(match, None, str(error))
    needs = (
        f"no run has shown that {' and that '.join(rewrite.open_needs)}"
        if rewrite.open_needs
        else ""
    )
    return Candidate(
        match, rewrite, "; ".join(part for part in (rewrite.risk, needs) if part), text
    )


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


def _suggestion(source: Source, found: Found) -> Suggestion:
    candidate = found.candidate
    if candidate is None:
        advice = dict.fromkeys(row(sync.row).advice for sync in found.syncs)
        return Suggestion(kind="advice", reason=("" if found.looked else _LATER) + " ".join(advice))
    name = candidate.match.fix.name
    if candidate.rewrite is None:
        return Suggestion(kind="refused", reason=f"{name}: {candidate.reason}")
    reason = name if candidate.rewrite.safe else f"unsafe, {name}: {candidate.reason}"
    diff = diff_of(source.path, source.text, candidate.text)
    return Suggestion(
        kind="code", equivalence=candidate.rewrite.equivalence, diff=diff, reason=reason
    )


def _short(text: str) -> str:
    line = " ".join(text.split())
    return f"`{line if len(line) <= _SHOWN else line[: _SHOWN - 3] + '...'}`"
