"""Threads that the watched program starts."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from torchtrim.dispatch.patches import Patches

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


def await_others() -> None:
    """Wait for threads that the program has not joined, as Python does at its end."""
    others = (one for one in threading.enumerate() if not one.daemon)
    if any(one is not threading.current_thread() for one in others):
        threading._shutdown()  # type: ignore[attr-defined]


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


def end_main(kind: type[BaseException], seconds: float, otherwise: Callable[[], None]) -> None:
    """Raise an exception in the main thread at its next line of Python.

    `otherwise`: called if that has not ended the process after so many seconds.
    """
    timer = threading.Timer(seconds, otherwise)
    timer.daemon, timer.name = True, OURS
    timer.start()
    main = ctypes.c_ulong(threading.main_thread().ident or 0)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(kind))
