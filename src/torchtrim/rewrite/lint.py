"""One file's source -> findings: where it would wait with its tensors on a device, and what cures it.

No run is watched, so a cure is safe only if it rests on nothing but the form of the source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from torchtrim.errors import UnreadableInput
from torchtrim.records.finding import Cure, Finding
from torchtrim.rewrite.base import Fix, Match
from torchtrim.rewrite.edits import compatible, diff_of, patch
from torchtrim.rewrite.facts import Facts, Refused
from torchtrim.rewrite.registry import matches
from torchtrim.rewrite.source import Source
from torchtrim.rewrite.static_waits import StaticWait, static_waits
from torchtrim.rules.ignores import ignored_codes
from torchtrim.sync.table.lookup import row

WORD = "torch"
"""What is not in a file's text has nothing of torch in it."""

_WHAT = {
    "TT101": "a tensor's value is read on the host",
    "TT102": "a shape depends on the data",
    "TT103": "data is copied to the device and waited for",
    "TT104": "the program asks to wait",
}
_SHOWN = 60
_MOST_ROUNDS = 20
_RANK = ("safe", "unsafe", "refused")
Selected = Callable[[str], bool]


class Offer(NamedTuple):
    """A cure for a place: the fix and the text with it, or why there is none."""

    match: Match
    fix: Fix | None
    reason: str
    text: str = ""

    @property
    def rank(self) -> str:
        """`"safe"`, `"unsafe"` or `"refused"`."""
        return "refused" if self.fix is None else "safe" if self.fix.safe else "unsafe"


class Found(NamedTuple):
    """The waits of one code that begin on one line, and the best cure of them."""

    code: str
    waits: tuple[StaticWait, ...]
    offer: Offer | None

    @property
    def lines(self) -> tuple[int, int]:
        """First and last line."""
        nodes = [wait.node for wait in self.waits]
        return nodes[0].lineno, max(node.end_lineno for node in nodes)  # type: ignore[attr-defined]


def every_code(code: str) -> bool:
    """Each code is wanted."""
    return True


def lint_source(
    source: Source, selected: Selected = every_code, *, whole: bool = True
) -> list[Found]:
    """The waits of a file, by line, but for those that its comments ignore.

    Cures are looked for in the `whole` file, else only in the functions and classes that wait.
    Raises `UnreadableInput` for code that is nested too deeply to be followed.
    """
    try:
        waits = static_waits(source.tree, source.path)
    except RecursionError:
        raise UnreadableInput(f"{source.path} is nested too deeply to be followed.") from None
    groups: dict[tuple[int, str], list[StaticWait]] = {}
    for wait in waits:
        groups.setdefault((wait.node.lineno, row(wait.row).code), []).append(wait)  # type: ignore[attr-defined]
    found = [
        Found(code, tuple(group), None) for (_, code), group in groups.items() if selected(code)
    ]
    kept = list(_not_ignored(source.text, found))
    return _with_offers(source, kept, whole=whole) if kept else []


def lint_text(path: str, text: str, selected: Selected = every_code) -> list[Finding]:
    """The findings of a file's text. Raises `UnreadableInput` where it is no Python.

    A text in which nothing is of torch is not parsed.
    """
    if WORD not in text:
        return []
    source = Source(path, text)
    return [finding_of(source, found) for found in lint_source(source, selected, whole=False)]


def finding_of(source: Source, found: Found) -> Finding:
    """What a report says of waits and their cure."""
    shown = dict.fromkeys(_short(source.segment(wait.node)) for wait in found.waits)
    first, last = found.lines
    return Finding(
        code=found.code,
        path=source.path,
        line=first,
        end_line=last,
        message=f"{', '.join(shown)} waits on a device: {_WHAT[found.code]}",
        count_per_step=0,
        source="modelled",
        cure=_cure(source, found),
    )


def fixed_text(
    path: str, text: str, selected: Selected = every_code, *, unsafe: bool = False
) -> tuple[str, int]:
    """The text with its cures made, round by round until nothing changes, and how many were made.

    `unsafe`: also those that rest on what no run has shown. Raises `UnreadableInput` as `lint_text`.
    """
    made = 0
    written: set[tuple[str, str]] = set()
    for _ in range(_MOST_ROUNDS):
        if WORD not in text:
            break
        source = Source(path, text)
        fixes = compatible(_makeable(lint_source(source, selected), written, unsafe=unsafe))
        if not fixes:
            break
        text, count = _patched(source, fixes)
        written |= {(fix.match.cure.name, edit.text.strip()) for fix in fixes for edit in fix.edits}
        made += count
    return text, made


def _patched(source: Source, fixes: list[Fix]) -> tuple[str, int]:
    """The text with all of the fixes, else with those that leave it Python."""
    try:
        return patch(source, fixes).text, len(fixes)
    except Refused:
        if len(fixes) == 1:
            return source.text, 0
    for fix in fixes:
        try:
            return patch(source, [fix]).text, 1
        except Refused:
            continue
    return source.text, 0


def _makeable(
    found: Iterable[Found], written: set[tuple[str, str]], *, unsafe: bool
) -> Iterator[Fix]:
    """The fixes to make. None is made again of what the same cure wrote."""
    seen = set()
    for one in found:
        fix = one.offer.fix if one.offer is not None else None
        if fix is None or not (fix.safe or unsafe) or _is_own(fix.match, written):
            continue
        if id(fix.match.node) not in seen:
            seen.add(id(fix.match.node))
            yield fix


def _is_own(match: Match, written: set[tuple[str, str]]) -> bool:
    text = match.source.segment(match.node)
    return any(cure == match.cure.name and new and new in text for cure, new in written)


def _not_ignored(text: str, found: Iterable[Found]) -> Iterator[Found]:
    codes = ignored_codes(text) if "torchtrim" in text else {}
    for one in found:
        first, last = one.lines
        if not any(one.code in codes.get(line, ()) for line in range(first, last + 1)):
            yield one


def _with_offers(source: Source, found: list[Found], *, whole: bool) -> list[Found]:
    looked = source if whole else source.only(one.lines[0] for one in found)
    every = list(matches(looked, {one.code for one in found}))
    tried: dict[int, Offer] = {}
    chosen = []
    for one in found:
        fitting = [match for match in every if _fits(match, one)]
        offers = [tried.setdefault(id(match), _offer(match)) for match in fitting]
        best = min(offers, key=lambda offer: _order(offer, one.code), default=None)
        chosen.append(one._replace(offer=best))
    return chosen


def _fits(match: Match, found: Found) -> bool:
    first, last = match.lines
    start, end = found.lines
    return found.code in match.cure.codes and first <= end and start <= last


def _order(offer: Offer, code: str) -> tuple[int, bool, int]:
    """The best cure first: safe ones, those for this code before all, those that rest on less."""
    needs = len(offer.fix.open_needs) if offer.fix is not None else 0
    return _RANK.index(offer.rank), offer.match.cure.codes[0] != code, needs


def _offer(match: Match) -> Offer:
    try:
        fix = match.cure.fix(match, Facts())
        text = patch(match.source, [fix]).text
    except Refused as error:
        return Offer(match, None, str(error))
    needs = f"no run has shown that {' and that '.join(fix.open_needs)}" if fix.open_needs else ""
    return Offer(match, fix, "; ".join(part for part in (fix.risk, needs) if part), text)


def _cure(source: Source, found: Found) -> Cure:
    offer = found.offer
    if offer is None:
        advice = dict.fromkeys(row(wait.row).advice for wait in found.waits)
        return Cure(kind="advice", reason=" ".join(advice))
    name = offer.match.cure.name
    if offer.fix is None:
        return Cure(kind="refused", reason=f"{name}: {offer.reason}")
    reason = name if offer.fix.safe else f"unsafe, {name}: {offer.reason}"
    diff = diff_of(source.path, source.text, offer.text)
    return Cure(kind="code", equivalence=offer.fix.equivalence, diff=diff, reason=reason)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return f"`{line if len(line) <= _SHOWN else line[: _SHOWN - 3] + '...'}`"
