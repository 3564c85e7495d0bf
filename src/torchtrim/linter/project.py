"""What functions of a project's other files return, and which of its files no device runs."""

from __future__ import annotations

import ast
import re
from functools import cache, lru_cache
from pathlib import Path, PurePath

from torchtrim.linter.kinds import UNKNOWN, Kind
from torchtrim.linter.scope import FileFacts, Outside
from torchtrim.linter.static_syncs import facts_of

_DEPTH = 2
_FILES = 512
_MOST_BYTES = 2**20
_TEST = re.compile(r"test_\w+|\w+_test")
_DEVICES = re.compile(r"cuda|device|gpu|xpu|npu|hpu|accelerat", re.IGNORECASE)


def outside_of(path: str, used: set[str] | None = None) -> Outside:
    """Tells a file of functions that it imports from files beside it and of its package.

    `used`: the files that were asked, which are added to it.
    """

    @cache
    def outside(full: str) -> Kind:
        kind, files = _returned(full, path, _DEPTH)
        if used is not None:
            used.update(files)
        return kind

    return outside


def is_cpu_test(path: str, text: str) -> bool:
    """Whether it is a file of unit tests that names no device, so that its tensors are the host's."""
    named = _TEST.fullmatch(PurePath(path).stem) is not None
    return named and _DEVICES.search(text) is None


def _returned(full: str, path: str, depth: int) -> tuple[Kind, tuple[str, ...]]:
    """What a function returns by its full name, such as `..losses.masked_loss`, where it can be found.

    With the files that say so.
    """
    module, _, name = full.rpartition(".")
    file = _file_of(module or ".", path)
    if file is None or file == path:
        return UNKNOWN, ()
    facts = _facts(file, _stamp(file))
    known = facts.returns.get(name, UNKNOWN)
    if known == UNKNOWN and depth and name in facts.imports:
        known, files = _returned(facts.imports[name], file, depth - 1)
        return known, (file, *files)
    return known, (file,)


def _stamp(file: str) -> tuple[int, int]:
    """Its size, and when it was written."""
    try:
        found = Path(file).stat()
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


@lru_cache(_FILES)
def _facts(file: str, stamp: tuple[int, int]) -> FileFacts:
    """What a file says of itself; nothing where it cannot be read, or is large."""
    path = Path(file)
    try:
        if stamp[0] > _MOST_BYTES:
            return FileFacts()
        return facts_of(ast.parse(path.read_bytes()), file, lambda full: UNKNOWN)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return FileFacts()


def _file_of(module: str, path: str) -> str | None:
    """The file of a module, as a file that imports it would find it."""
    dots = len(module) - len(module.lstrip("."))
    parts = [part for part in module.split(".") if part]
    here = Path(path).parent
    if dots:
        for _ in range(dots - 1):
            here = here.parent
        return _module(here, parts)
    return _module(here, parts) or _module(_root(str(here)), parts)


def _module(folder: Path, parts: list[str]) -> str | None:
    base = folder.joinpath(*parts)
    for file in (base.with_name(f"{base.name}.py") if parts else None, base / "__init__.py"):
        if file is not None and file.is_file():
            return str(file)
    return None


@cache
def _root(folder: str) -> Path:
    """The folder that holds the package around a file: the first without `__init__.py`."""
    here = Path(folder)
    while (here / "__init__.py").is_file():
        here = here.parent
    return here
