"""Scripts that train in a thread other than the main one."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from steps import quiet
from torchtrim import Script, ScriptFailed
from torchtrim.certify.compare import differences
from torchtrim.records.trial import Request, Trial
from torchtrim.workflows.optimize.fitting import Fitting

SCRIPT = Path(__file__).parent.parent / "scripts" / "threads.py"


@functools.cache
def run(kind: str, device: str = "cpu", *, dry: bool = False) -> Trial:
    script = Script(str(SCRIPT), (kind,), device=device, timeout=120)
    return Fitting(script, Request(steps=2, dry=dry), quiet).observe()


@pytest.mark.parametrize("kind", ["thread", "class", "pool"])
def test_a_thread_that_trains_is_watched_like_the_main_one(kind: str) -> None:
    expected, found = run("main"), run(kind)
    assert not list(differences(expected, found))
    assert [step.peak_bytes for step in found.steps] == [step.peak_bytes for step in expected.steps]
    assert found.optimizer_steps == expected.optimizer_steps
    assert found.elsewhere == 0


@pytest.mark.parametrize(("device", "dry"), [("emulated", False), ("cpu", True)])
def test_modes_hold_in_threads(device: str, dry: bool) -> None:
    expected, found = (run(kind, device, dry=dry).profile for kind in ("main", "class"))
    assert expected is not None
    assert found is not None
    assert found.peak_bytes == expected.peak_bytes
    assert [one.name for one in found.operators] == [one.name for one in expected.operators]


def test_in_evaluation_mode_backward_tells_that_a_thread_trains() -> None:
    found = run("evaluation")
    assert len(found.steps) == len(run("main").steps)


def test_other_threads_are_noted() -> None:
    found = run("two")
    assert found.elsewhere > 0
    assert any("several threads" in note for note in found.notes)


@pytest.mark.parametrize("kind", ["fails", "pool-fails"])
def test_an_exception_in_the_thread_is_the_scripts(kind: str) -> None:
    with pytest.raises(ScriptFailed, match="ValueError: the second batch") as caught:
        run(kind)
    assert "in train" in caught.value.traceback
    assert "1 optimizer steps" in caught.value.learnt


def test_a_thread_that_only_calls_a_model_first_is_named() -> None:
    with pytest.raises(ScriptFailed, match="the thread that first called one in training mode"):
        run("first")
