"""The corpus: user code for CUDA, with how often each piece waits, and where that is written."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from tests.cases.corpus.snippet import SNIPPETS, Snippet

_NO_FAMILY = ("__init__", "snippet", "sources")


def snippets() -> tuple[Snippet, ...]:
    """All of the corpus, by family."""
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.stem not in _NO_FAMILY:
            import_module(f"tests.cases.corpus.{path.stem}")
    return tuple(SNIPPETS.values())
