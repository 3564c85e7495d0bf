"""A comparison of two workloads: the runs it asks for, of a job's ranks together."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from torchtrim.records.trial import Request, Trial
from torchtrim.runner.ranks import folder_of
from torchtrim.runner.script import Script, working_folder
from torchtrim.runner.trials import Progress, Workload, run_trial

ROUNDING_LIMIT = 1e-2  # far above what sums in another order change in float32, before an update


class Contest(NamedTuple):
    """Comparison of a workload with another workload and request that should give equal results.

    `limit`: largest relative difference before an update that rounding in float32 is believed to make.
    `jobs`: the job's runs, if both workloads are ranks. `renamed`: the other's own label where it differs.
    `built`: labels that differ only in how the programs are built.
    """

    original: Workload
    planned: Workload
    request: Request
    planned_request: Request
    limit: float = ROUNDING_LIMIT
    jobs: Jobs | None = None
    renamed: Mapping[str, str] = {}
    built: frozenset[str] = frozenset()


def keeping(
    request: Request, names: tuple[str, ...], *, double: bool = False, digests: bool = False
) -> Request:
    """Return a request that keeps the values of these names."""
    return msgspec.structs.replace(
        request, keep=names, double=double, digests=digests, measured=False
    )


def keeping_other(contest: Contest, names: tuple[str, ...], *, double: bool = False) -> Request:
    """Return the other program's request that keeps these values, by its own names."""
    own = tuple(contest.renamed.get(name, name) for name in names)
    return keeping(contest.planned_request, own, double=double)


def traced(request: Request, step: int, *, double: bool = False) -> Request:
    """Return a request that digests each operator of a step, and ends after it."""
    request = keeping(request, (), double=double, digests=True)
    return msgspec.structs.replace(request, traced=step, steps=max(step - request.warmup, 1))


def attempt(
    contest: Contest,
    planned: bool,
    request: Request,
    folder: Path,
    progress: Progress,
    again: str = "",
) -> Trial:
    """Run a workload once more. `again` tells a repeated run from the run before."""
    workload = contest.planned if planned else contest.original
    what = "looking closer, in float64" if request.double else "looking closer"

    def tell(text: str) -> None:
        progress(f"{what}: {text}")

    if contest.jobs is None or not isinstance(workload, Script):
        return run_trial(workload, request, folder, tell)
    return contest.jobs.run(workload, request, f"{planned} {again}", folder, tell)


@contextmanager
def folders(count: int) -> Iterator[tuple[Path, ...]]:
    """Make folders for the values of as many runs."""
    with ExitStack() as stack:
        yield tuple(stack.enter_context(working_folder()) for _ in range(count))


class Jobs:
    """Cache of a job's runs, each with its own folder below `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[tuple[Script, bytes, str], tuple[Path, Trial | Exception]] = {}

    def run(
        self, script: Script, request: Request, what: str, folder: Path, progress: Progress
    ) -> Trial:
        """Return the trial of the rank `script.only`, with its kept values in `folder`.

        `what` distinguishes runs that repeat each other. Raises the error of the run for each rank.
        """
        key = script._replace(only=-1), msgspec.json.encode(request), what
        if key not in self._known:
            own = self._folder / str(len(self._known))
            own.mkdir()
            try:
                self._known[key] = own, run_trial(key[0], request, own, progress)
            except Exception as error:
                self._known[key] = own, error
        own, trial = self._known[key]
        if isinstance(trial, Exception):
            raise trial
        shutil.copytree(folder_of(own, script.only), folder, dirs_exist_ok=True)
        return trial.ranks[script.only]
