"""How many host-device syncs that maintainers of public projects took out `lint` finds before, and after.

    python -m bench.commits --mirrors DIR [--json] [--misses]

`commits.json` names commits whose purpose, or part of it, was to take out syncs, and the removed lines that
are syncs, each judged by hand from the commit. It has no source: `DIR/OWNER+NAME/repo` is a git folder of
each project. A line is found if a finding is on it; a commit is quiet afterwards if no finding is on a line
that it added. A line has a fix if `lint` writes one there with which the finding is gone, and a diff to copy
if `lint` shows one that only a person can decide on. `short`: a fix adds at most as many lines as the commit
did where it removed the lines that the fix removes. `tests of kinds`: it adds a test of a rank, type, shape
or of being a tensor, in any spelling.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench.machine import save
from torchtrim.errors import UnreadableInput
from torchtrim.linter.text import lint_text
from torchtrim.records.finding import Finding
from torchtrim.source.source import read_source

LABELS = Path(__file__).parent / "commits.json"
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_KIND = re.compile(
    r"is_tensor|isinstance|type\(|(\.(dtype|shape|ndim)|\.(dim|size|numel)\([^()]*\))\s*\)?\s*[=!<>]=?"
    r"|is_floating_point|is_complex|[=!]=\s*\(?torch\.(float|int|bool|bfloat)"
)


class Seen(NamedTuple):
    """What came of a commit: labelled lines, those found, those with a fix, findings on what it added."""

    lines: int
    missed: tuple[str, ...]
    fixed: int
    after: tuple[str, ...]
    short: int
    tested: tuple[str, ...]
    shown: int


def seen(row: dict[str, Any], repository: Path) -> Seen:
    """Lint the files of a commit, as they were before it and as it left them."""
    commit = row["commit"]
    before = _findings(repository, f"{commit}^", list(row["lines"]))
    after = _findings(repository, commit, list(row["lines"]))
    labelled = [(path, line) for path, lines in row["lines"].items() for line in lines]
    at = {one: [f for f in before[one[0]] if f.line <= one[1] <= f.end_line] for one in labelled}
    added = {path: _added(repository, commit, path) for path in row["lines"]}
    diffs = {
        one: found.fix.diff
        for one, every in at.items()
        for found in every
        if found.fix and found.fix.kind == "code" and found.fix.diff
    }
    theirs = {path: [*_hunks(repository, commit, path)] for path in row["lines"]}
    return Seen(
        short=sum(
            len(_changed(diff, "+")) <= _added_for(_removed(diff) | {line}, theirs[path])
            for (path, line), diff in diffs.items()
        ),
        tested=tuple(
            f"{path}:{line}" for (path, line), diff in diffs.items() if _adds_test_of_kinds(diff)
        ),
        shown=sum(
            any(f.fix and f.fix.kind != "code" and f.fix.diff for f in found)
            for found in at.values()
        ),
        lines=len(labelled),
        missed=tuple(f"{path}:{line}" for (path, line), found in at.items() if not found),
        fixed=sum(any(f.fix and f.fix.kind == "code" for f in found) for found in at.values()),
        after=tuple(
            f"{path}:{f.line}"
            for path, found in after.items()
            for f in found
            if added[path].intersection(range(f.line, f.end_line + 1))
        ),
    )


def _adds_test_of_kinds(diff: str) -> bool:
    new, old = (len(_KIND.findall("\n".join(_changed(diff, sign)))) for sign in "+-")
    return new > old


def _changed(diff: str, sign: str) -> list[str]:
    lines = diff.splitlines()
    return [line[1:] for line in lines if line.startswith(sign) and not line.startswith(sign * 3)]


def _findings(repository: Path, tree: str, paths: list[str]) -> dict[str, list[Finding]]:
    """By path, with the other files of their folders beside them, so that types flow through them."""
    with tempfile.TemporaryDirectory() as folder:
        names = sorted({path.rpartition("/")[0] or path for path in paths})
        pack = _git(repository, "archive", tree, "--", *names)
        with tarfile.open(fileobj=io.BytesIO(pack)) as archive:
            chosen = (one for one in archive if one.name.endswith(".py") and one.isfile())
            archive.extractall(folder, chosen, filter="data")
        return {path: _of_file(Path(folder, path)) for path in paths}


def _of_file(path: Path) -> list[Finding]:
    if not path.exists():
        return []
    try:
        return lint_text(str(path), read_source(path)[0])
    except UnreadableInput:
        return []


def _added(repository: Path, commit: str, path: str) -> set[int]:
    return {line for _, added in _hunks(repository, commit, path) for line in added}


def _added_for(lines: set[int], hunks: list[tuple[range, range]]) -> int:
    """How many lines hunks added that removed any of these."""
    return sum(len(added) for removed, added in hunks if not lines.isdisjoint(removed))


def _removed(diff: str) -> set[int]:
    """The numbers of the lines that a diff removes."""
    found, at = set(), 0
    for line in diff.splitlines():
        if match := _HUNK.match(line):
            at = int(match[1])
        elif not line.startswith(("---", "+")):
            found |= {at} if line.startswith("-") else set()
            at += 1
    return found


def _hunks(repository: Path, commit: str, path: str) -> Iterator[tuple[range, range]]:
    """Yield the removed and the added lines of each hunk."""
    diff = _git(repository, "show", "--format=", "-U0", commit, "--", path).decode(errors="replace")
    for match in _HUNK.finditer(diff):
        old, removed, new, added = (int(one or 1) for one in match.groups())
        yield range(old, old + removed), range(new, new + added)


def _git(repository: Path, *words: str) -> bytes:
    return subprocess.run(
        ["git", "-C", str(repository), *words], capture_output=True, check=True
    ).stdout


def measure(mirrors: Path) -> tuple[dict[str, Any], list[str]]:
    """All commits: figures, and what was missed or is not quiet."""
    rows = json.loads(LABELS.read_text())
    told: list[str] = []
    results = []
    for row in rows:
        repository = mirrors / row["repository"].replace("/", "+") / "repo"
        one = seen(row, repository)
        results.append(one)
        name = f"{row['repository']} {row['commit'][:10]}"
        told += [f"missed {name} {line}" for line in one.missed]
        told += [f"after  {name} {line}" for line in one.after]
        told += [f"tests  {name} {line}" for line in one.tested]
    lines = sum(one.lines for one in results)
    found = lines - sum(len(one.missed) for one in results)
    return {
        "commits": len(rows),
        "projects": len({row["repository"] for row in rows}),
        "removed_syncs": lines,
        "found": found,
        "recall": round(found / lines, 3),
        "commits_with_all_found": sum(not one.missed for one in results),
        "commits_quiet_afterwards": sum(not one.after for one in results),
        "findings_on_added_lines": sum(len(one.after) for one in results),
        "lines_with_a_fix": sum(one.fixed for one in results),
        "commits_with_a_fix": sum(one.fixed > 0 for one in results),
        "lines_with_a_diff_to_copy": sum(one.shown for one in results),
        "commits_with_a_fix_or_a_diff": sum(one.fixed + one.shown > 0 for one in results),
        "fixes_no_longer_than_theirs": sum(one.short for one in results),
        "fixes_with_tests_of_kinds": sum(len(one.tested) for one in results),
    }, told


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mirrors", type=Path, required=True)
    parser.add_argument(
        "--misses", action="store_true", help="name what was missed or is not quiet"
    )
    parser.add_argument(
        "--json", action="store_true", help="write bench/results/MACHINE/commits.json"
    )
    options = parser.parse_args()
    result, told = measure(options.mirrors)
    for name, value in result.items():
        print(f"{name.replace('_', ' '):<28} {value}")
    if options.misses:
        print(*told, sep="\n")
    if options.json:
        print(save("commits", result))


if __name__ == "__main__":
    main()
