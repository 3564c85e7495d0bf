"""Damaged files of every kind are read or refused, and never answered with a traceback."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from bench import fuzz

import draws

NAMES = (
    *("plan", "profile", "certificate", "report", "allow-list", "baseline", "settings"),
    *("buffers", "trace", "packed trace", "source"),
)


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, fuzz.Reader]:
    return fuzz.readers(tmp_path_factory.mktemp("sound"))


def test_each_reader_is_tried(readers: dict[str, fuzz.Reader]) -> None:
    assert tuple(readers) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_sound_file_is_read(name: str, readers: dict[str, fuzz.Reader], tmp_path: Path) -> None:
    assert fuzz.attempt(readers[name], readers[name].sound, tmp_path).how == "read"


@pytest.mark.parametrize("name", NAMES)
def test_a_damaged_file_is_read_or_refused(
    name: str, readers: dict[str, fuzz.Reader], tmp_path: Path
) -> None:
    rng = random.Random(draws.seed())
    for _ in range(draws.count(1_000)):
        data = fuzz.damaged(readers[name].sound, rng)
        ended = fuzz.attempt(readers[name], data, tmp_path)
        assert ended.how in ("read", "refused"), data


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_file_is_refused_at_once(
    name: str,
    readers: dict[str, fuzz.Reader],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for kind, path in fuzz.strange_paths(tmp_path, readers[name].file).items():
        ended = fuzz.attempt_at(readers[name], path)
        assert (kind, ended.how) == (kind, "refused")
        assert ended.seconds < fuzz.LIMIT_SECONDS
