"""What holds for every test."""

from __future__ import annotations

import gc
import os
import pkgutil
import sys
from collections.abc import Iterator

import pytest

import draws

os.environ.setdefault("TORCHTRIM_DEBUG", "1")
"""What a part raises by mistake is to be seen, not survived."""
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
"""Read once in a process: a test that profiles by torch alone would make the profiler print for all."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", help="slow tests too, and all that others draw at random"
    )
    parser.addoption(
        "--rest", action="store_true", help="with --full: only what a run without it leaves out"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    draws.begin(full=config.getoption("--full"))
    if config.getoption("hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(draws.seed())


def pytest_report_header(config: pytest.Config) -> str:
    if draws.is_full():
        return f"torchtrim: all tests, all draws; {draws.SEED_NAME}={draws.seed()}"
    return f"torchtrim: without slow tests, few draws; again with {draws.SEED_NAME}={draws.seed()}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full") and not config.getoption("--rest"):
        return
    chosen = draws_or_is_slow if config.getoption("--full") else is_quick
    config.hook.pytest_deselected(items=[item for item in items if not chosen(item)])
    items[:] = [item for item in items if chosen(item)]


def is_quick(item: pytest.Item) -> bool:
    """Whether `make test` runs it."""
    return item.get_closest_marker("slow") is None


def draws_or_is_slow(item: pytest.Item) -> bool:
    """Whether it is slow, or its file names what draws: then more cases are tried with `--full`."""
    return not is_quick(item) or draws.are_named_in(item.path)


def pytest_unconfigure(config: pytest.Config) -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def nothing_from_before() -> None:
    """What was imported and made before is not seen by the garbage collector, neither by its scans nor by
    its collections: a recording begins with both, and a process of all tests has two million objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def no_work_space_is_left() -> Iterator[None]:
    """Attention keeps its work space for the next call, and what is alive counts in every peak."""
    yield
    compiled = sys.modules.get("torchtrim.attention.compiled")
    if compiled is not None:
        compiled._kept.buffers = None


@pytest.fixture
def processes_are_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what counts bytes in a process of its own: the tables of coverage.py grow there too."""
    monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)


@pytest.fixture
def without_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what is about other techniques: where replay is cheaper or goes lower, plans would hold it."""
    found = pkgutil.iter_modules
    monkeypatch.setattr(
        pkgutil, "iter_modules", lambda path: (one for one in found(path) if one.name != "replay")
    )
