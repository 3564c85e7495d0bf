"""The index of a step: calls, children, readers and writers, as the step has them."""

from __future__ import annotations

import gc
import weakref

from torchtrim.step.index import StepIndex, index_of, joined_span
from torchtrim.step.step import Span, Step, StepCall, StepModule, Task

ROOT, CHAIN, FIRST, SECOND, HOOKED = range(5)


def _task(
    reads: tuple[int, ...], makes: tuple[int, ...] = (), writes: tuple[int, ...] = ()
) -> Task:
    return Task("aten::mul", "forward", -1, reads, makes, writes, 0, 1.0)


def _call(module: int, span: tuple[int, int], graded: bool = True) -> StepCall:
    return StepCall(module, Span(*span), (span[0],), (span[1],), graded)


def _step(*more: StepCall) -> Step:
    """A root with a chain of two modules, and a module with hooks."""
    modules = (
        StepModule("net", "Net", -1, False, False),
        StepModule("net.chain", "Sequential", ROOT, True, False),
        StepModule("net.chain.0", "Linear", CHAIN, False, False),
        StepModule("net.chain.1", "Linear", CHAIN, False, False),
        StepModule("net.hooked", "Linear", ROOT, False, True),
    )
    calls = (
        _call(ROOT, (0, 4)),
        _call(CHAIN, (0, 3)),
        _call(FIRST, (0, 1)),
        _call(SECOND, (1, 3)),
        _call(HOOKED, (3, 4)),
        *more,
    )
    tasks = (
        _task((0,), (1,)),
        _task((1, 0), (2,)),
        _task((2,), (2,), (2,)),
        _task((2,), (3,)),
    )
    return Step(tasks=tasks, tensors=(), modules=modules, calls=calls)


def test_calls_are_by_module_and_in_order() -> None:
    empty, ungraded = _call(FIRST, (4, 4)), _call(FIRST, (3, 4), graded=False)
    step = _step(empty, ungraded)
    index = index_of(step)
    assert index.calls[FIRST] == (step.calls[2], empty, ungraded)
    assert index.running_calls[FIRST] == (step.calls[2], ungraded)
    assert index.graded_calls[FIRST] == (step.calls[2],)


def test_children_and_what_runs_once() -> None:
    index = index_of(_step())
    assert index.children == ((CHAIN, HOOKED), (FIRST, SECOND), (), (), ())
    assert index.runs_once == {ROOT, HOOKED}
    assert index.hooked_tensors == {3, 4}


def test_tasks_of_a_tensor() -> None:
    index = index_of(_step())
    assert index.readers == {0: (0, 1), 1: (1,), 2: (2, 3)}
    assert index.writers == {2: (2,)}
    assert index.users == {0: (0, 1), 1: (0, 1), 2: (1, 2, 3), 3: (3,)}


def test_the_calls_of_a_chain() -> None:
    step = _step()
    inner = index_of(step).child_calls(step.calls[1])
    assert inner == (step.calls[2], step.calls[3])
    assert joined_span(inner) == Span(0, 3)


def test_a_child_that_runs_twice_is_in_no_chain() -> None:
    step = _step(_call(FIRST, (2, 3)))
    assert index_of(step).child_calls(step.calls[1]) == ()


def test_an_index_is_built_once_and_does_not_keep_its_step() -> None:
    step = _step()
    index, gone = index_of(step), weakref.ref(step)
    assert index_of(step) is index
    assert isinstance(index, StepIndex)
    del step
    gc.collect()
    assert gone() is None
