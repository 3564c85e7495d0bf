"""Finds a script's own random generators, of torch, numpy and Python, through its variables."""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import inspect
import itertools
import random
import sys
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from types import FrameType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from torchtrim.dispatch.places import Places, slots_of, variables_of

_NUMBERS = frozenset(
    (bool, int, float, complex, str, bytes, type(None), torch.Tensor, nn.Parameter)
)
_OF_MODULES = frozenset(vars(nn.Module()))
_OPEN = {"argparse", "collections", "types"}
_CLOSED = (sys.stdlib_module_names - _OPEN) | {"torchtrim", "numpy"}
_MOST = 256
_MOST_PARTS = 20_000
_MOST_OF_A_KIND = 16
"""Entries, objects and instances of a class. Arbitrary: bounds that keep a search cheap."""

Part = tuple[str, Any]


def state_of(value: Any) -> str | None:
    """Return the state of a random generator as text, or None for anything else."""
    kind = type(value)
    if issubclass(kind, torch.Generator):
        return str(value.get_state().tolist())
    if issubclass(kind, random.Random):
        return str(value.getstate())
    own = sys.modules.get("numpy.random")
    if own is None:
        return None
    if issubclass(kind, own.RandomState):
        return text_of(value.get_state(legacy=False))
    if issubclass(kind, own.Generator):
        value = value.bit_generator
    return text_of(value.state) if issubclass(type(value), own.BitGenerator) else None


def text_of(state: Any) -> str:
    """Format a numpy state with its arrays in full, whatever the script's print options."""
    if isinstance(state, dict):
        return f"{{{', '.join(f'{key}: {text_of(one)}' for key, one in state.items())}}}"
    return str(state.tolist() if hasattr(state, "tolist") else state)


class Generators:
    """A finder of the script's random generators, used once a step.

    A generator counts from its second step on, so one created anew in each step does not. The search for
    objects without a variable, such as the iterator of a `for` loop, runs once and after such a loop ends.
    """

    def __init__(self, places: Places) -> None:
        self._places = places
        self._known: dict[int, Any] = {}
        self._elsewhere: list[tuple[type, weakref.ref[Any]]] | None = None
        self._users: dict[type, bool] = {}

    def states(self, frame: FrameType | None) -> Iterator[tuple[str, str]]:
        """Yield name and state digest of each generator, such as `("main.loader.generator", ...)`."""
        known, self._known = self._known, {}
        digests = []
        held: dict[int, Any] = {}
        for start in (scopes(self._places, frame), self._others()):
            for name, value, state in self._walk(deque(start), held):
                self._known[id(value)] = value
                if known.get(id(value)) is value:
                    digest = hashlib.blake2b(state.encode(), digest_size=12).hexdigest()
                    digests.append((name, f"{type(value).__qualname__} {digest}"))
        seen: Counter[str] = Counter()
        for name, digest in sorted(digests):
            seen[name] += 1
            yield (name if seen[name] == 1 else f"{name} ({seen[name]})"), digest

    def _walk(self, waiting: deque[Part], held: dict[int, Any]) -> Iterator[tuple[str, Any, str]]:
        """Yield the generators below the queued objects, breadth first."""
        while waiting and len(held) < _MOST_PARTS:
            name, value = waiting.popleft()
            if type(value) in _NUMBERS or id(value) in held:
                continue
            held[id(value)] = value
            with contextlib.suppress(Exception):
                if (state := state_of(value)) is not None:
                    yield name, value, state
                else:
                    waiting.extend((f"{name}.{key}", one) for key, one in self._parts(value))

    def _others(self) -> Iterator[Part]:
        known = self._elsewhere
        if known is None or any(kind is GeneratorType and ref() is None for kind, ref in known):
            known = self._elsewhere = list(self._unreached())
        for kind, ref in known:
            if (value := ref()) is not None:
                yield value.__name__ if kind is GeneratorType else kind.__qualname__, value

    def _unreached(self) -> Iterator[tuple[type, weakref.ref[Any]]]:
        counts: Counter[type] = Counter()
        for value in gc.get_objects():
            kind = type(value)
            if kind is GeneratorType:
                wanted = self._is_code_of_user(value.gi_code)
            else:
                wanted = self._is_users(kind) and not issubclass(kind, nn.Module)
            if wanted and counts[kind] < _MOST_OF_A_KIND:
                counts[kind] += 1
                with contextlib.suppress(TypeError):
                    yield kind, weakref.ref(value)

    def _parts(self, value: Any) -> Iterable[Part]:
        kind = type(value)
        if issubclass(kind, dict):
            return [(_key(key), one) for key, one in _some(value.items())]
        if issubclass(kind, (list, tuple, deque)):
            return [(str(number), one) for number, one in enumerate(_some(value))]
        if issubclass(kind, (set, frozenset)):
            return [("", one) for one in _some(value)]
        if kind is FunctionType:
            return self._of_function(value)
        if kind is MethodType:
            return ("self", value.__self__), ("function", value.__func__)
        if kind is functools.partial:
            return ("function", value.func), ("args", value.args), ("keywords", value.keywords)
        if kind is GeneratorType:
            suspended = value.gi_frame is not None and not value.gi_running
            is_users = suspended and self._is_code_of_user(value.gi_code)
            return variables_of(value.gi_frame).items() if is_users else ()
        return self._of_object(value)

    def _of_function(self, value: FunctionType) -> Iterable[Part]:
        if not self._is_code_of_user(value.__code__):
            return ()
        contents = (cell.cell_contents for cell in value.__closure__ or ())
        cells = zip(value.__code__.co_freevars, contents, strict=False)
        return [*cells, ("defaults", value.__defaults__), ("globals", value.__globals__)]

    def _of_object(self, value: Any) -> Iterable[Part]:
        kind = type(value)
        if issubclass(kind, ModuleType):
            return vars(value).items() if self._is_file_of_user(value) else ()
        if issubclass(kind, type):
            return vars(value).items() if self._is_users(value) else ()
        if issubclass(kind, nn.Module):
            own = [(name, one) for name, one in vars(value).items() if name not in _OF_MODULES]
            return [*value._modules.items(), *own]
        top = kind.__module__.partition(".")[0]
        of_torch = top == "torch" and not kind.__module__.startswith("torch.utils.data")
        if top in _CLOSED or of_torch:
            return ()
        return [*slots_of(value), *getattr(value, "__dict__", {}).items()]

    def _is_users(self, kind: type) -> bool:
        if kind not in self._users:
            methods = (one for one in vars(kind).values() if inspect.isfunction(one))
            self._users[kind] = (
                issubclass(kind, DataLoader)
                or self._is_file_of_user(sys.modules.get(kind.__module__))
                or any(self._is_code_of_user(one.__code__) for one in methods)
            )
        return self._users[kind]

    def _is_file_of_user(self, module: ModuleType | None) -> bool:
        file = getattr(module, "__file__", None)
        return file is not None and self._places.is_users_file(file)

    def _is_code_of_user(self, code: Any) -> bool:
        return self._places.is_users((code, 0))


def _some(values: Iterable[Any]) -> list[Any]:
    return list(itertools.islice(values, _MOST))


def _key(key: Any) -> str:
    return f"{key:.80}" if isinstance(key, str) else f"[{key!r:.80}]"


def scopes(places: Places, frame: FrameType | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the variables of the script's running functions, innermost first, and of their modules."""
    seen: set[str] = set()
    while frame is not None:
        if places.is_users((frame.f_code, frame.f_lasti)):
            module = str(frame.f_globals.get("__name__"))
            name = frame.f_code.co_name
            if name not in seen and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                seen.add(name)
                yield name, variables_of(frame)
            if module not in seen:
                seen.add(module)
                yield module, frame.f_globals
        frame = frame.f_back
