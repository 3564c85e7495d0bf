"""Threads that the watched program starts."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Container
from concurrent.futures import Future
from concurrent.futures import thread as pools
from typing import Any, TypeVar

from torchtrim.dispatch.patches import Patches

T = TypeVar("T")
_POOLED: Container[threading.Thread] = pools._threads_queues
OURS = "torchtrim"
"""Prefix of the names of torchtrim's own threads."""


def is_ours() -> bool:
    """Return True in a thread of torchtrim."""
    return threading.current_thread().name.startswith(OURS)


def enter_in_threads(
    patches: Patches,
    context: Callable[[], contextlib.AbstractContextManager[Any]],
    *,
    ours: bool = False,
) -> None:
    """Run new threads inside a context: modes hold only in the thread that entered them.

    `ours`: torchtrim's own threads too.
    """

    def bootstrap(thread: threading.Thread) -> None:
        with context() if ours or not thread.name.startswith(OURS) else contextlib.nullcontext():
            own(thread)

    own = patches.replace(threading.Thread, "_bootstrap_inner", bootstrap)


def in_new_thread(function: Callable[[], T]) -> T:
    """Return the function's result in a new thread without the caller's modes and hooks."""
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(function())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=run, name=OURS).start()
    return found.result()


def await_others() -> None:
    """Wait for threads that the program has not joined, as Python does at its end: pools last."""
    while others := [one for one in _others() if one not in _POOLED]:
        others[0].join()
    if any(_others()):
        threading._shutdown()  # type: ignore[attr-defined]


def _others() -> list[threading.Thread]:
    current = threading.current_thread()
    return [one for one in threading.enumerate() if one is not current and not one.daemon]


def listen_to_errors(patches: Patches, heard: Callable[[BaseException], bool]) -> None:
    """Hear of each exception that ends a thread or a task of a pool, and so not the program.

    One for which `heard` returns True is not printed.
    """

    def ended(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is None or not heard(args.exc_value):
            hook(args)

    def failed(future: Future[Any], error: BaseException | None) -> None:
        if error is not None:
            heard(error)
        fail(future, error)

    hook = patches.replace(threading, "excepthook", ended)
    fail = patches.replace(Future, "set_exception", failed)


_timers: list[threading.Timer] = []


def main_has_ended() -> None:
    """Call off what `end_main` would still do: the main thread has left the program."""
    while _timers:
        _timers.pop().cancel()


def end_main(kind: type[BaseException], seconds: float, otherwise: Callable[[], None]) -> None:
    """Raise an exception in the main thread at its next line of Python.

    `otherwise`: called after so many seconds, unless `main_has_ended` calls it off.
    """
    timer = threading.Timer(seconds, otherwise)
    _timers.append(timer)
    timer.daemon, timer.name = True, OURS
    timer.start()
    main = ctypes.c_ulong(threading.main_thread().ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(kind))
