"""Which files hold traces: one file, the files of several ranks, or a TensorBoard log folder."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from torchtrim.errors import UsageError

MOST_FILES = 64  # Arbitrary; ranks of eight nodes.
MOST_ENTRIES = 100_000  # Arbitrary; ends the search of a folder that is no folder of traces.
_TENSORBOARD = (".pt.trace.json", ".pt.trace.json.gz")
_ANY = (".json", ".json.gz")


def find_traces(paths: list[Path]) -> list[Path]:
    """The traces that the paths name, folders looked into; at most 64.

    In a folder those of `tensorboard_trace_handler` (`*.pt.trace.json[.gz]`) are taken where there are
    any, else every `*.json[.gz]`, among the first 100,000 entries. Raises `UsageError` where there is
    none, or more.
    """
    found: list[Path] = []
    for path in paths:
        found += _inside(path) if path.is_dir() else [path]
    unique = list(dict.fromkeys(found))
    if len(unique) > MOST_FILES:
        raise UsageError(
            f"there are {len(unique)} traces, and at most {MOST_FILES} are read at once. Name some."
        )
    return unique


def _inside(folder: Path) -> list[Path]:
    entries = list(islice(folder.rglob("*"), MOST_ENTRIES))
    files = sorted(path for path in entries if path.is_file())
    for endings in (_TENSORBOARD, _ANY):
        found = [path for path in files if path.name.endswith(endings)]
        if found:
            return found
    raise UsageError(
        f"{folder} holds no trace: no *.pt.trace.json, *.json or *.json.gz. "
        "torch.profiler.tensorboard_trace_handler(folder) writes them."
    )
