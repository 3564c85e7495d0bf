"""How often each snippet of the corpus waits for a CUDA device, by us and by other ways to know it.

    python -m bench.syncs [--dynamo] [SNIPPET ...]

Ours runs the snippet on the emulated accelerator. The others run it with its text changed from CUDA to
the CPU: by the names of its operators, by the tags that operators have for what depends on data, and,
with `--dynamo`, by where `torch._dynamo.explain` breaks the graph. A snippet that a way cannot run counts
as one in which it finds nothing. Labels are those of the corpus, from PyTorch's source.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tests.cases.corpus import Snippet, snippets
from tests.cases.corpus.snippet import Body
from torch.utils._python_dispatch import TorchDispatchMode

from bench.machine import save
from torchtrim.capture.recording import record_call
from torchtrim.emulator import emulate
from torchtrim.syncs.lookup import row

_CORPUS = Path(__file__).parents[1] / "tests" / "cases" / "corpus"
_PLAIN = "plain_corpus"
_NAMES = re.compile(
    r"aten::(_local_scalar_dense|item|nonzero|masked_select|_?unique\w*|bincount|equal|allclose)\b"
)
_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_RACE = "TT105"
_TO_CPU = (
    ('"cuda"', '"cpu"'),
    (".cuda()", ".cpu()"),
    (".pin_memory()", ""),
    ("pin_memory=True)", "pin_memory=False)"),
    ("tests.cases.corpus", _PLAIN),
)

Judge = Callable[[Snippet], int]


@dataclass(frozen=True)
class Verdict:
    """What one way says of one snippet: how often it waits, or why it could not be run."""

    waits: int
    error: str = ""


def waits_of(body: Body) -> int:
    """How often a body waits on the emulated device that is running."""
    profile = record_call(body)
    return sum(row(sync.row).code != _RACE for sync in profile.syncs)


def ours(snippet: Snippet) -> int:
    """By the emulated accelerator, which is running, and the table of waits."""
    with seeded():
        return waits_of(snippet.setup())


class _Counting(TorchDispatchMode):
    """Counts operators of which something holds."""

    def __init__(self, holds: Callable[[Any], bool]) -> None:
        super().__init__()
        self._holds = holds
        self.found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found += self._holds(func)
        return func(*args, **(kwargs or {}))


def _counted(snippet: Snippet, holds: Callable[[Any], bool]) -> int:
    with seeded():
        body = snippet.setup()
        with _Counting(holds) as counting:
            body()
    return counting.found


def by_name(snippet: Snippet) -> int:
    """By the names of operators that a run on the CPU calls."""
    return _counted(snippet, lambda func: _NAMES.match(func.name()) is not None)


def by_tag(snippet: Snippet) -> int:
    """By the tags of operators that a run on the CPU calls."""
    return _counted(snippet, lambda func: bool(_TAGS & set(func.tags)))


def by_dynamo(snippet: Snippet) -> int:
    """By the breaks in the graph that torch.compile would make of the body."""
    torch._dynamo.reset()
    with seeded():
        return len(torch._dynamo.explain(snippet.setup())().break_reasons)


@contextlib.contextmanager
def seeded() -> Iterator[None]:
    """The same numbers each time, no warnings, and distributions that check: dynamo stops them for good."""
    checks = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            yield
    finally:
        torch.distributions.Distribution.set_default_validate_args(checks)


@contextlib.contextmanager
def on_cpu() -> Iterator[dict[str, Snippet]]:
    """The corpus with its text changed so that it runs on the CPU, by name."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / _PLAIN
        package.mkdir()
        for path in _CORPUS.glob("*.py"):
            text = path.read_text(encoding="utf-8")
            for old, new in _TO_CPU:
                text = text.replace(old, new)
            (package / path.name).write_text(text, encoding="utf-8")
        sys.path.insert(0, folder)
        try:
            found = importlib.import_module(_PLAIN).snippets()
            yield {one.name: one for one in found}
        finally:
            sys.path.remove(folder)


def judged(judge: Judge, corpus: Iterable[Snippet]) -> dict[str, Verdict]:
    """What a way says of each snippet."""
    found = {}
    for one in corpus:
        try:
            found[one.name] = Verdict(judge(one))
        except Exception as error:
            found[one.name] = Verdict(
                0, f"{type(error).__name__}: {error}".partition("\n")[0][:200]
            )
    return found


def is_counted(snippet: Snippet, waits: int) -> bool:
    """Whether a number of waits is that of the label."""
    return waits == snippet.waits if snippet.exact else waits >= snippet.waits


def is_right(snippet: Snippet, said: Verdict) -> bool:
    """Whether a way could run a snippet and counted as its label does."""
    return not said.error and is_counted(snippet, said.waits)


def score(corpus: Iterable[Snippet], verdicts: dict[str, Verdict]) -> dict[str, Any]:
    """Recall and precision of finding that a snippet waits at all, and how many counts are right."""
    pairs = [(one, verdicts[one.name]) for one in corpus]
    true = sum(bool(one.waits and said.waits) for one, said in pairs)
    flagged = sum(said.waits > 0 for _, said in pairs)
    waiting = sum(one.waits > 0 for one, _ in pairs)
    return {
        "recall": round(true / max(waiting, 1), 4),
        "precision": round(true / max(flagged, 1), 4),
        "counts": round(sum(is_right(one, said) for one, said in pairs) / len(pairs), 4),
        "missed": [one.name for one, said in pairs if one.waits and not said.waits],
        "false": [one.name for one, said in pairs if not one.waits and said.waits],
        "miscounted": {
            one.name: {"label": one.waits, "said": said.waits}
            for one, said in pairs
            if one.waits and said.waits and not is_counted(one, said.waits)
        },
        "not_run": {one.name: said.error for one, said in pairs if said.error},
    }


def scores(corpus: list[Snippet], *, dynamo: bool) -> dict[str, Any]:
    """Every way on every snippet."""
    gc.collect()
    gc.freeze()  # a recording looks through what the collector knows
    with emulate():
        found = {"ours": score(corpus, judged(ours, corpus))}
    ways: dict[str, Judge] = {"operator names": by_name, "operator tags": by_tag}
    if dynamo:
        ways["dynamo graph breaks"] = by_dynamo
    with on_cpu() as plain:
        here = [plain[one.name] for one in corpus]
        for name, judge in ways.items():
            found[name] = score(corpus, judged(judge, here))
    return found


def show(name: str, found: dict[str, Any]) -> None:
    """Print a score."""
    print(
        f"{name:22} recall {found['recall']:7.1%}  precision {found['precision']:7.1%}  "
        f"counts {found['counts']:7.1%}  not run {len(found['not_run'])}"
    )


def show_misses(found: dict[str, Any]) -> None:
    """Print where our own way is not the label."""
    for kind in ("missed", "false", "miscounted", "not_run"):
        for name in found[kind]:
            more = f" {found[kind][name]}" if isinstance(found[kind], dict) else ""
            print(f"  {kind} {name}{more}")


def main() -> None:
    """Run, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--dynamo", action="store_true", help="also torch._dynamo.explain; slow")
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    corpus = [one for one in snippets() if not arguments.names or one.name in arguments.names]
    waiting = sum(one.waits > 0 for one in corpus)
    print(f"{len(corpus)} snippets, {waiting} wait, {len(corpus) - waiting} do not")
    found = scores(corpus, dynamo=arguments.dynamo)
    for name, one in found.items():
        show(name, one)
    show_misses(found["ours"])
    if not arguments.names:
        size = {"snippets": len(corpus), "waiting": waiting}
        save("syncs", {**size, "repaired": sum(bool(one.repairs) for one in corpus), "ways": found})


if __name__ == "__main__":
    main()
