"""Whether code that `lint --fix --unsafe-fixes` wrote still runs: public packages and files, by function.

    pip download --no-deps PACKAGE ...        # and unpack each into DIR
    python -m bench.unsafe_fixes --packages DIR --mirrors MIRRORS [--only NAME ...] [--seconds 2] [--json]

Each changed file has to compile, and to differ in the changed functions and its imports alone. Arguments are
drawn for each changed function, which is called on them before and after. A draw counts where the original
returns: the fixed function has to return the same, and to leave arguments, gradients and random numbers the
same. Accepted draws are made again on an emulated device. A function is called if a draw counts, and reached
if one ran a line that was changed. Imports of what is not installed give stand-ins (`unsafe_loading`).
`--json` keeps the results of corpora that are not named.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench import unsafe_calls as calls
from bench.machine import save, saved
from bench.unsafe_loading import add_imports, module_of, pairs_of
from bench.unsafe_written import Corpus, Written, commits, packages, units, write

_IMPORT_SECONDS = 120
_ALL_SECONDS = 3600
_SHOWN = 100


def broken(before: str, after: str) -> str:
    """Why a changed file is not right as a whole; empty where it is."""
    try:
        compile(after, "fixed.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        return f"does not compile: {error}"
    one, other = (_outside(text) for text in (before, after))
    return "" if one == other else "differs outside of functions"


def _outside(text: str) -> list[str]:
    """What a file says outside of its functions and imports."""
    tree = ast.parse(text)
    for _, node in units(tree.body):
        node.body, node.decorator_list = [], []  # type: ignore[attr-defined]
    return [ast.dump(one) for one in tree.body if not isinstance(one, ast.Import | ast.ImportFrom)]


def changed_lines(before: str, after: str) -> set[int]:
    """The lines before that fixes replaced, or next to which they put something."""
    matcher = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    return {
        line
        for tag, start, end, *_ in matcher.get_opcodes()
        if tag != "equal"
        for line in range(start + 1, max(end, start + 1) + 1)
    }


def results_of(corpus: Corpus, seconds: float) -> list[dict[str, Any]]:
    """What became of each changed function of a corpus."""
    found = []
    warnings.simplefilter("ignore")
    by_file = defaultdict(list)
    for one in write(corpus):
        by_file[one.path].append(one)
    for path, written in sorted(by_file.items()):
        for row in _of_file(corpus, path, written, seconds):
            found.append({"corpus": corpus.name, **row})
            for line in _told(found[-1]):
                print(line, flush=True)
    return found


def _of_file(
    corpus: Corpus, path: str, written: Sequence[Written], seconds: float
) -> Iterator[dict[str, Any]]:
    before, after = ((root / path).read_text() for root in (corpus.original, corpus.fixed))
    why = broken(before, after)
    module: Any = None
    if not why:
        try:
            with calls._within(_IMPORT_SECONDS):
                module = module_of(corpus.original, path)
            add_imports(module, before, after)
        except (Exception, calls.TooLong, SystemExit) as error:
            module, unloaded = None, f"{type(error).__name__}: {error}"
    for unit in dict.fromkeys(one.unit for one in written):
        fixes = [one for one in written if one.unit == unit]
        row = {"path": path, "unit": unit, "fixes": sorted({one.fix for one in fixes})}
        row["written"] = len(fixes)
        if module is None:
            yield row | {"broken": why} if why else row | {"died": f"cannot import: {unloaded}"}
            continue
        exact = all(one.equivalence == "BITWISE" for one in fixes)
        yield row | calls.apart(
            lambda u=unit, e=exact: _of_unit(module, before, after, u, e, seconds),
            12 * seconds + 20,
        )


def _of_unit(
    module: Any, before: str, after: str, unit: str, exact: bool, seconds: float
) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(True, warn_only=True)
    os.chdir(tempfile.mkdtemp())
    calls.limit()
    found: dict[str, Any] = {}
    for pair in pairs_of(module, before, after, unit):
        equivalence = "BITWISE" if exact else "ROUNDING"
        one = calls.Unit(pair, changed_lines(before, after), equivalence)
        again = calls.tried(one, seconds, unit)
        found = again if again.get("calls", 0) >= found.get("calls", 0) else found
        if again["failures"]:
            return again
    return found


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts over changed functions, in all and by fix."""
    files = {(row["corpus"], row["path"]): row.get("broken", "") for row in rows}
    failing = [row for row in rows if row.get("failures")]
    return {
        "changed_files": len(files),
        "files_that_do_not_compile": sum("compile" in why for why in files.values()),
        "files_that_differ_elsewhere": sum("differs" in why for why in files.values()),
        "fixes_written": sum(row["written"] for row in rows),
        "changed_functions": len(rows),
        "changed_functions_by_fix": dict(Counter(fix for row in rows for fix in row["fixes"])),
        "called": sum(row.get("calls", 0) > 0 for row in rows),
        "reached": sum(row.get("reached", 0) > 0 for row in rows),
        "calls": sum(row.get("calls", 0) for row in rows),
        "calls_that_reached": sum(row.get("reached", 0) for row in rows),
        "calls_on_an_emulated_device": sum(row.get("emulated", 0) for row in rows),
        "functions_that_break": len(failing),
        "breaking_by_fix": dict(Counter(fix for row in failing for fix in row["fixes"])),
    }


def _short(row: dict[str, Any]) -> dict[str, Any]:
    """A row without the errors of draws, but for the most frequent one of a function never called."""
    short = {name: value for name, value in row.items() if name != "errors"}
    first = row.get("died") or next(iter(row.get("errors", ())), "")
    return short if row.get("calls") else {**short, "uncalled": first[:_SHOWN]}


def _told(row: dict[str, Any]) -> Iterator[str]:
    where = f"{row['corpus']} {row['path']} {row['unit'] or '(module)'} {','.join(row['fixes'])}"
    for failure in row.get("failures", ()):
        yield f"BREAKS {where}: {failure}"
    if not row.get("calls"):
        why = row.get("broken") or row.get("died") or "; ".join(row.get("errors", ()))
        yield f"uncalled {where}: {why}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--packages", type=Path)
    parser.add_argument("--mirrors", type=Path)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir(), "unsafe_fixes"))
    parser.add_argument(
        "--only", nargs="*", help="packages, or projects of commits, by their names"
    )
    parser.add_argument("--seconds", type=float, default=2.0, help="for each function")
    parser.add_argument(
        "--json", action="store_true", help="write bench/results/MACHINE/unsafe_fixes.json"
    )
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for corpus in _corpora(options):
        if options.only and not corpus.name.startswith(tuple(options.only)):
            continue
        found = calls.apart(lambda c=corpus: {"rows": results_of(c, options.seconds)}, _ALL_SECONDS)
        mine = found.get("rows", [])
        print(
            corpus.name, summary(mine) if mine else found.get("died", "nothing changed"), flush=True
        )
        rows += mine
    print(summary(rows))
    if options.json:
        print(save("unsafe_fixes", _record(rows)))


def _record(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is kept: figures, in all and by corpus, and each function; those of other corpora stay."""
    ran = {row["corpus"] for row in rows}
    kept = [row for row in saved("unsafe_fixes").get("rows", ()) if row["corpus"] not in ran]
    every = sorted(
        [*kept, *map(_short, rows)], key=lambda row: (row["corpus"], row["path"], row["unit"])
    )
    return {
        "figures": summary(every),
        "corpora": {
            name: summary([row for row in every if row["corpus"] == name])
            for name in dict.fromkeys(row["corpus"] for row in every)
        },
        "rows": every,
    }


def _corpora(options: argparse.Namespace) -> Iterator[Corpus]:
    if options.packages:
        yield from packages(options.packages, options.work)
    if options.mirrors:
        yield from commits(options.mirrors, options.work)


if __name__ == "__main__":
    main()
