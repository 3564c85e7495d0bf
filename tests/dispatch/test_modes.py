from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from torchtrim.dispatch.modes import call_operator, enter_below, leave


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


class Calls(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return call_operator(func, args, kwargs or {})


@torch.library.custom_op("torchtrim_tests::product", mutates_args=())
def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a @ b).float()


KERNELS = [torch.nn.Bilinear(16, 16, 4), lambda a, b: product(a, b.T)]


@pytest.mark.parametrize("kernel", KERNELS, ids=["bilinear", "custom"])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_kernel_that_calls_others_runs_under_the_callers_autocast(
    kernel: Callable[..., torch.Tensor], enabled: bool
) -> None:
    """`aten::_trilinear` has no kernel for autocast, but the products that it calls have."""
    x = torch.randn(4, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
        expected = kernel(x, x)
        with Calls():
            once = kernel(x, x)
            with Calls():
                twice = kernel(x, x)
        assert torch.is_autocast_enabled("cpu") is enabled
    assert torch.equal(once, expected)
    assert torch.equal(twice, expected)
