"""A public program: where it is, a fresh copy of it with its data, and a run of it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

import msgspec

from bench.strangers.data import GENERATORS

HERE = Path(__file__).parent
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "TOKENIZERS_PARALLELISM": "false",
    "MPLBACKEND": "Agg",
    "PYTHONFAULTHANDLER": "1",
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
}


class Program(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One program: where it is, how it is made small, and what it reads.

    `driver`: the text of its script; `notebook`: the file whose cells are. `processes`: as how many ranks it
    runs, `device` where. `changed`: constants of the script without an option, or names that torch no longer
    has, and what stands there instead, in `changed_file` where that is not the script. `remark`: why it
    cannot run, or what its result is due to.
    """

    name: str
    kind: str
    repository: str
    commit: str
    script: str
    args: str = ""
    folder: str = "."
    inside: str = "."
    path: str = ""
    driver: str = ""
    notebook: str = ""
    data: dict[str, str] = {}
    no_data_yet: list[str] = []
    processes: int = 1
    device: str = "cpu"
    changed: dict[str, str] = {}
    changed_file: str = ""
    reserve: bool = False
    remark: str = ""


class Ended(NamedTuple):
    """How a process ended: its code, None where it was stopped at the limit; seconds; what it printed."""

    code: int | None
    seconds: float
    output: str


class Place(NamedTuple):
    """Where programs are, what they import, where they run."""

    sources: Path
    library: str
    scratch: Path

    def copy_of(self, program: Program, name: str) -> Path:
        """Where a copy of the program is; several may run at once."""
        return self.scratch / "copies" / program.name.replace(" ", "-").replace(",", "") / name


def programs(*files: str) -> list[Program]:
    """All of `programs.toml`, and of `ranks.toml`, those in several processes; or all of these files."""
    rows = []
    for name in files or ("programs.toml", "ranks.toml"):
        found = tomllib.loads((HERE / name).read_text())
        rows += [{**row, "commit": found["commits"][row["repository"]]} for row in found["program"]]
    return msgspec.convert(rows, list[Program])


def prepared(program: Program, place: Place, name: str) -> Path:
    """A fresh copy of the program with its data; the folder from which it starts."""
    source = place.sources / program.repository.partition("/")[2]
    folder = place.copy_of(program, name)
    shutil.rmtree(folder, ignore_errors=True)
    skipped = shutil.ignore_patterns(".git", "*.ipynb", "*.gif", "*.mp4")
    if source.exists():
        shutil.copytree(source / program.folder, folder / program.folder, ignore=skipped)
    (folder / program.inside).mkdir(parents=True, exist_ok=True)
    for empty in program.no_data_yet:
        shutil.rmtree(folder / empty, ignore_errors=True)
    for generator, where in program.data.items():
        GENERATORS[generator](folder / where)
    written = program.driver or (program.notebook and _cells(source / program.notebook))
    if written:
        (folder / program.inside / program.script).write_text(written)
    _change(folder / program.inside / (program.changed_file or program.script), program.changed)
    return folder / program.inside


def _change(script: Path, changed: dict[str, str]) -> None:
    """Replace texts of the script."""
    text = script.read_text() if changed else ""
    for there, instead in changed.items():
        if there not in text:
            sys.exit(f"{script}: {there!r} is not there")
        text = text.replace(there, instead)
    if changed:
        script.write_text(text)


def _cells(notebook: Path) -> str:
    """The code of a notebook, without what only a notebook runs: lines that begin with % or !."""
    cells = json.loads(notebook.read_text())["cells"]
    lines = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return "".join(
        f"{line}\n" for line in "\n".join(lines).splitlines() if not line.startswith(("%", "!"))
    )


def run(command: list[str], folder: Path, paths: list[str], limit: float) -> Ended:
    """Run it in a process group of its own, and end that at the limit."""
    environment = {**os.environ, **_OFFLINE, "PYTHONPATH": os.pathsep.join(paths)}
    begin = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(limit)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        output.seek(0)
        text = output.read()
    return Ended(code, time.perf_counter() - begin, text)


def paths_of(program: Program, place: Place, name: str) -> list[str]:
    """What it imports from: its own folder, this project, the library."""
    own = [str(place.copy_of(program, name) / program.path)] if program.path else []
    return [*own, str(HERE.parents[1] / "src"), *filter(None, [place.library])]
