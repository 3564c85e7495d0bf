"""Where stderr is no terminal, long work is told of line by line."""

from __future__ import annotations

import re
import time

import click
import pytest

from torchtrim.cli import output
from torchtrim.cli.output import progress

LINE = re.compile(r"\d\d:\d\d:\d\d +\d+ s  (.*)")


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output._Log, "quiet_seconds", 0.0)


def said(capfd: pytest.CaptureFixture[str]) -> list[str]:
    """The lines without their times, which must be there."""
    found = [LINE.fullmatch(line) for line in capfd.readouterr().err.splitlines()]
    return [one.group(1) if one else "no time" for one in found]


def test_a_line_for_each_run(capfd: pytest.CaptureFixture[str]) -> None:
    with progress() as tell:
        for what in ("original", "planned"):
            tell(f"{what}: the script starts")
            for step in range(3):
                tell(f"{what}: step {step + 1} of 3")
    assert said(capfd) == ["original: the script starts", "planned: the script starts"]


def test_texts_that_differ_in_numbers_are_one(capfd: pytest.CaptureFixture[str]) -> None:
    with progress() as tell:
        for count in (3, 12):
            tell(f"{count} of 12 buffers")
        tell("checking")
    assert said(capfd) == ["3 of 12 buffers", "checking"]


def test_it_is_never_silent_for_long(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output._Log, "most_silent_seconds", 0.2)
    with progress() as tell:
        tell("original: step 1 of 5")
        tell("original: step 2 of 5")
        time.sleep(1.0)
    lines = said(capfd)
    assert lines[0] == "original: step 1 of 5"
    assert set(lines[1:]) == {"original: step 2 of 5"}


def test_what_is_over_at_once_says_nothing(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output._Log, "quiet_seconds", 60.0)
    with progress() as tell:
        tell("original: step 1 of 5")
    assert said(capfd) == []


def test_names_from_outside_are_made_harmless(capfd: pytest.CaptureFixture[str]) -> None:
    with progress() as tell:
        tell("original\x1b[31m: step 1 of 5")
    assert "\x1b" not in said(capfd)[0]


@pytest.mark.parametrize(("amount", "lines"), [("all", 4), (None, 2), ("headline", 0)])
def test_verbose_tells_each_step_and_quiet_none(
    amount: str | None, lines: int, capfd: pytest.CaptureFixture[str]
) -> None:
    context = click.Context(click.Command("verb"))
    context.params["amount"] = amount
    with context, progress() as tell:
        for what in ("original", "planned"):
            for step in (1, 2):
                tell(f"{what}: step {step} of 2")
    assert len(said(capfd)) == lines
