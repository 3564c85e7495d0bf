"""Arguments drawn at random for functions that nobody described, for `bench.unsafe_fixes`.

What a parameter may be is guessed from its annotation, its default, its name and what the body does with it.
A recipe is a kind of value and a seed: made twice, it gives equal values that share nothing.
"""

from __future__ import annotations

import ast
import enum
import functools
import inspect
import random
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

Make = Callable[[random.Random], Any]
_DIMS = (1, 2, 3, 4, 4, 6, 8)
_TYPES = (torch.float32,) * 6 + (torch.float64, torch.float16, torch.bfloat16)
_WHOLE = (torch.int64,) * 4 + (torch.int32, torch.uint8)
_SPECIAL = (
    (3, 3),
    (2, 3, 3),
    (1, 3, 3),
    (2, 4, 4),
    (4, 4),
    (5, 4),
    (5, 2),
    (2, 5, 2),
    (2, 5, 3),
    (2, 6),
    (1, 2, 3),
    (2, 2, 3),
)
_IMAGES = ((2, 3, 8, 8), (1, 3, 16, 16), (3, 8, 8), (1, 1, 8, 8), (2, 3, 32, 32))
_OF_TENSORS = frozenset(dir(Tensor))
_TENSOR_NAMES = (
    set(dir(Tensor)) - set(dir(list)) - set(dir(dict)) - set(dir(str)) - set(dir(object))
)
_INT_NAME = re.compile(
    r"(^|_)(num|n|size|dim|axis|height|width|h|w|k|steps?|len|length|count|max|min|rank|index|kernel|order)(_|$)|s$"
)
_BOOL_NAME = re.compile(
    r"^(is|use|return|do|with|has|apply|keep|add|should|output|inplace|training|normalize)(_|$)"
)
_WHOLE_NAME = re.compile(
    r"(^|_)(idx|ids?|index|indices|labels?|target|classes|positions?|lengths?|lens|num|counts?|boundaries)(_|$|s$)"
)
_MASK_NAME = re.compile(r"mask|valid|keep|visib|inlier")


class Shapes(NamedTuple):
    """Sizes that the tensors of a draw share; the shape and the type that most of them have."""

    batch: int
    length: int
    width: int
    main: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32


def shapes(rng: random.Random) -> Shapes:
    """Draw what tensors share."""
    sizes = Shapes(*(rng.choice(_DIMS) for _ in range(3)))
    return sizes._replace(main=_size(rng, sizes), dtype=rng.choice(_TYPES))


def size(rng: random.Random, shared: Shapes) -> tuple[int, ...]:
    """Draw a shape of rank 0 to 4, most often the main one."""
    return shared.main if rng.random() < 0.35 else _size(rng, shared)


def _size(rng: random.Random, shared: Shapes) -> tuple[int, ...]:
    """Draw a shape, mostly of shared sizes; now and then matrices, boxes, points, an image."""
    roll = rng.random()
    if roll < 0.15:
        return rng.choice(_SPECIAL)
    if roll < 0.3:
        return rng.choice(_IMAGES)
    b, n, d = shared[:3]
    usual = (
        *((), (1,), (b,), (n,), (d,), (b, n), (n, d), (b, n, d), (b, 1, n, d)),
        *((b, d, n, n), (n, n), (b, n, n)),
    )
    if roll < 0.9:
        return rng.choice(usual)
    return tuple(rng.choice((0, *_DIMS)) for _ in range(rng.randrange(5)))


def floats(rng: random.Random, shared: Shapes) -> Tensor:
    """Draw a tensor of floats: normal, within 0 and 1, boxes, the identity, ones."""
    shape, dtype = size(rng, shared), rng.choice((shared.dtype, shared.dtype, *_TYPES[-6:]))
    kind = rng.randrange(8)
    value = torch.rand(shape) if kind < 3 else torch.randn(shape)
    if kind == 6 and len(shape) > 1 and shape[-1] == 4:
        value = torch.cat((value[..., :2] * 4, value[..., 2:].abs() * 4 + 5), -1)
    if kind == 7:
        square = len(shape) > 1 and shape[-1] == shape[-2]
        value = torch.eye(shape[-1]).expand(shape).clone() if square else torch.ones(shape)
    value = value.to(dtype)
    return value.requires_grad_() if rng.random() < 0.2 else value


def whole(rng: random.Random, shared: Shapes) -> Tensor:
    """Draw a tensor of small integers, mostly none below zero."""
    shape, most = size(rng, shared), rng.choice((1, 2, 3, max(shared[:3])))
    least = -1 if rng.random() < 0.1 else 0
    return torch.randint(least, most + 1, shape).to(rng.choice(_WHOLE))


def truths(rng: random.Random, shared: Shapes) -> Tensor:
    """Draw a mask: mixed, empty or full."""
    return torch.rand(size(rng, shared)) < rng.choice((0.0, 0.5, 0.5, 0.8, 1.0))


def tensor(rng: random.Random, shared: Shapes, name: str = "") -> Tensor:
    """Draw a tensor of the kind that its name suggests, mostly."""
    if rng.random() < 0.75:
        if _MASK_NAME.search(name):
            return rng.choice((truths, truths, floats, whole))(rng, shared)
        if _WHOLE_NAME.search(name):
            return whole(rng, shared)
        return floats(rng, shared)
    return rng.choice((floats, whole, truths))(rng, shared)


def number(rng: random.Random, shared: Shapes) -> int:
    """Draw an integer."""
    return rng.choice((0, 1, 1, 2, 2, 3, 4, 8, 16, -1, *shared[:3]))


def real(rng: random.Random) -> float:
    """Draw a float."""
    return rng.choice((0.0, 0.1, 0.5, 1.0, 2.0, 5.0, -1.0, 1e-5))


class Hint(NamedTuple):
    """What is known of a parameter: name, annotation, default, and how the body uses it."""

    name: str
    annotation: Any
    default: Any
    attributes: frozenset[str]
    keys: frozenset[str]
    called: bool
    words: tuple[str, ...]


def hints(function: types.FunctionType, tree: ast.AST) -> list[Hint]:
    """What is known of each parameter, but for the catch-alls."""
    known = _annotations(function)
    words = tuple({one.value for one in ast.walk(tree) if _is_word(one)})
    found = []
    for name, one in inspect.signature(function).parameters.items():
        if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            annotation = known.get(name, one.annotation)
            found.append(Hint(name, annotation, one.default, *uses(tree, name), words))
    return found


def _is_word(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 30


def _annotations(function: types.FunctionType) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except Exception:
        return dict(function.__annotations__)


def uses(tree: ast.AST, name: str) -> tuple[frozenset[str], frozenset[str], bool]:
    """The attributes and the keys that a body takes of a name or `self.name`, and whether it calls it."""
    attributes, keys, called = set(), set(), False
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and _is(node.value, name):
            attributes.add(node.attr)
        elif isinstance(node, ast.For | ast.comprehension) and _is(node.iter, name):
            attributes.add("__iter__")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "range":
            attributes.update(["__index__"] if any(_is(one, name) for one in node.args) else [])
        elif isinstance(node, ast.Subscript) and _is(node.value, name):
            if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
                keys.add(node.slice.value)
        elif isinstance(node, ast.Call) and _is(node.func, name):
            called = True
    return frozenset(attributes), frozenset(keys), called


def _is(node: ast.AST, name: str) -> bool:
    return (
        ast.unparse(node) in (name, f"self.{name}")
        if isinstance(node, ast.Name | ast.Attribute)
        else False
    )


def value(hint: Hint, rng: random.Random, shared: Shapes, depth: int = 0) -> Any:
    """Draw an argument."""
    roll = rng.random()
    if hint.default is not inspect.Parameter.empty and roll < (0.9 if depth else 0.45):
        return hint.default
    if roll > 0.93:
        return anything(rng, shared, hint)
    return of_annotation(hint.annotation, hint, rng, shared, depth)


def of_annotation(kind: Any, hint: Hint, rng: random.Random, shared: Shapes, depth: int = 0) -> Any:
    """Draw a value of an annotation; where that says nothing, by name and use."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    again = lambda one: of_annotation(one, hint, rng, shared, depth)  # noqa: E731
    if isinstance(kind, str):
        return _of_text(kind, hint, rng, shared, depth)
    if origin in (typing.Union, types.UnionType):
        return again(rng.choice(inner))
    if origin is typing.Literal:
        return rng.choice(inner)
    if origin is tuple or kind is tuple:
        return _tuple(inner, again, rng)
    if origin is not None and isinstance(origin, type) and issubclass(origin, typing.Mapping):
        return {again(inner[0]): again(inner[1]) for _ in range(rng.randrange(3))}
    if (
        origin is not None
        and inner
        and origin is not typing.Annotated
        and "Callable" not in str(origin)
    ):
        return [again(inner[0]) for _ in range(rng.choice((0, 1, 2, 2, 2, 3, 4, 6)))]
    if origin is typing.Annotated:
        return again(inner[0])
    return _plain(kind, hint, rng, shared, depth)


def _tuple(
    inner: tuple[Any, ...], again: Callable[[Any], Any], rng: random.Random
) -> tuple[Any, ...]:
    if len(inner) == 2 and inner[1] is Ellipsis:
        inner = inner[:1] * rng.choice((1, 2, 3))
    return tuple(map(again, inner or (int,) * 2))


def _of_text(kind: str, hint: Hint, rng: random.Random, shared: Shapes, depth: int) -> Any:
    for word, meant in _TEXTS.items():
        if word in kind and rng.random() < 0.8:
            one = of_annotation(meant, hint, rng, shared, depth)
            return [one] * 2 if kind.lower().startswith(("list", "sequence")) else one
    return by_name(hint, rng, shared, depth)


_TEXTS = {
    "Tensor": Tensor,
    "bool": bool,
    "int": int,
    "float": float,
    "str": str,
    "None": type(None),
}


_NO_CLASSES = (inspect.Parameter.empty, object, Any)


def _plain(kind: Any, hint: Hint, rng: random.Random, shared: Shapes, depth: int) -> Any:
    simple: dict[Any, Callable[[], Any]] = {
        Tensor: lambda: tensor(rng, shared, hint.name),
        bool: lambda: rng.random() < 0.5,
        int: lambda: number(rng, shared),
        float: lambda: real(rng),
        str: lambda: rng.choice((*hint.words, "x", "mean", "none", "sum")),
        type(None): lambda: None,
        torch.dtype: lambda: rng.choice(_TYPES),
        torch.device: lambda: torch.device("cpu"),
        torch.Generator: lambda: torch.Generator().manual_seed(3),
        np.ndarray: lambda: tensor(rng, shared, hint.name).detach().float().numpy(),
        list: lambda: [anything(rng, shared, hint) for _ in range(rng.randrange(4))],
        nn.Module: lambda: nn.Linear(shared.width, shared.width),
    }
    if isinstance(kind, type) and kind in simple:
        return simple[kind]()
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return rng.choice([*kind])
    if isinstance(kind, type) and kind not in _NO_CLASSES and depth < 3 and rng.random() < 0.8:
        return instance(kind, rng, shared, depth + 1)
    return by_name(hint, rng, shared, depth)


def by_name(hint: Hint, rng: random.Random, shared: Shapes, depth: int = 0) -> Any:
    """Draw a value by what the body does with it, then by its default and its name."""
    used = _by_use(hint, rng, shared, depth)
    if used is not NotImplemented and rng.random() < 0.85:
        return used
    name, default = hint.name.lower(), hint.default
    if isinstance(default, bool | int | float | str) and rng.random() < 0.8:
        return _plain(type(default), hint, rng, shared, depth)
    if name == "device":
        return torch.device("cpu")
    if "dtype" in name:
        return rng.choice(_TYPES)
    if _BOOL_NAME.search(name):
        return rng.random() < 0.5
    if _INT_NAME.search(name) and rng.random() < 0.5:
        return number(rng, shared)
    return tensor(rng, shared, name) if rng.random() < 0.7 else anything(rng, shared, hint)


def _by_use(hint: Hint, rng: random.Random, shared: Shapes, depth: int) -> Any:
    if "__index__" in hint.attributes:
        return rng.choice((0, 1, 2, 3, *shared[:3]))
    if "__iter__" in hint.attributes and rng.random() < 0.7:
        makes = (lambda: tensor(rng, shared, hint.name), lambda: number(rng, shared))
        make = rng.choice(makes)
        return [make() for _ in range(rng.choice((0, 1, 2, 2, 3)))]
    if hint.attributes & _TENSOR_NAMES and hint.attributes <= _OF_TENSORS:
        return tensor(rng, shared, hint.name)
    if "running_mean" in hint.attributes:
        return nn.BatchNorm2d(shared.width).eval()
    if hint.keys:
        return {key: tensor(rng, shared, key) for key in sorted(hint.keys)}
    if hint.attributes and not hint.attributes & (set(dir(dict)) | set(dir(list)) | set(dir(str))):
        return namespace(sorted(hint.attributes), rng, shared, depth)
    if hint.called:
        return rng.choice((nn.Linear(shared.width, shared.width), nn.Identity(), _first_of))
    return NotImplemented


def _first_of(*given: Any, **words: Any) -> Any:
    return next(iter((*given, *words.values())), None)


def namespace(names: list[str], rng: random.Random, shared: Shapes, depth: int = 0) -> Any:
    """Draw an object with attributes."""
    return types.SimpleNamespace(**{name: attribute(name, rng, shared) for name in names})


def attribute(name: str, rng: random.Random, shared: Shapes, tree: ast.AST | None = None) -> Any:
    """Draw an attribute by its name, and by what a body does with it."""
    used = uses(tree, name) if tree is not None else (frozenset[str](), frozenset[str](), False)
    hint = Hint(name, inspect.Parameter.empty, inspect.Parameter.empty, *used, ())
    return by_name(hint, rng, shared)


def anything(rng: random.Random, shared: Shapes, hint: Hint) -> Any:
    """Draw a value of any kind."""
    makes: tuple[Callable[[], Any], ...] = (
        lambda: None,
        lambda: rng.random() < 0.5,
        lambda: number(rng, shared),
        lambda: real(rng),
        lambda: rng.choice((*hint.words, "x")),
        lambda: [number(rng, shared) for _ in range(rng.randrange(4))],
        lambda: [real(rng) for _ in range(rng.randrange(4))],
        lambda: [tensor(rng, shared, hint.name) for _ in range(rng.randrange(1, 4))],
        lambda: tuple(tensor(rng, shared, hint.name) for _ in range(2)),
        lambda: {word: tensor(rng, shared, word) for word in hint.words[:4]},
        lambda: tensor(rng, shared, hint.name),
        lambda: tensor(rng, shared, hint.name),
    )
    return rng.choice(makes)()


def instance(kind: type, rng: random.Random, shared: Shapes, depth: int = 0) -> Any:
    """Make an object of a class, with arguments drawn for its constructor. Raises what that raises."""
    kind = concrete(kind)
    config = getattr(kind, "config_class", None)
    if hasattr(config, "sub_configs") and rng.random() < 0.9:
        return kind(small_config(config))
    if hasattr(kind, "sub_configs"):
        return small_config(kind)
    if not inspect.isfunction(kind.__init__):
        return kind()
    words = {}
    for hint in _hints_of_constructor(kind):
        large = issubclass(kind, nn.Module) and isinstance(hint.default, int | tuple | list)
        if hint.default is inspect.Parameter.empty or large or rng.random() < 0.2:
            words[hint.name] = _for_constructor(kind, hint, rng, shared, depth + 1)
    return kind(**words)


def concrete(kind: type) -> type:
    """The class, with its abstract methods in place."""
    abstract = getattr(kind, "__abstractmethods__", ())
    return (
        type(kind)(kind.__name__, (kind,), dict.fromkeys(abstract, _first_of)) if abstract else kind
    )


@functools.cache
def _hints_of_constructor(kind: type) -> list[Hint]:
    initial: Any = inspect.unwrap(kind.__init__)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(initial)))
    except (OSError, SyntaxError, TypeError):
        tree = ast.Module([], [])
    return hints(initial, tree)[1:]


def _for_constructor(kind: type, hint: Hint, rng: random.Random, shared: Shapes, depth: int) -> Any:
    if hint.name == "config" and (config := _config_beside(kind)) is not None:
        return small_config(config)
    if issubclass(kind, nn.Module) and rng.random() < 0.9:
        return _smaller(hint, value(hint, rng, shared, depth))
    return value(hint, rng, shared, depth)


def _smaller(hint: Hint, given: Any) -> Any:
    """A size of a model, small enough."""
    if isinstance(given, list | tuple) and given and all(type(one) is int for one in given):
        return type(given)(min(one, 32) for one in given)
    if type(given) is not int:
        return given
    return min(given, 2 if re.search("layers|depth|blocks|heads", hint.name) else 32)


def _config_beside(kind: type) -> Any:
    """The configuration of a model in the same module."""
    beside = vars(sys.modules.get(kind.__module__, types)).values()
    found = (getattr(one, "config_class", None) for one in beside if isinstance(one, type))
    return next((one for one in found if hasattr(one, "sub_configs")), None)


def small_config(kind: Any) -> Any:
    """A small configuration of a model of transformers."""
    from bench.recall import small_config as small

    return small(kind)
