from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from torchtrim.dispatch.modes import enter_below, leave


class Counts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


_FLAGS = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)


def flags() -> tuple[bool, ...]:
    return tuple(getattr(_python_dispatch, name) for name in _FLAGS)


@pytest.fixture(autouse=True)
def no_mode_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's flags are of the whole process, and other tests may have left them."""
    for name in _FLAGS:
        monkeypatch.setattr(_python_dispatch, name, False)


Step = Callable[[Counts, Counts], Any]
ENTER: Step = lambda ours, theirs: enter_below(ours)  # noqa: E731
LEAVE: Step = lambda ours, theirs: leave(ours)  # noqa: E731
BEGIN: Step = lambda ours, theirs: theirs.__enter__()  # noqa: E731
END: Step = lambda ours, theirs: theirs.__exit__(None, None, None)  # noqa: E731


@pytest.mark.parametrize(
    "order",
    [
        (ENTER, LEAVE),
        (ENTER, BEGIN, END, LEAVE),
        (ENTER, BEGIN, LEAVE, END),
        (BEGIN, ENTER, END, LEAVE),
        (BEGIN, ENTER, LEAVE, END),
    ],
)
def test_both_see_what_runs_in_them_and_nothing_stays(order: tuple[Step, ...]) -> None:
    ours, theirs = Counts(), Counts()
    for number, step in enumerate(order, 1):
        step(ours, theirs)
        before = (ours.count, theirs.count)
        torch.ones(1)
        done = order[:number]
        runs = (ENTER in done and LEAVE not in done, BEGIN in done and END not in done)
        assert (ours.count - before[0], theirs.count - before[1]) == runs
        assert flags() == (any(runs),) * 3
    assert not _get_current_dispatch_mode_stack()
    assert flags() == (False,) * 3


def test_the_scripts_modes_keep_their_order() -> None:
    first, second, ours = Counts(), Counts(), Counts()
    with first, second:
        enter_below(ours)
        assert _get_current_dispatch_mode_stack() == [ours, first, second]
        leave(ours)
        assert _get_current_dispatch_mode_stack() == [first, second]
    assert flags() == (False,) * 3


def test_a_mode_that_is_not_there_is_left_without_ado() -> None:
    other = Counts()
    with other:
        leave(Counts())
        assert _get_current_dispatch_mode_stack() == [other]
