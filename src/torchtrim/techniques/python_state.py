"""What a block reads and writes beside tensors: plain attributes of its modules, and the generators of
Python and numpy. When it runs again it finds them as they were, and leaves no trace in them."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class PythonState:
    """Plain attributes (counters, flags, `training`) and random generators before a block's first run."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._attributes = [_plain(module) for module in modules]
        self._python: Any = random.getstate()
        self._numpy: Any = _numpy_state()

    def has_run(self) -> None:
        """The first run is over: generators that it did not draw from need not be put back."""
        if self._python == random.getstate():
            self._python = None
        if self._numpy is not None and _equal(self._numpy, _numpy_state()):
            self._numpy = None

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """For a run in backward: everything is as before the first run, and afterwards as it is now."""
        attributes = [dict(vars(module)) for module in self._modules]
        python = random.getstate() if self._python is not None else None
        numpy = _numpy_state() if self._numpy is not None else None
        for module, plain in zip(self._modules, self._attributes, strict=True):
            for name in _plain(module).keys() - plain.keys():
                del vars(module)[name]
            vars(module).update(plain)
        _set_random(self._python, self._numpy)
        try:
            yield
        finally:
            _set_random(python, numpy)
            for module, values in zip(self._modules, attributes, strict=True):
                for name in vars(module).keys() - values.keys():
                    del vars(module)[name]
                vars(module).update(values)


def _plain(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if isinstance(value, _PLAIN)}


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy.random")
    return numpy.get_state() if numpy is not None else None


def _equal(one: Any, other: Any) -> bool:
    """Whether two states of numpy's generator are the same: place first, since its key changes rarely."""
    return one[2:] == other[2:] and bool((one[1] == other[1]).all())


def _set_random(python: Any, numpy: Any) -> None:
    if python is not None:
        random.setstate(python)
    if numpy is not None:
        sys.modules["numpy.random"].set_state(numpy)
