"""CUDA's own count of waits, with a stand-in for CUDA."""

import warnings

import pytest
import torch

from torchtrim.capture.debug_mode import SyncCounter

SYNC = "called a synchronizing CUDA operation (function warn_or_error_on_sync)"


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    seen: list[object] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: "default")
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", seen.append)
    return seen


def test_every_warning_counts_though_it_is_the_same(modes: list[object]) -> None:
    counter = SyncCounter()
    with counter.counting():
        for _ in range(3):
            warnings.warn(SYNC, UserWarning, stacklevel=1)
    assert counter.count == 3
    assert modes == ["warn", "default"]


def test_other_warnings_go_where_they_would_have_gone(modes: list[object]) -> None:
    counter = SyncCounter()
    with pytest.warns(UserWarning, match="something else"), counter.counting():
        warnings.warn("something else", UserWarning, stacklevel=1)
    assert counter.count == 0


def test_the_mode_is_put_back_where_the_program_fails(modes: list[object]) -> None:
    with pytest.raises(ValueError, match="no"), SyncCounter().counting():
        raise ValueError("no")
    assert modes == ["warn", "default"]
