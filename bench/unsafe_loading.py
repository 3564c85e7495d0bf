"""Functions of public code before and after fixes, ready to be called, for `bench.unsafe_fixes`.

A module is imported as it is where that works. What is not installed, and names that installed modules lack,
get stand-ins; a module that still cannot be imported runs statement by statement, without those that fail.
The fixed function is the original's with other code: globals, defaults and closure are the same objects.
"""

from __future__ import annotations
import __future__

import ast
import functools
import importlib
import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, NamedTuple

import torch

Function = Callable[..., Any]
_TRIES = 30
_NO_NAME = re.compile(r"cannot import name '(\w+)' from '([\w.]+)'")
_NO_ATTRIBUTE = re.compile(r"module '([\w.]+)' has no attribute '(\w+)'")


class Pair(NamedTuple):
    """A function before and after; the class that it is a method of, and how it is bound."""

    original: types.FunctionType
    fixed: types.FunctionType
    owner: type | None
    bound: str


class StandIn(type):
    """The type of what takes the place of names that are not there: a class, a decorator, a module."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(name)

    def __call__(cls, *given: Any, **words: Any) -> Any:
        if "_stands_in" not in vars(cls):
            return super().__call__(*given, **words)
        return given[0] if len(given) == 1 and callable(given[0]) and not words else cls

    def __getitem__(cls, _: Any) -> Any:
        return cls

    def __or__(cls, other: Any) -> Any:
        return other

    __ror__ = __or__


def stand_in(name: str) -> Any:
    """A class to inherit from, to decorate with or to take attributes of."""
    return StandIn(name, (), {"_stands_in": True, "__init__": lambda self, *_, **__: None})


class Missing(MetaPathFinder, Loader):
    """Imports stand-ins for the packages that are known to be missing."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        """Find a missing package or what is in one."""
        known = any(name == one or name.startswith(f"{one}.") for one in self.names)
        return ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        """Make a module in which each name is a stand-in."""
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: _not_dunder(name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Leave it empty."""


def _not_dunder(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return stand_in(name)


def module_of(root: Path, path: str) -> types.ModuleType:
    """The module of a file below a root, imported by the name that its own package gives it."""
    file = root / path
    top = file.parent
    while (top / "__init__.py").exists():
        top = top.parent
    parts = file.relative_to(top).with_suffix("").parts
    sys.path[:0] = dict.fromkeys(map(str, (top, file.parent, root, root / "src")))
    _without_kernels()
    name = ".".join(part for part in parts if part != "__init__")
    return _imported(name) or _by_statements(name, file)


@functools.cache
def _without_kernels() -> None:
    """Declare operators of torchvision's library, built for another torch, with a kernel for `nms`."""
    torch.jit._state.disable()
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor a, Tensor b, float c) -> Tensor")
    torch.library.impl("torchvision::nms", "CompositeExplicitAutograd", _suppressed)


def _suppressed(boxes: torch.Tensor, scores: torch.Tensor, most: float) -> torch.Tensor:
    """The boxes that non-maximum suppression keeps."""
    assert boxes.shape == (*scores.shape, 4)
    assert scores.dim() == 1
    left = scores.argsort(descending=True, stable=True)
    kept = []
    while len(left):
        kept.append(left[0])
        corner = torch.maximum(boxes[left[0], :2], boxes[left, :2])
        shared = (torch.minimum(boxes[left[0], 2:], boxes[left, 2:]) - corner).clamp(min=0).prod(1)
        areas = (boxes[:, 2:] - boxes[:, :2]).prod(1)
        left = left[1:][(shared / (areas[left[0]] + areas[left] - shared))[1:] <= most]
    return torch.stack(kept) if kept else left


def _imported(name: str) -> types.ModuleType | None:
    missing = Missing()
    sys.meta_path.append(missing)
    for _ in range(_TRIES):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if not _noted(missing, error.name or "", name):
                return None
        except (ImportError, AttributeError) as error:
            if not _named(str(error)):
                return None
        except (Exception, SystemExit):
            return None
    return None


def _noted(missing: Missing, name: str, wanted: str) -> bool:
    """Note a package as missing, unless it is the one wanted; the whole of one that cannot be imported."""
    known = {one for one in missing.names if name.startswith(one)}
    if not name or known or wanted == name or wanted.startswith(f"{name}."):
        return False
    top = name.partition(".")[0]
    missing.names.add(name if top in sys.modules else top)
    return True


def _named(message: str) -> bool:
    """Put a stand-in where an installed module lacks a name."""
    if found := _NO_NAME.search(message):
        name, module = found[1], found[2]
    elif found := _NO_ATTRIBUTE.search(message):
        module, name = found[1], found[2]
    else:
        return False
    held = sys.modules.get(module)
    if held is None or hasattr(held, name):
        return False
    setattr(held, name, stand_in(name))
    return True


def _by_statements(name: str, file: Path) -> types.ModuleType:
    """The module by those of its statements that run; stand-ins for what the others would bind."""
    module = types.ModuleType(name)
    module.__file__, module.__package__ = str(file), name.rpartition(".")[0]
    sys.modules[name] = module
    text = file.read_text()
    flags = __future__.annotations.compiler_flag if "import annotations" in text else 0
    for node in ast.parse(text).body:
        for attempt in (node, _bare(node)):
            try:
                code = compile(ast.Module([attempt], []), str(file), "exec", flags, True)
                exec(code, vars(module))
                break
            except (Exception, SystemExit):
                continue
        else:
            for bound in _bound(node):
                vars(module).setdefault(bound, stand_in(bound))
    return module


def _bare(node: ast.stmt) -> ast.stmt:
    """A function or class without its decorators."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        node.decorator_list = []
    return node


def _bound(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield from (one.asname or one.name.partition(".")[0] for one in node.names)
    for inner in ast.walk(node) if isinstance(node, ast.Assign) else ():
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            yield inner.id


def pairs_of(module: types.ModuleType, before: str, after: str, unit: str) -> list[Pair]:
    """The functions of one qualified name, which a property or an overload may share.

    Raises `LookupError` where the module does not hold them, or their closures differ.
    """
    file = module.__file__ or ""
    codes = [_codes(compile(text, file, "exec", dont_inherit=True)) for text in (before, after)]
    old, new = ([one for one in found if one.co_qualname == unit] for found in codes)
    owner, held = _held(module, unit)
    functions = {one.__code__.co_firstlineno: one for one in _functions(held, unit)}
    found = [
        _pair(functions[a.co_firstlineno], b, owner, held)
        for a, b in zip(old, new, strict=True)
        if a.co_firstlineno in functions and a != b
    ]
    if not found:
        raise LookupError(f"{unit} is not in its module")
    return found


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield inner
            yield from _codes(inner)


def _held(module: types.ModuleType, unit: str) -> tuple[type | None, Any]:
    *classes, name = unit.split(".")
    owner: Any = module
    for one in classes:
        owner = inspect.getattr_static(owner, one)
    try:
        held = inspect.getattr_static(owner, name)
    except AttributeError as error:
        raise LookupError(f"{unit} is not in its module") from error
    return (owner if classes else None), held


def _functions(held: Any, unit: str) -> Iterator[types.FunctionType]:
    """The Python functions of a qualified name that an object is or wraps."""
    todo, seen = [held], set[int]()
    while todo and len(seen) < 200:
        one = todo.pop(0)
        if id(one) in seen or one is None:
            continue
        seen.add(id(one))
        if isinstance(one, types.FunctionType):
            if one.__code__.co_qualname == unit:
                yield one
            todo += [cell.cell_contents for cell in one.__closure__ or () if _filled(cell)]
        names = (
            "__wrapped__",
            "__func__",
            "fget",
            "fset",
            "func",
            "fn",
            "_fn",
            "_torchdynamo_orig_callable",
        )
        todo += [inner for name in names if (inner := _attribute(one, name)) is not None]


def _attribute(one: Any, name: str) -> Any:
    return None if isinstance(one, StandIn) else getattr(one, name, None)


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _pair(old: types.FunctionType, code: types.CodeType, owner: type | None, held: Any) -> Pair:
    cells = dict(zip(old.__code__.co_freevars, old.__closure__ or (), strict=True))
    if not set(code.co_freevars) <= set(cells):
        raise LookupError(f"{code.co_qualname} closes over other names")
    closure = tuple(cells[name] for name in code.co_freevars)
    new = types.FunctionType(code, old.__globals__, old.__name__, old.__defaults__, closure)
    new.__kwdefaults__, new.__annotations__ = old.__kwdefaults__, old.__annotations__
    bound = "static" if owner is None or isinstance(held, staticmethod) else "self"
    return Pair(old, new, owner, "class" if isinstance(held, classmethod) else bound)


def add_imports(module: types.ModuleType, before: str, after: str) -> None:
    """Run the imports that fixes added to the top of a file."""
    old = {ast.dump(node) for node in ast.parse(before).body}
    for node in ast.parse(after).body:
        if isinstance(node, ast.Import | ast.ImportFrom) and ast.dump(node) not in old:
            code = compile(ast.Module([node], []), module.__file__ or "", "exec")
            exec(code, vars(module))
