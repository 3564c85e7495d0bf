"""What every test of the command line wants."""

import pytest

from torchtrim.cli import progress


@pytest.fixture(autouse=True)
def nothing_is_told_of_long_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine anything may take long; tests of what is told then set their own limits."""
    monkeypatch.setattr(progress.Log, "quiet_seconds", 3600.0)
    monkeypatch.setattr(progress.Log, "most_silent_seconds", 3600.0)
