"""Runs of a job of several ranks for a closer look, each of them run once for all ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from torchtrim.records.trial import Request, Trial
from torchtrim.runner.ranks.ranks import folder_of
from torchtrim.runner.script import Script
from torchtrim.runner.trials import Progress, run_trial


class Jobs:
    """Keeps what each run left, in a folder of its own below `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[tuple[Script, bytes, str], tuple[Path, Trial | Exception]] = {}

    def run(
        self, script: Script, request: Request, what: str, folder: Path, progress: Progress
    ) -> Trial:
        """The trial of the rank `script.only`, with what it kept in `folder`.

        `what` tells apart runs that are to be made anew though nothing in them differs. Raises what the run
        raised, for each rank that asks.
        """
        key = script._replace(only=-1), msgspec.json.encode(request), what
        if key not in self._known:
            self._known[key] = self._ran(key[0], request, progress)
        own, found = self._known[key]
        if isinstance(found, Exception):
            raise found
        shutil.copytree(folder_of(own, script.only), folder, dirs_exist_ok=True)
        return found.ranks[script.only]

    def _ran(
        self, script: Script, request: Request, progress: Progress
    ) -> tuple[Path, Trial | Exception]:
        own = self._folder / str(len(self._known))
        own.mkdir()
        try:
            return own, run_trial(script, request, own, progress)
        except Exception as error:
            return own, error
