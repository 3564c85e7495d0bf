"""Classes of the project, by the names under which a file uses them."""

from __future__ import annotations

import ast
from functools import lru_cache
from pathlib import Path

from torchtrim.errors import UnreadableInput
from torchtrim.source.source import SourceFile, read_source


def class_of(name: ast.expr, source: SourceFile) -> ast.ClassDef | None:
    """Return the class without bases that a name is, in the file itself or in one that it imports."""
    dotted = source.dotted(name)
    if dotted is None:
        return _in(source.tree, name.id) if isinstance(name, ast.Name) else None
    module, _, last = dotted.rpartition(".")
    for folder in list(Path(source.path).resolve().parents)[:_MOST_FOLDERS]:
        path = folder.joinpath(*module.split(".")) if module else folder
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if module and file.is_file():
                return _in(_tree(file), last)
    return None


_MOST_FOLDERS = 4
"""Folders above a file that may be the project's root. Arbitrary: few scripts lie deeper."""


def _in(tree: ast.Module, name: str) -> ast.ClassDef | None:
    found = [one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == name]
    plain = len(found) == 1 and not found[0].keywords and not found[0].decorator_list
    bases = [ast.unparse(base) for base in found[0].bases] if plain else ["?"]
    return found[0] if bases in ([], ["object"]) else None


@lru_cache(maxsize=64)
def _tree(path: Path) -> ast.Module:
    try:
        return SourceFile(str(path), read_source(path)[0]).tree
    except (UnreadableInput, OSError):
        return ast.Module([], [])
