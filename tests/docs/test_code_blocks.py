"""Every block of Python and shell in README and docs/ is run as it stands."""

from __future__ import annotations

import ast
import gzip
import os
import pickle
import re
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from tests.snapshots import Writer, leave_holes

from docs.blocks import Block, blocks

ROOT = Path(__file__).parents[2]
RULES = ROOT / "docs/rules"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN = [path for path in DOCUMENTS if RULES not in path.parents and list(blocks(path))]
SLOW = bool(os.environ.get("TORCHTRIM_SLOW"))
ALWAYS = ("README.md", "pack-buffers.md", "lint.md")
"""Documents of which `make test` runs the blocks too: what a newcomer tries, and what takes no time."""
WHY_NOT = {
    "make demo": "sets up an environment of its own",
    "def test_a_step_waits_for_nothing": "a fragment; docs/gate.md has a whole one",
    "from torch.profiler import ProfilerActivity": "needs a GPU",
    "import torch\n\ntorch.cuda.memory._record_memory_history": "needs a GPU",
    "torchtrim optimize examples/charlm.py --memory 100MiB": "slow",
}
FRAGMENTS = {"streams.md": "they need a model of transformers"}
SCRIPT = re.compile(r"^torchtrim \w+.*?([\w/.-]+\.py)\b")
WAITS = """\
import torch
device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Linear(8, 8).to(device)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(20):
    loss = model(torch.ones(4, 8, device=device)).sum()
    loss.backward()
    optimizer.step()
    print(loss.item())
"""


def folder(path: Path, document: Path) -> None:
    """What a document's commands find: the examples, a script, traces."""
    shutil.copytree(ROOT / "examples", path / "examples")
    traces = sorted((ROOT / "tests/data/traces").glob("*.json.gz"))
    if document.name == "gate.md":
        (path / "train.py").write_text(WAITS)
    if document.name == "snapshots.md":
        writer = Writer()
        leave_holes(writer)
        (path / "snapshot.pickle").write_bytes(pickle.dumps(writer.dumped()))
    if document.name == "traces.md":
        (path / "log").mkdir()
        (path / "src").mkdir()
        small = next(trace for trace in traces if "alexnet" in trace.name)
        for name in ("trace.json.gz", "log/a.pt.trace.json.gz"):
            shutil.copy(small, path / name)
        for name in ("rank0.json", "rank1.json"):
            (path / name).write_bytes(_unpacked(small))


def _unpacked(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes())


def run(command: str | list[str], path: Path) -> subprocess.CompletedProcess[str]:
    programs = str(Path(sys.executable).parent)
    environment = {
        **os.environ,
        "PATH": programs + os.pathsep + os.environ["PATH"],
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "80",
    }
    environment.pop("PYTEST_ADDOPTS", None)
    if not entry_points(group="pytest11", name="torchtrim"):
        environment["PYTEST_PLUGINS"] = "torchtrim.pytest_plugin"
    return subprocess.run(
        command,
        cwd=path,
        env=environment,
        shell=isinstance(command, str),
        capture_output=True,
        text=True,
        timeout=300,
    )


def try_block(block: Block, path: Path) -> None:
    """Run it, and hold it to what its comment says."""
    if "file" in block.options:
        (path / block.options["file"]).write_text(block.text, encoding="utf-8")
        return
    if block.language == "python":
        (path / "test_block.py").write_text(block.text, encoding="utf-8")
        tests = "\ndef test_" in block.text
        module = ["-m", "pytest", "-q"] if tests else []
        done = [run([sys.executable, *module, "test_block.py"], path)]
    else:
        done = [run(command, path) for command in block.commands]
    said = "".join(one.stdout + one.stderr for one in done)
    if "exit" in block.options:
        assert done[-1].returncode == int(block.options["exit"]), said
        done = done[:-1]
    assert all(one.returncode in (0, 1) for one in done), said
    assert "Traceback" not in said
    if "exit" not in block.options and "limit" not in block.text and "--max" not in block.text:
        assert all(one.returncode == 0 for one in done), said
    assert block.options.get("says", "") in said


def skipped(block: Block) -> bool:
    known = next((why for start, why in WHY_NOT.items() if start in block.text), "")
    slow = known == "slow" or block.is_slow
    return bool("skip" in block.options or (slow and not SLOW) or (known and known != "slow"))


@pytest.mark.parametrize(
    "document",
    [pytest.param(p, marks=() if p.name in ALWAYS else pytest.mark.slow) for p in RUN],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_the_blocks_of_a_document_run(document: Path, tmp_path: Path) -> None:
    folder(tmp_path, document)
    for block in blocks(document):
        if document.name in FRAGMENTS:
            ast.parse(block.text if block.language == "python" else "")
        elif not skipped(block):
            try_block(block, tmp_path)


@pytest.mark.parametrize("document", RUN, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_scripts_of_a_document_are_there(document: Path, tmp_path: Path) -> None:
    folder(tmp_path, document)
    shown = [block for block in blocks(document) if not skipped(block)]
    written = {block.options["file"] for block in shown if "file" in block.options}
    runs = (
        [] if document.name in FRAGMENTS else [block for block in shown if block.language == "sh"]
    )
    commands = [command for block in runs for command in block.commands]
    named = {word for command in commands for word in SCRIPT.findall(command)}
    assert not {name for name in named - written if not (tmp_path / name).exists()}


def test_documents_with_commands_are_found() -> None:
    names = {path.name for path in RUN}
    assert {"README.md", "gate.md", "traces.md", "tutorial.md", "fit-memory.md"} <= names


def test_the_examples_of_rules_are_python() -> None:
    found = [(path, block) for path in sorted(RULES.glob("tt*.md")) for block in blocks(path)]
    assert len(found) > 10
    for _, block in found:
        if block.language == "python":
            ast.parse(block.text)
