"""Files that the documentation names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
FOLDERS = ("src", "tests", "bench", "docs", "examples")
MADE_UP = {
    "name.py",
    "test_name.py",
    "train.py",
    "fixed.py",
    "planned.py",
    "A.py",
    "B.py",
    "model.py",
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_named_files_exist(page: Path) -> None:
    known = [path.as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    named = re.findall(r"`((?:\w+/)*\w+\.py)`", page.read_text())
    real = [path for path in named if Path(path).name not in MADE_UP and "NNN" not in path]
    missing = [path for path in real if not any(it.endswith(f"/{path}") for it in known)]
    assert not missing
