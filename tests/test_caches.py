"""The user's cache folder, and that nothing is kept in the package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from torchtrim.core import caches


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other folders")
def test_the_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert caches.folder() == tmp_path / "torchtrim"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert caches.folder() == tmp_path / ".cache" / "torchtrim"


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "some" / "file"
    caches.write(path, b"one")
    caches.write(path, b"two")
    assert path.read_bytes() == b"two"
    caches.write(path / "below", b"three")
    assert [one for one in tmp_path.rglob("*") if one.is_file()] == [path]


def test_what_is_compiled_is_kept_in_the_users_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    numba = pytest.importorskip("numba")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    compiled = caches.compiler(nogil=True)(_twice)
    assert compiled(4) == 8
    kept = Path(compiled.stats.cache_path)
    assert kept.is_relative_to(tmp_path / "torchtrim" / "numba")
    assert list(kept.glob("*.nbi"))
    assert numba.config.CACHE_DIR == ""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "own"))
    assert Path(caches.compiler()(_twice).stats.cache_path).is_relative_to(tmp_path / "own")


def test_the_packages_own_loops_are_kept_there_too() -> None:
    pytest.importorskip("numba")
    from torchtrim.attention import compiled_loops
    from torchtrim.memory.packing import engine

    package = Path(caches.__file__).parent
    for function in (compiled_loops.slab_of, engine.compiled().search):
        assert not Path(function.stats.cache_path).is_relative_to(package)


def _twice(number: int) -> int:
    return 2 * number
