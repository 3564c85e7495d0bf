"""Makes untrusted names harmless: no control characters, no bidi marks, never too wide."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from unicodedata import category

import msgspec
from rich.cells import cell_len

from torchtrim.records import Certificate, Finding, Report
from torchtrim.records.fix import Fixes

_BLANK = frozenset("\t\n\r\v\f\x85\u2028\u2029")
_DROPPED = frozenset(("Cc", "Cf", "Cs", "Co"))
_ELLIPSIS = "..."
_REST = "... (whole in report.json)"
_BREAK = re.compile(r"(?<!\+-)\s+(?!(?:%|[KMGT]iB|B|s|ms|us)(?:\W|$))")
_QUOTED = re.compile(r"`[^`]*`")
_PATHLIKE = re.compile(
    r"""(?<![^\s"'()<>,`])[^\s"'()<>,`]*\.py\b(?::\d+)?"""
    r"""|(?<![\w/])[/~][\w.~@+-]*(?:/[\w.@+-]+)+/?"""
    r"""|\b[A-Za-z]:\\[^\s"'()<>,`]+"""
)

_cuts: ContextVar[list[str] | None] = ContextVar("cuts", default=None)


@contextmanager
def noting_cuts() -> Iterator[list[str]]:
    """Collect the texts that are shortened or left out in this block, so that it can say where they are."""
    cuts: list[str] = []
    token = _cuts.set(cuts)
    try:
        yield cuts
    finally:
        _cuts.reset(token)


def note_cut(text: str) -> None:
    """Note that a text is shortened or left out."""
    if (cuts := _cuts.get()) is not None:
        cuts.append(text)


def clean(text: str, encoding: str = "utf-8") -> str:
    """Return `text` on one line, without control, format and bidi characters, writable in `encoding`."""
    kept = "".join(
        " " if c in _BLANK else c for c in text if c in _BLANK or category(c) not in _DROPPED
    )
    return kept.encode(encoding, "backslashreplace").decode(encoding)


def at_most(text: str, most: int) -> str:
    """Return a text of at most some characters, which says where the rest of a longer one is."""
    return text if len(text) <= most else text[: most - len(_REST)].rstrip() + _REST


def keep_right(text: str, width: int) -> str:
    """Shorten `text` from the left to at most `width` cells, so that a path keeps its file and line.

    If only the file and line fit, return them without an ellipsis.
    """
    if cell_len(text) <= width:
        return text
    note_cut(text)
    dots = _ELLIPSIS if width > len(_ELLIPSIS) else ""
    tail = _fitting(reversed(text), width - len(dots))[::-1]
    slash, name = tail.find("/"), text[text.rfind("/") + 1 :]
    if slash < 0 and name and cell_len(name) <= width:
        return name
    return dots + (tail[slash:] if 0 < slash <= len(tail) // 2 else tail.lstrip("."))


def keep_left(text: str, width: int) -> str:
    """Shorten `text` from the right to at most `width` cells, so that a sentence keeps its start."""
    if cell_len(text) <= width:
        return text
    note_cut(text)
    dots = _ELLIPSIS if width > len(_ELLIPSIS) else ""
    return _fitting(text, width - len(dots)).rstrip() + dots


def _fitting(characters: Iterable[str], width: int) -> str:
    kept, used = [], 0
    for character in characters:
        used += cell_len(character)
        if used > width:
            break
        kept.append(character)
    return "".join(kept)


def wrap(text: str, width: int) -> list[str]:
    """Wrap text at spaces, but not before a unit, into lines of at most `width` cells.

    A word that is too long loses its start.
    """
    lines = [""]
    for word in _BREAK.split(text.strip()):
        word = keep_right(word, width)
        joined = f"{lines[-1]} {word}".strip()
        if cell_len(joined) <= width:
            lines[-1] = joined
        else:
            lines.append(word)
    return [line for line in lines if line]


def sentence(text: str, width: int, most: int) -> list[str]:
    """Wrap `text` into at most `most` lines, and shorten the last one if the text is longer."""
    pieces = wrap(text, width)
    if len(pieces) <= most:
        return pieces
    return [*pieces[: most - 1], keep_left(" ".join(pieces[most - 1 :]), width)]


def without_source(report: Report) -> Report:
    """Remove all paths, line numbers, diffs and the script name from a report."""
    paths = [report.script, *(f.path for f in report.findings), *(h.path for h in report.holders)]
    first = report.certificate.first_difference if report.certificate else None
    known = _with_names([*paths, first.path, first.other_path] if first else paths)
    return msgspec.structs.replace(
        report,
        script="",
        project="",
        findings=tuple(_bare_finding(f, known) for f in report.findings),
        holders=tuple(
            msgspec.structs.replace(
                h, path="", line=0, made_path="", made_line=0, why=_scrub(h.why, known)
            )
            for h in report.holders
        ),
        peak_parts=tuple(
            msgspec.structs.replace(p, what=_scrub(p.what, known)) for p in report.peak_parts
        ),
        certificate=report.certificate and _bare_certificate(report.certificate, known),
        notes=tuple(_scrub(note, known) for note in report.notes),
        allowed=(),
        fixes=report.fixes and _bare_fixes(report.fixes, known),
        next="",
    )


def scrubbed(text: str, paths: Iterable[str]) -> str:
    """Remove the given paths, their file names and anything that looks like a path from `text`."""
    return _scrub(text, _with_names(paths))


def _with_names(paths: Iterable[str]) -> list[str]:
    known = {part for path in paths for part in (path, re.split(r"[/\\]", path)[-1])}
    return sorted((part for part in known if len(part) > 2), key=len, reverse=True)


def _scrub(text: str, known: list[str]) -> str:
    for path in known:
        text = text.replace(path, _ELLIPSIS)
    return _PATHLIKE.sub(_ELLIPSIS, text)


def _bare_finding(finding: Finding, known: list[str]) -> Finding:
    reason = _scrub(finding.fix.reason, known) if finding.fix else ""
    if finding.fix and finding.fix.kind in ("code", "refused"):
        reason = _QUOTED.sub(_ELLIPSIS, reason)
    fix = finding.fix and msgspec.structs.replace(finding.fix, diff=None, reason=reason)
    message = _scrub(finding.message, known)
    return msgspec.structs.replace(finding, path="", line=0, end_line=0, message=message, fix=fix)


def _bare_fixes(fixes: Fixes, known: list[str]) -> Fixes:
    places = tuple(
        msgspec.structs.replace(
            fix,
            path="",
            line=0,
            diff="",
            reason=_QUOTED.sub(_ELLIPSIS, _scrub(fix.reason, known)),
            kinds=_QUOTED.sub(_ELLIPSIS, _scrub(fix.kinds, known)),
        )
        for fix in fixes.places
    )
    proof = fixes.certificate and _bare_certificate(fixes.certificate, known)
    return msgspec.structs.replace(fixes, places=places, diff="", certificate=proof)


def _bare_certificate(certificate: Certificate, known: list[str]) -> Certificate:
    first = certificate.first_difference
    return msgspec.structs.replace(
        certificate,
        compared=tuple(_scrub(text, known) for text in certificate.compared),
        first_difference=first
        and msgspec.structs.replace(first, path="", line=0, other_path="", other_line=0),
        reason=_scrub(certificate.reason, known),
        otherwise=_scrub(certificate.otherwise, known),
    )
