"""Whether a script changes what torch and its libraries read while they are imported.

Such a script cannot begin in a process that has imported them. Its text and that of the files beside it
that it imports are searched for the names of such variables; one too many costs only time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from torchtrim.records.files import read_head

_NAMES = re.compile(
    r"\b(?:ATEN|BLIS|C10|CUBLAS|CUDA|CUDNN|DNNL|GLIBC|GOMP|HIP|HSA|KINETO|KMP|LD|MALLOC|MKL|NCCL|NPY|NUMEXPR"
    r"|OMP|ONEDNN|OPENBLAS|PYTORCH|ROCM|TORCH|TORCHDYNAMO|TORCHINDUCTOR|TRITON|VECLIB)_[A-Z0-9_]+\b"
    r"|\bPYTHON[A-Z]+\b|\bdotenv\b"
)
_IMPORT = re.compile(r"^[ \t]*(?:from|import)[ \t]+([\w.]+(?:[ \t]*,[ \t]*[\w.]+)*)", re.MULTILINE)
_FROM = re.compile(
    r"^[ \t]*from[ \t]+(\.*)([\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)", re.MULTILINE
)
_WORD = re.compile(r"\w+")
_IMPORTS_TORCH = re.compile(r"^(?:from|import)[ \t]+(?:torch|numpy)", re.MULTILINE)
_SETS = re.compile(
    r"""^os\.environ(?:\[["'](\w+)["']\][ \t]*=|\.setdefault\(["'](\w+)["'],)[ \t]*["']([^"'\n]*)["']""",
    re.MULTILINE,
)
_AT_START = ("GLIBC_", "LD_", "MALLOC_", "PYTHON")
_MOST_FILES = 500
_MOST_BYTES = 2**20


def what_it_changes(path: Path) -> str:
    """The name of a variable that the script or a file that it imports speaks of; empty if there is none."""
    for text in _texts(path):
        if found := _NAMES.search(text):
            return found.group()
    return ""


def what_it_sets(path: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """What a script sets before it imports torch, in so many words, for torch to find when it is imported.

    What the interpreter reads when it starts would not be changed by the script either.
    """
    text = next(_texts(path), "")
    first = _IMPORTS_TORCH.search(text)
    found: dict[str, str] = {}
    for written, default, value in _SETS.findall(text[: first.start() if first else 0]):
        name = written or default
        read = _NAMES.fullmatch(name) and not name.startswith(_AT_START)
        if read and (written or name not in environment):
            found[name] = value
    return found


def _texts(path: Path) -> Iterator[str]:
    """The script's text, and of each file beside it that is imported."""
    root = path.parent
    seen: set[Path] = set()
    waiting = [path]
    while waiting and len(seen) < _MOST_FILES:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        try:
            text = read_head(file, _MOST_BYTES).decode("utf-8", errors="replace")
        except OSError:
            continue
        yield text
        waiting += _imported(text, file, root)


def _imported(text: str, file: Path, root: Path) -> Iterator[Path]:
    for names in _IMPORT.findall(text):
        for name in names.split(","):
            yield from _files(root, name.strip().split("."))
    for dots, name, members in _FROM.findall(text):
        base = file.parents[len(dots) - 1] if 0 < len(dots) <= len(file.parents) else root
        parts = [part for part in name.split(".") if part]
        yield from _files(base, parts)
        for member in _WORD.findall(members):
            yield from _files(base, [*parts, member])


def _files(base: Path, parts: list[str]) -> Iterator[Path]:
    """The files that importing a dotted name runs: each package's, then the module."""
    for count in range(1, len(parts) + 1):
        place = base.joinpath(*parts[:count])
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file():
                yield file
