"""Copies of public code with every fix that `lint --fix --unsafe-fixes` writes, for `bench.unsafe_fixes`.

`unsafe_files.json` names files as they were before maintainers took host-device syncs out of them. It has no
source: `MIRRORS/OWNER+NAME/repo` is a git folder of each project, as for `bench.commits`.
"""

from __future__ import annotations

import ast
import io
import json
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from torchtrim.linter import text as linting
from torchtrim.linter.files import Selected, files_of, fix_files, write_fixed
from torchtrim.rewriter.fix import Rewrite
from torchtrim.source.source import SourceFile

FILES = Path(__file__).parent / "unsafe_files.json"
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Corpus(NamedTuple):
    """A folder of public code, where its copy to fix is, what is copied, and which paths in it are linted."""

    name: str
    original: Path
    fixed: Path
    copied: str
    paths: tuple[str, ...]


class Written(NamedTuple):
    """A fix in a file; `unit` is the function at the top of the module, or the method, around it."""

    path: str
    unit: str
    fix: str
    equivalence: str


def packages(folder: Path, work: Path) -> Iterator[Corpus]:
    """One corpus for each unpacked package in a folder."""
    for package in sorted(folder.iterdir()):
        if (package / "__init__.py").exists():
            name = package.name
            yield Corpus(name, folder, work / name, name, (name,))


def commits(mirrors: Path, work: Path) -> Iterator[Corpus]:
    """One corpus for each commit of `unsafe_files.json`, all Python files of its tree beside those linted."""
    for row in json.loads(FILES.read_text()):
        name = f"{row['repository'].replace('/', '+')}@{row['tree'][:10]}"
        corpus = Corpus(name, work / "before" / name, work / name, ".", tuple(row["paths"]))
        if not corpus.original.exists():
            _unpack(mirrors / name.partition("@")[0] / "repo", row["tree"], corpus.original)
        yield corpus


def _copy(corpus: Corpus) -> None:
    """Copy the originals into a project of their own."""
    shutil.rmtree(corpus.fixed, ignore_errors=True)
    shutil.copytree(corpus.original / corpus.copied, corpus.fixed / corpus.copied)
    (corpus.fixed / "pyproject.toml").touch()


def _unpack(repository: Path, tree: str, folder: Path) -> None:
    command = ["git", "-C", str(repository), "archive", tree, "--", ":(glob)**/*.py"]
    pack = subprocess.run(command, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(pack)) as archive:
        chosen = (one for one in archive if one.name.endswith(".py") and one.isfile())
        archive.extractall(folder, chosen, filter="data")


def write(corpus: Corpus) -> list[Written]:
    """Fix a new copy as the command line does, and return what was written where."""
    _copy(corpus)
    written: list[Written] = []
    apply = linting._patched

    def noting(source: SourceFile, rewrites: list[Rewrite]) -> tuple[str, int]:
        text, count = apply(source, rewrites)
        written.extend(map(_written, rewrites[:count]))
        return text, count

    files = files_of([corpus.fixed / path for path in corpus.paths])
    with mock.patch.object(linting, "_patched", noting):
        fixed = fix_files(files, Selected(), corpus.fixed, unsafe=True)
    write_fixed(fixed, corpus.fixed)
    shutil.rmtree(corpus.fixed / ".torchtrim", ignore_errors=True)
    kept = (one for one in written if one.path in fixed.texts)
    return [one._replace(path=str(Path(one.path).relative_to(corpus.fixed))) for one in kept]


def _written(rewrite: Rewrite) -> Written:
    source, line = rewrite.match.source, rewrite.match.lines[0]
    return Written(
        source.path, unit_at(source.tree, line), rewrite.match.fix.name, rewrite.equivalence
    )


def unit_at(tree: ast.Module, line: int) -> str:
    """The name of the function or method around a line; empty where there is none."""
    return next(
        (name for name, node in units(tree.body) if _first(node) <= line <= _last(node)), ""
    )


def units(body: Sequence[ast.stmt], inside: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Functions and methods of a block with their qualified names, not those within other functions."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from units(node.body, f"{inside}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{inside}{node.name}", node
        else:
            for name in ("body", "orelse", "finalbody"):
                yield from units(getattr(node, name, ()), inside)


def _first(node: ast.AST) -> int:
    return min([node.lineno, *(one.lineno for one in node.decorator_list)])  # type: ignore[attr-defined]


def _last(node: ast.AST) -> int:
    return int(node.end_lineno)  # type: ignore[attr-defined]
