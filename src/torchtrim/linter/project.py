"""What functions of a project's other files return, and which of its files no device runs."""

from __future__ import annotations

import ast
import re
from functools import cache, lru_cache
from pathlib import Path, PurePath

from torchtrim.linter.kinds import UNKNOWN, Kind, is_open
from torchtrim.linter.scope import FileFacts, Outside
from torchtrim.linter.static_syncs import facts_of, outline_of
from torchtrim.records.files import read_head

_DEPTH = 2
_FILES = 512
_TREES = 4
_MOST_BYTES = 2**20
_CLASS = re.compile(rb"^class ([A-Za-z_]\w*)", re.MULTILINE)
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
    """Its size, and when it was written."""
    try:
        found = Path(file).stat()
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


@lru_cache(_FILES)
def _classes(file: str, stamp: tuple[int, int]) -> frozenset[str]:
    """The classes that a file has at its top, told from its text, since most that is imported is one."""
    try:
        text = read_head(Path(file), _MOST_BYTES) if stamp[0] <= _MOST_BYTES else b""
    except OSError:
        return frozenset()
    return frozenset(name.decode() for name in _CLASS.findall(text))


@lru_cache(_FILES)
def _outline(file: str, stamp: tuple[int, int]) -> FileFacts:
    """What a file imports and declares."""
    return outline_of(_tree(file, stamp), file)


@lru_cache(_FILES)
def _facts(file: str, stamp: tuple[int, int]) -> FileFacts:
    """What a file says of itself, for which its code is followed."""
    try:
        return facts_of(_tree(file, stamp), file, lambda full: UNKNOWN)
    except RecursionError:
        return FileFacts()


@lru_cache(_TREES)
def _tree(file: str, stamp: tuple[int, int]) -> ast.Module:
    """A file's tree; an empty one where it cannot be read, or is large."""
    try:
        if stamp[0] <= _MOST_BYTES:
            return ast.parse(read_head(Path(file), _MOST_BYTES))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        pass
    return ast.Module([], [])


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
