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


def outside_of(path: str) -> Outside:
    """Tells a file of functions that it imports from files beside it and of its package."""
    return lambda full: _returned(full, path, _DEPTH)


def is_cpu_test(path: str, text: str) -> bool:
    """Whether it is a file of unit tests that names no device, so that its tensors are the host's."""
    named = _TEST.fullmatch(PurePath(path).stem) is not None
    return named and _DEVICES.search(text) is None


@lru_cache(4096)
def _returned(full: str, path: str, depth: int) -> Kind:
    """What a function returns by its full name, such as `..losses.masked_loss`, where it can be found."""
    module, _, name = full.rpartition(".")
    file = _file_of(module or ".", path)
    if file is None or file == path:
        return UNKNOWN
    facts = _facts(file)
    known = facts.returns.get(name, UNKNOWN)
    if known == UNKNOWN and depth and name in facts.imports:
        return _returned(facts.imports[name], file, depth - 1)
    return known


@lru_cache(_FILES)
def _facts(file: str) -> FileFacts:
    """What a file says of itself; nothing where it cannot be read, or is large."""
    path = Path(file)
    try:
        if path.stat().st_size > _MOST_BYTES:
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
