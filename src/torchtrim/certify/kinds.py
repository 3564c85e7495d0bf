"""Kinds of input on which a function may differ after a fix: ranks, types, emptiness, relations of shapes.

Both versions of the function run on tiny tensors of many kinds, beginning with those of the run. A kind
counts if the original as a whole accepts it: it returns for all draws of values for which it returns on the
kinds of the run (on other types, for one of them), and with other ranks, types or relations of shapes every
line runs that runs there. Then the other version has to return the same: results, in-place writes, gradients
and the random stream.
"""

from __future__ import annotations

import ast
import copy
import itertools
import math
import random
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import torch

from torchtrim.capture.probes import run_alone
from torchtrim.capture.recording import tensors_in
from torchtrim.records.probes import ObservedValue
from torchtrim.source.alone import AloneFunction

_LONGEST = 10.0
"""Seconds for the kinds of one fix. Arbitrary: about as long as two runs of a small script."""
_RANDOM_KINDS = 400
_MOST_BASES = 3
_STYLES = 4
_MOST_RANK = 5
_MOST_ELEMENTS = 4096
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.int8,
    torch.bool,
    torch.complex64,
)
_EPSILON = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}
_NO_TENSORS = (1.5, 2, None)
_SIZES = (3, 5, 4, 7, 6, 8)
Plain = bool | int | float | str | None


class TensorKind(NamedTuple):
    """The rank, sizes and type of a tensor, and whether it requires gradients."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    graded: bool

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


Kinds = dict[str, TensorKind | Plain]
Value = torch.Tensor | Plain
Inputs = dict[str, Value]
Change = Callable[[TensorKind], TensorKind | None]
Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class KindsTried:
    """The kinds of input tried, those that the original accepts, and the first on which the fix differs.

    `complete`: the time sufficed for all.
    """

    tried: int = 0
    accepted: int = 0
    differs: str = ""
    complete: bool = True


def try_kinds(
    before: AloneFunction,
    after: AloneFunction,
    seen: Sequence[Mapping[str, ObservedValue]],
    *,
    exact: bool,
) -> KindsTried:
    """Run both versions of a function on kinds of input around the observed ones."""
    pair = _Pair(before, after, exact=exact)
    done: set[str] = set()
    accepted, until = 0, time.monotonic() + _LONGEST
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kinds in _around(before, seen):
            if repr(kinds) in done:
                continue
            done.add(repr(kinds))
            if len(done) == 1:
                pair.begin(kinds)
            if time.monotonic() > until:
                return KindsTried(tried=len(done), accepted=accepted, complete=False)
            if not pair.accepts(kinds):
                continue
            accepted += 1
            if not pair.agrees(kinds):
                return KindsTried(tried=len(done), accepted=accepted, differs=_told(kinds))
    return KindsTried(tried=len(done), accepted=accepted)


def _told(kinds: Kinds) -> str:
    tensors = (f"`{name}` {kind}" for name, kind in kinds.items() if isinstance(kind, TensorKind))
    return ", ".join(tensors)


def _types(kinds: Kinds) -> str:
    return repr([kind.dtype for kind in kinds.values() if isinstance(kind, TensorKind)])


def _relations(kinds: Kinds) -> str:
    """Return a key of the ranks, the types, and which sizes are equal."""
    tensors = [(name, kind) for name, kind in kinds.items() if isinstance(kind, TensorKind)]
    sizes = list(dict.fromkeys(size for _, kind in tensors for size in kind.shape))
    return repr([(n, kind.dtype, [*map(sizes.index, kind.shape)]) for n, kind in tensors])


# -- kinds ------------------------------------------------------------------------------------------


def _around(
    function: AloneFunction, seen: Sequence[Mapping[str, ObservedValue]]
) -> Iterator[Kinds]:
    """Yield the observed kinds, then others near them: one input changed, all, two, and at random."""
    bases = [kinds for one in seen[:_MOST_BASES] if (kinds := _base(function, one)) is not None]
    yield from bases
    for base in bases[:1]:
        names = [name for name, kind in base.items() if isinstance(kind, TensorKind)]
        for change in _CHANGES:
            yield from _changed(base, dict.fromkeys(names, change))
        for name, change in itertools.product(names, _CHANGES):
            yield from _changed(base, {name: change})
        for one, other in itertools.combinations(names, 2):
            for changes in itertools.product(_RANKS, _RANKS):
                yield from _changed(base, dict(zip((one, other), changes, strict=True)))
            for rank, dtype, name in itertools.product(_RANKS, _TYPES, (one, other)):
                for ranked in _changed(base, dict.fromkeys((one, other), rank)):
                    yield from _changed(ranked, {name: dtype})
        for name, rank, size in itertools.product(names, _RANKS, (_NONE, _SHORT)):
            for others in _changed(base, dict.fromkeys(names, rank)):
                yield from _changed(others, {name: size})
        for name, number in itertools.product(names, _NO_TENSORS):
            yield base | {name: number}
        yield from _at_random(base, names)


def _at_random(base: Kinds, names: Sequence[str]) -> Iterator[Kinds]:
    rng = random.Random(len(names))
    flags = [name for name, kind in base.items() if isinstance(kind, bool)]
    for _ in range(_RANDOM_KINDS if names else 0):
        kinds = base | {name: rng.random() < 0.5 for name in flags}
        for _ in range(rng.randint(1, 4)):
            chosen = names if rng.random() < 0.5 else [rng.choice(names)]
            kinds = next(_changed(kinds, dict.fromkeys(chosen, rng.choice(_CHANGES))), kinds)
        yield kinds


def _changed(base: Kinds, changes: Mapping[str, Change]) -> Iterator[Kinds]:
    """Yield the kinds after the changes, unless one is impossible."""
    new = dict(base)
    for name, change in changes.items():
        kind = base[name]
        changed = change(kind) if isinstance(kind, TensorKind) else None
        if changed is None or (changed.graded and not changed.dtype.is_floating_point):
            return
        new[name] = changed
    if new != base:
        yield new


def _shaped(change: Callable[[Shape], Shape]) -> Change:
    def changed(kind: TensorKind) -> TensorKind | None:
        shape = change(kind.shape)
        return kind._replace(shape=shape) if len(shape) <= _MOST_RANK else None

    return changed


def _cast(dtype: torch.dtype) -> Change:
    return lambda kind: kind._replace(dtype=dtype)


_NONE = _shaped(lambda shape: (0, *shape[1:]) if shape else shape)
_SHORT = _shaped(lambda shape: (1, *shape[1:]) if shape else shape)
_NARROW = _shaped(lambda shape: (*shape[:-1], 1) if shape else shape)
_LONGER = _shaped(lambda shape: (shape[0] + 1, *shape[1:]) if shape else shape)
_RANKS = (
    _shaped(lambda shape: (2, *shape)),
    _shaped(lambda shape: (*shape, 2)),
    _shaped(lambda shape: (*shape, 1)),
    _shaped(lambda shape: (1, *shape)),
    _shaped(lambda shape: shape[1:]),
    _shaped(lambda shape: shape[:-1]),
    _shaped(lambda shape: ()),
)
_TYPES = tuple(map(_cast, _DTYPES))
_CHANGES = (*_RANKS, _NONE, _SHORT, _NARROW, _LONGER, *_TYPES)


def _base(function: AloneFunction, seen: Mapping[str, ObservedValue]) -> Kinds | None:
    """Return the observed kinds with small sizes that keep their relations; None if one is unknown."""
    kinds: Kinds = {}
    numbers = {int(one.value) for one in seen.values() if one.kind == "int" and one.value}
    small = _small_sizes(seen.values(), numbers | function.constants)
    for name in function.inputs:
        one = seen.get(name)
        if not function.inputs[name]:  # never read
            kinds[name] = None
            continue
        if one is None and name in function.defaults:
            continue
        if one is None:
            return None
        if one.kind in ("tensor", "Parameter"):
            dtype = getattr(torch, one.dtype, None)
            if not isinstance(dtype, torch.dtype):
                return None
            kinds[name] = TensorKind(tuple(small[n] for n in one.shape), dtype, one.requires_grad)
        elif one.kind in ("bool", "int", "float", "str", "NoneType"):
            kinds[name] = float(one.value) if one.kind == "float" else ast.literal_eval(one.value)
        else:
            return None
    return kinds


def _small_sizes(seen: Iterable[ObservedValue], kept: set[int]) -> dict[int, int]:
    tensors = [one for one in seen if one.kind in ("tensor", "Parameter")]
    sizes = sorted({size for one in tensors for size in one.shape})
    if all(math.prod(one.shape) <= _MOST_ELEMENTS // 16 for one in tensors):
        return {size: size for size in sizes}
    small = {size: size for size in sizes if size <= 2 or size in kept}
    free = (size for size in _SIZES if size not in small)
    return small | {size: next(free, size) for size in sizes if size not in small}


# -- values ------------------------------------------------------------------------------------------


def _drawn(kinds: Kinds, integers: Sequence[int], style: int) -> Inputs:
    """Draw values: ordinary ones, the constants in the code, and NaN, infinities, full and empty masks."""
    generator = torch.Generator().manual_seed(style)
    return {
        name: _tensor(kind, integers, style, generator) if isinstance(kind, TensorKind) else kind
        for name, kind in kinds.items()
    }


def _tensor(
    kind: TensorKind, integers: Sequence[int], style: int, generator: torch.Generator
) -> torch.Tensor:
    shape, dtype = kind.shape, kind.dtype
    if dtype == torch.bool:
        return _uniform(shape, generator) < (0.5, 0.0, 1.0, 0.7)[style]
    if dtype.is_floating_point or dtype.is_complex:
        where = torch.full(shape, style == 2, dtype=torch.bool, device="cpu")
        where &= _uniform(shape, generator) < 0.2
        odd = _picked((math.nan, math.inf, -math.inf, 0.0), shape, generator)
        values = torch.where(where, odd, 4 * _uniform(shape, generator) - 2)
        return values.to(dtype).requires_grad_(kind.graded)
    limits = torch.iinfo(dtype)
    known = [one for one in integers if limits.min <= one <= limits.max]
    choices = ([0, 1, 2], [0, 1, 1, 0, *known], [0], [0, 1])[style]
    return _picked(choices, shape, generator).to(dtype)


def _uniform(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    return torch.rand(shape, generator=generator, device="cpu", dtype=torch.float32)


def _picked(
    choices: Sequence[float], shape: Sequence[int], generator: torch.Generator
) -> torch.Tensor:
    """Return a tensor of some of the choices, exact for integers of 64 bits."""
    whole = all(isinstance(one, int) for one in choices)
    dtype = torch.int64 if whole else torch.float32
    known = torch.tensor(choices, dtype=dtype, device="cpu")
    return known[(_uniform(shape, generator) * len(choices)).long()]


# -- running both ------------------------------------------------------------------------------------


class _Run(NamedTuple):
    result: object
    inputs: Inputs
    gradients: list[torch.Tensor | None]
    stream: torch.Tensor


class _Pair:
    """Both versions of a function, ready to run."""

    def __init__(self, before: AloneFunction, after: AloneFunction, *, exact: bool) -> None:
        self._ran: set[int] = set()
        self._reached: set[int] = set()
        self._lines: set[int] = set()
        self._styles: list[int] = []
        self._relations, self._types = "", ""
        space = _space(before, self._ran)
        self._before, self._after = _callable(before, space), _callable(after, _space(after, set()))
        self._exact = exact
        named = {one for one in space.values() if type(one) is int}
        self._integers = sorted(before.constants | {-one for one in before.constants} | named)

    def begin(self, kinds: Kinds) -> None:
        """Note what the original accepts of the kinds of the run: draws, and the lines that run."""
        self._relations, self._types = _relations(kinds), _types(kinds)
        self._styles = [one for one in range(_STYLES) if self._returns(kinds, one)]
        self._lines = set(self._reached) if self.accepts(kinds) else set()

    def accepts(self, kinds: Kinds) -> bool:
        """Return True if the original as a whole accepts the kinds.

        Values that suit a type may not suit another, such as indices: of other types one draw is enough.
        """
        self._reached.clear()
        returned = [self._returns(kinds, one) for one in self._styles]
        if not any(returned) or not (all(returned) or _types(kinds) != self._types):
            return False
        return self._lines <= self._reached or _relations(kinds) == self._relations

    def agrees(self, kinds: Kinds) -> bool:
        """Return True if both versions return the same for all draws."""
        return all(self._agrees(self._drawn(kinds, one)) for one in self._styles)

    def _returns(self, kinds: Kinds, style: int) -> bool:
        """Return True if the original returns, and add the lines that ran."""
        self._ran.clear()
        returned = _run(self._before, self._drawn(kinds, style)) is not None
        self._reached |= self._ran if returned else set()
        return returned

    def _drawn(self, kinds: Kinds, style: int) -> Inputs:
        return _drawn(kinds, self._integers, style)

    def _agrees(self, inputs: Inputs) -> bool:
        one, other = _run(self._before, inputs), _run(self._after, inputs)
        if one is None or other is None or self._exact or self._alike(one, other):
            return one is None or (other is not None and self._alike(one, other))
        # A sum that nearly cancels: the difference has to vanish in float64.
        wide = {name: _wide(value) for name, value in inputs.items()}
        one, other = _run(self._before, wide), _run(self._after, wide)
        return one is None or (other is not None and self._alike(one, other))

    def _alike(self, one: _Run, other: _Run) -> bool:
        pairs = (
            (one.result, other.result),
            (list(one.inputs.values()), list(other.inputs.values())),
        )
        return (
            all(_same(a, b, exact=self._exact) for a, b in pairs)
            and _same(one.gradients, other.gradients, exact=self._exact)
            and torch.equal(one.stream, other.stream)
        )


_RAN = "__torchtrim_ran__"


def _space(function: AloneFunction, ran: set[int]) -> dict[str, object]:
    """Return the names of a module whose statements add their numbers to a set when they run."""
    module = copy.deepcopy(function.module)
    blocks = [
        block
        for part in ast.walk(module)
        if not isinstance(part, ast.Module)
        for name in ("body", "orelse", "finalbody")
        if isinstance(block := getattr(part, name, None), list)
    ]
    numbers = itertools.count()
    for block in blocks:
        marks = [ast.parse(f"{_RAN}({next(numbers)})").body[0] for _ in block]
        block[:] = itertools.chain.from_iterable(zip(marks, block, strict=True))
    return run_alone(ast.fix_missing_locations(module), {_RAN: ran.add})


def _callable(function: AloneFunction, space: Mapping[str, object]) -> Callable[[Inputs], object]:
    found = space[function.name]
    assert callable(found)

    def call(inputs: Inputs) -> object:
        words = {name: value for name, value in inputs.items() if "." not in name}
        own = {name.partition(".")[2]: v for name, v in inputs.items() if "." in name}
        return found(SimpleNamespace(**own), **words) if function.bound else found(**words)

    return call


def _run(function: Callable[[Inputs], object], inputs: Inputs) -> _Run | None:
    own = {name: _copied(value) for name, value in inputs.items()}
    state = torch.get_rng_state()
    try:
        torch.default_generator.manual_seed(5)
        # Leaves that require gradients cannot be written to in place, and in a network they are no leaves.
        used = {name: _inner(value) for name, value in own.items()}
        result = function(used)
        losses = [
            one for one in tensors_in(result) if one.requires_grad and one.is_floating_point()
        ]
        if losses:
            total = torch.stack([(one.double() * _weight(one)).sum() for one in losses]).sum()
            torch.autograd.backward(total)
        gradients = [getattr(value, "grad", None) for value in own.values()]
        return _Run(result, used, gradients, torch.get_rng_state())
    except Exception:
        return None
    finally:
        torch.set_rng_state(state)


def _copied(value: Value) -> Value:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _inner(value: Value) -> Value:
    return value * 1 if isinstance(value, torch.Tensor) and value.requires_grad else value


def _wide(value: Value) -> Value:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.detach().double().requires_grad_(value.requires_grad)


def _weight(tensor: torch.Tensor) -> torch.Tensor:
    """Return a weight for each element, so that gradients tell elements apart."""
    steps = torch.arange(tensor.numel(), dtype=torch.float64, device="cpu").view(tensor.shape)
    return 0.5 + steps / max(tensor.numel(), 1)


def _same(one: object, other: object, *, exact: bool) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return _same_tensor(one.detach(), other.detach(), exact=exact)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        pairs = zip(one, other, strict=False)
        return len(one) == len(other) and all(_same(a, b, exact=exact) for a, b in pairs)
    if isinstance(one, dict) and isinstance(other, dict):
        values = list(one.values()), list(other.values())
        return list(one) == list(other) and _same(*values, exact=exact)
    if isinstance(one, float) and isinstance(other, float):
        near = not exact and math.isclose(one, other, rel_tol=1e-9)
        return near or one == other or (one != one and other != other)
    return one == other


def _same_tensor(one: torch.Tensor, other: torch.Tensor, *, exact: bool) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    if one.is_complex():
        one, other = (
            torch.view_as_real(one.resolve_conj()),
            torch.view_as_real(other.resolve_conj()),
        )
    if exact or not one.is_floating_point():
        return torch.equal(one, other) or torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    finite = one[one.isfinite()].abs()
    near = _EPSILON[one.dtype]
    scale = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(one, other, rtol=near, atol=near * max(scale, 1e-30), equal_nan=True)
