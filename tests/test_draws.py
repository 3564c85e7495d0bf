"""What `make test` leaves to `make test-all`, and that a seed draws the same again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import draws

ROOT = Path(__file__).parents[1]
TESTS = """
import pytest
import draws
from hypothesis import given, strategies as st

@pytest.mark.slow
def test_long():
    pass

def test_some():
    print("some", list(draws.some(range(100))))

@given(st.integers(0, 2**60))
def test_drawn(number):
    print("drawn", number)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with this one's settings."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("conftest.py", "draws.py"):
        (folder / name).write_text((ROOT / "tests" / name).read_text(encoding="utf-8"))
    (folder / "test_it.py").write_text(TESTS)
    return folder


def run(project: Path, *options: str, seed: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    for name in (draws.SEED_NAME, draws.FULL_NAME):
        environment.pop(name, None)
    if seed:
        environment[draws.SEED_NAME] = seed
    plugins = ("-p", "_hypothesis_pytestplugin", "-p", "no:cacheprovider")
    settings = ("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(project))
    return subprocess.run(
        [sys.executable, "-m", "pytest", *plugins, *settings, "-s", *options, str(project)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def drawn(output: str) -> list[str]:
    return re.findall(r"^(?:\S* )?((?:drawn|some) .*?)\.?$", output, re.M)


def test_slow_tests_are_for_the_full_run_and_seeds_draw_again(project: Path) -> None:
    first = run(project)
    (seed,) = re.findall(rf"{draws.SEED_NAME}=(\d+)", first.stdout)
    assert "2 passed, 1 deselected" in first.stdout
    again, other, full = run(project, seed=seed), run(project), run(project, "--full")
    assert drawn(first.stdout) == drawn(again.stdout) != drawn(other.stdout)
    assert "3 passed" in full.stdout
    assert len(drawn(full.stdout)) > 90 > 20 > len(drawn(first.stdout)) >= 10


def test_a_marker_that_is_not_known_is_refused(project: Path, tmp_path: Path) -> None:
    for name in ("conftest.py", "draws.py"):
        (tmp_path / name).write_text((project / name).read_text(encoding="utf-8"))
    (tmp_path / "test_it.py").write_text(TESTS.replace("mark.slow", "mark.slwo"))
    assert "'slwo' not found in `markers`" in run(tmp_path).stdout


def test_some_are_drawn_in_order_and_all_where_all_are_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(draws.SEED_NAME, "3")
    monkeypatch.setenv(draws.FULL_NAME, "")
    few = list(draws.some(range(800)))
    assert len(few) == 50
    assert few == sorted(set(few))
    assert (draws.count(800), draws.count(40), draws.count(4)) == (50, 10, 4)
    monkeypatch.setenv(draws.SEED_NAME, "4")
    assert list(draws.some(range(800))) != few
    monkeypatch.setenv(draws.FULL_NAME, "1")
    assert list(draws.some(range(800))) == list(range(800))


def test_the_targets_of_make_are_what_the_documents_say() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    names = re.findall(r"^(\w[\w-]*):(?! export)", text, re.M)
    assert names == [
        *("demo", "test", "test-all", "test-rest", "coverage"),
        *("test-gpu", "bench", "clean", "help"),
    ]
    for document in ("README.md", "CONTRIBUTING.md"):
        assert "make test-all" in (ROOT / document).read_text(encoding="utf-8")
    run_by_ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert re.findall(r"^make (\S+)", run_by_ci, re.M) == ["test-all"]
