"""Proves a fix: runs a function before and after it, on inputs that differ in every way that may matter.

A case is a structure (shapes, types, strides, views of each other) with several draws of values. The evidence
comes from the first draw alone, as in a profile, and the others must agree too: empty and full masks, NaN and
infinities where they do no harm in the original, repeated indices.
"""

from __future__ import annotations

import ast
import copy
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import pytest
import torch

import draws
import torchtrim
from fixes.foreign import FEW_REDRAWN, MANY_REDRAWN, Inputs, foreign, lines_of
from torchtrim.capture.probes import Probes
from torchtrim.rewriter.edits import patch
from torchtrim.rewriter.fix import Fix, Match, Rewrite
from torchtrim.source.facts import Facts, FixRefused, StaticValue
from torchtrim.source.source import SourceFile
from torchtrim.workflows.fix_writing import Observation, WrittenFix, kinds_of, probes_of, written

DRAWS = 4
_FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LONGEST = 1.5
"""Seconds for cases of every rank and type in one proof; a fix has several."""
MOST_WHOLE = 2
"""Texts of a proof that are also tried on inputs of any kind, if the function as a whole agrees on them."""
WHOLE_SHARE = 1 / 8
"""Proofs that do so if few cases are wanted: it takes seconds."""
FOREIGN, FEW_FOREIGN, PATIENCE = 8, 8, 30
"""Cases of every rank and type for each structure, or in a proof of few draws; how many are tried for one."""
Run = tuple[Any, Inputs, Any]
Make = Callable[[random.Random], Iterator[Inputs]]
_EPSILON = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@dataclass
class Proof:
    """The outcomes of the cases.

    `agreed`: the original returned a result, and the fix the same; `raised`: both raised alike, which proves
    nothing; `foreign`: inputs of any rank or type that the original accepts, of fixes with which the function
    as a whole agrees.
    """

    agreed: int = 0
    raised: int = 0
    foreign: int = 0
    all_drawn: bool = True
    refused: Counter[str] = field(default_factory=Counter)
    unsafe: Counter[str] = field(default_factory=Counter)

    def reaches(self, agreed: int) -> bool:
        """Return True if enough cases of all structures agreed; if few were drawn, if any did."""
        return self.agreed >= (agreed if self.all_drawn else 1)


def prove(
    fix: Fix,
    code: str,
    make: Make,
    *,
    structures: int = 250,
    seed: int = 0,
    suggested: bool = False,
) -> Proof:
    """Run `function` of the code before and after the fix.

    `make` yields the draws of one structure as keyword arguments; gradients of arguments that require them
    are compared too. A draw is a case if the original returns a result; one that raises is drawn
    again. Raises `AssertionError` with the inputs if anything differs: results, gradients, in-place writes,
    the random stream.

    Code with which the whole function agrees on all kinds of input, by `kinds_of`, has to agree on inputs of
    ranks 0 to 5 and of all types that the original accepts: 8 for each structure in `make test-all`, as
    far as `LONGEST` allows, from a new seed. `suggested` includes fixes that are not safe. Few structures are
    drawn, with another seed, unless all are wanted, or all of the few are refused.
    """
    few = draws.count(structures)
    proof = Proof(all_drawn=few == structures)
    done: dict[str, Inputs] = {}
    start = f"{seed}" if proof.all_drawn else f"{seed}/{draws.seed()}"
    for number in range(2 * structures):
        if number >= few + math.ceil(proof.raised / DRAWS) and (proof.all_drawn or proof.agreed):
            break
        cases = list(make(random.Random(f"{start}/{number}")))
        try:
            rewrite = fixed(fix, code, cases[0])
        except FixRefused as error:
            proof.refused[str(error)] += len(cases)
            continue
        if not rewrite.safe and not suggested:
            proof.unsafe[rewrite.risk or rewrite.open_needs[0]] += len(cases)
            continue
        after = text_of(rewrite)
        for draw in cases:
            accepted = agree(rewrite, code, after, draw)
            proof.agreed += accepted
            proof.raised += not accepted
        done.setdefault(after, cases[0])
    if draws.is_full() or random.Random(start).random() < WHOLE_SHARE:
        tried = [whole(fix, code, evidence) for evidence in [*done.values()][:MOST_WHOLE]]
        shown = [one for one in tried if one is not None]
        proof.foreign = _foreign_that_agree(code, shown, structures) if shown else 0
    return proof


def whole(fix: Fix, code: str, evidence: Inputs) -> tuple[Rewrite, str, Inputs] | None:
    """Return the fix by the evidence, if the function as a whole agrees on all kinds tried."""
    (match,) = matches(fix, code)
    seen = _observed(match, code, evidence)
    rewrite = fix.rewrite(match, Facts(seen.parts))
    tried = kinds_of(rewrite, seen.inputs)
    whole = tried is not None and not tried.differs and tried.complete
    return (rewrite, text_of(rewrite), evidence) if whole else None


def writings(
    fix: Fix, code: str, make: Make, *, structures: int, suggested: bool = False, seed: str = "0"
) -> Iterator[tuple[Rewrite, str, Inputs]]:
    """Yield the code written by the evidence of each structure, and that evidence."""
    for number in range(structures):
        evidence = next(make(random.Random(f"{seed}/{number}")))
        try:
            rewrite = fixed(fix, code, evidence)
        except FixRefused:
            continue
        if rewrite.safe or suggested:
            yield rewrite, text_of(rewrite), evidence


def _foreign_that_agree(
    code: str, written: list[tuple[Rewrite, str, Inputs]], structures: int
) -> int:
    """Try the written code on inputs of ranks 0 to 5 and of all types, until the original accepted enough.

    Only inputs count that the function as a whole accepts, not an early return alone.
    """
    rng = random.Random(f"{draws.seed()}/{code}")
    wanted = FOREIGN * structures if draws.is_full() else FEW_FOREIGN
    lines = [lines_of(partial(raises, code), rng, one[2], MANY_REDRAWN) for one in written]
    found, until = 0, time.monotonic() + LONGEST
    for _ in range(PATIENCE * wanted):
        if found >= wanted or time.monotonic() > until:
            break
        number = rng.randrange(len(written))
        rewrite, after, evidence = written[number]
        stranger = foreign(rng, evidence)
        if lines[number] <= lines_of(partial(raises, code), rng, stranger, FEW_REDRAWN):
            found += agree_if_accepted(rewrite, code, after, evidence, stranger)
    return found


def agree_if_accepted(
    rewrite: Rewrite, code: str, after: str, evidence: Inputs, stranger: Inputs
) -> bool:
    """Return True if the original accepts inputs beyond the evidence; then the fix has to agree."""
    # Requirements of gradients stay as observed: a fix may depend on them.
    case = {name: _trained_as(evidence[name], value) for name, value in stranger.items()}
    if any(one is _OTHER for one in case.values()) or raises(code, case):
        return False
    name, has_complex = rewrite.match.fix.name, any(map(torch.is_complex, leaves([*case.values()])))
    if has_complex and (name in _REAL_PART or (name in _REAL and raises(after, case))):
        return False
    agree(rewrite, code, after, case)
    return True


_OTHER = object()
# They assume real numbers: of complex ones the first two keep the real part, others may refuse them.
_REAL_PART = ("appended_read", "coalesced_reads")
_REAL = ("collected_reads", "invariant_read", "iterated_read", "padding_mask")


def _trained_as(seen: Any, value: Any) -> Any:
    wanted = isinstance(seen, torch.Tensor) and seen.requires_grad
    if type(seen) is not type(value):
        return _OTHER
    if not isinstance(value, torch.Tensor):
        return _OTHER if wanted else value
    if wanted and not value.is_floating_point():
        return _OTHER
    return value.detach().requires_grad_(wanted)


def raises(code: str, inputs: Inputs) -> bool:
    """Return True if the code rejects the inputs."""
    return is_error(run(compiled(code), inputs)[0])


def is_error(result: Any) -> bool:
    """Return True if a run ended in an error, whose type is the result."""
    return isinstance(result, type) and issubclass(result, Exception)


def code_of(head: str, body: str) -> str:
    """Return a function: its head, and the lines of its body."""
    return head + "".join(f"    {line}\n" for line in body.splitlines())


def matches(fix: Fix, code: str) -> list[Match]:
    """Return the places in the code that the fix matches."""
    return list(fix.find(SourceFile("case.py", code)))


def unseen(fix: Fix, code: str, **static: StaticValue) -> Rewrite:
    """Return the fix of the only matching place in the code, without a run."""
    (match,) = matches(fix, code)
    return fix.rewrite(match, Facts(static=static))


def refuses(fix: Fix, code: str, inputs: Inputs, reason: str) -> None:
    """Check that the fix of the code is refused, by the evidence of one run, for a reason."""
    with pytest.raises(FixRefused, match=reason):
        fixed(fix, code, inputs)


def text_of(rewrite: Rewrite) -> str:
    """Return the code after the fix."""
    return patch(rewrite.match.source, [rewrite]).text


def fixed(fix: Fix, code: str, inputs: Inputs) -> Rewrite:
    """Return the fix of the only matching place in the code, by the evidence of one run."""
    (match,) = matches(fix, code)
    return fix.rewrite(match, Facts(_observed(match, code, inputs).parts))


def written_by(fix: Fix, code: str, inputs: Inputs) -> WrittenFix:
    """Return the fix of the first matching place in the code, as `optimize --fix` writes it."""
    match = matches(fix, code)[0]
    return written(match, _observed(match, code, inputs))


def as_written(fix: Fix, code: str, inputs: Inputs) -> str:
    """Return the code after the fix of each of its places."""
    while matches(fix, code):
        code = text_of(written_by(fix, code, inputs).rewrite)
    return code


def _observed(match: Match, code: str, inputs: Inputs) -> Observation:
    probes = Probes(probes_of(match, 0))
    probes.install()
    try:
        tree = probes.instrument("case.py", ast.parse(code))
        run(compile(tree, "case.py", "exec"), inputs)
    finally:
        probes.remove()
    return Observation(*probes.observed())


@cache
def compiled(text: str) -> Any:
    """Return the module of a case's code."""
    return compile(text, "case.py", "exec")


def waits(code: str, inputs: Inputs) -> int:
    """Count the waits of `function`, and of backward from its result, with its tensors on a device."""
    space: dict[str, Any] = {}
    exec(compiled(code), space)
    there: Inputs = {}

    def call() -> None:
        if not there:
            there.update({name: _on_device(value) for name, value in copied(inputs).items()})
            return
        losses = [one for one in leaves(space["function"](**there)) if one.requires_grad]
        if losses:
            torch.stack([one.sum() for one in losses]).sum().backward()

    return sum(count for *_, count in torchtrim.measure(call, warmup=1).waits)


def _on_device(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().to("cuda").requires_grad_(value.requires_grad)


def syncs_go(fix: Fix, code: str, inputs: Inputs) -> tuple[int, int]:
    """Count how often the code waits before and after the fix."""
    rewrite = fixed(fix, code, inputs)
    return waits(code, inputs), waits(text_of(rewrite), inputs)


def run(code: Any, inputs: Inputs) -> Run:
    """Return `function`'s result, its inputs with gradients, the random stream and backward's error."""
    space: dict[str, Any] = {}
    exec(code, space)
    own = copied(inputs)
    torch.manual_seed(5)
    random.seed(5)
    failed = None
    try:
        result = space["function"](**own)
        losses = [one for one in leaves(result) if one.requires_grad and one.is_floating_point()]
        if losses:
            try:
                sum((one.double() * weight_of(one)).sum() for one in losses).backward()
            except Exception as error:  # backward's, not the function's
                failed = type(error)
    except Exception as error:
        return type(error), own, None
    return result, own, (torch.get_rng_state(), (random.getstate(), failed))


def weight_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a weight for each element, so that gradients tell elements apart."""
    weights = torch.linspace(0.5, 1.5, max(tensor.numel(), 1), dtype=torch.float64)
    return weights[: tensor.numel()].view(tensor.shape)


def agree(rewrite: Rewrite, before: str, after: str, inputs: Inputs) -> bool:
    """Return True if the original returns a result. Raises `AssertionError` unless the fix returns the same.

    Up to rounding if the fix may round. Larger differences, as in a sum that nearly cancels, have to vanish
    in float64; a fix that found another type and keeps it may differ by the rounding of its summands.
    """
    one = run(compiled(before), inputs)
    what = _difference(rewrite, one, after, inputs)
    if what and rewrite.equivalence != "BITWISE":
        wide = {name: _wide(value) for name, value in inputs.items()}
        what = _difference(rewrite, run(compiled(before), wide), after, wide)
    if what and rewrite.equivalence != "BITWISE":
        what = _difference(rewrite, one, after, inputs, _largest(inputs))
    assert not what, what
    return not is_error(one[0])


def _largest(inputs: Inputs) -> float:
    """Return the largest magnitude among the input floats."""
    floats = [v for v in inputs.values() if isinstance(v, torch.Tensor) and v.is_floating_point()]
    finite = [value.detach()[value.isfinite()].abs().double() for value in floats]
    return max((float(value.max()) for value in finite if value.numel()), default=0.0)


def _difference(rewrite: Rewrite, one: Run, after: str, inputs: Inputs, terms: float = 0.0) -> str:
    """Describe where the fix differs from the original's run, or return `""`. `terms`: the summands' size."""
    other = run(compiled(after), inputs)
    what = f"{rewrite.match.fix.name}\n{after}\n{inputs}\nbefore {one[0]}\nafter {other[0]}"
    exact = rewrite.equivalence == "BITWISE"
    if not same(one[0], other[0], exact=exact, terms=terms):
        return what
    if not same(list(one[1].values()), list(other[1].values()), exact=exact, terms=terms):
        return f"inputs: {what}"
    for name in inputs:
        grads = [getattr(run_[1][name], "grad", None) for run_ in (one, other)]
        if not same(*grads, exact=exact, terms=terms):
            return f"gradient of {name}: {grads}\n{what}"
    if one[2] is not None:
        alike = torch.equal(one[2][0], other[2][0]) and one[2][1] == other[2][1]
        return "" if alike else f"random stream, or an error in backward: {what}"
    return ""


def _wide(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.detach().double().requires_grad_(value.requires_grad)
    return value


def same(one: Any, other: Any, *, exact: bool, terms: float = 0.0) -> bool:
    """Return True if two results agree in type, shape and values; NaN equals NaN, and 0.0 equals -0.0."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return _same_tensor(one.detach(), other.detach(), exact=exact, terms=terms)
    if isinstance(one, list | tuple):
        return (
            type(one) is type(other)
            and len(one) == len(other)
            and all(same(a, b, exact=exact, terms=terms) for a, b in zip(one, other, strict=True))
        )
    if isinstance(one, dict) and isinstance(other, dict):
        values = list(one.values()), list(other.values())
        return list(one) == list(other) and same(*values, exact=exact, terms=terms)
    if type(one) is not type(other):
        return False
    near = not exact and isinstance(one, float) and isinstance(other, float)
    alike = one == other or (one != one and other != other)
    return alike or (near and math.isclose(one, other, rel_tol=1e-12))


def _same_tensor(one: torch.Tensor, other: torch.Tensor, *, exact: bool, terms: float) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if one.is_complex():
        parts = (torch.view_as_real(part.resolve_conj()) for part in (one, other))
        return _same_tensor(*parts, exact=exact, terms=terms)
    if exact or not one.is_floating_point():
        return torch.equal(torch.nan_to_num(one, nan=77.0), torch.nan_to_num(other, nan=77.0)) and (
            torch.equal(one.isnan(), other.isnan())
        )
    near = _EPSILON[one.dtype]
    finite = one[one.isfinite()]
    scale = max(terms, float(finite.abs().max()) if finite.numel() else 0.0)
    return torch.allclose(one, other, rtol=near, atol=near * scale, equal_nan=True)


def leaves(result: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a result."""
    if isinstance(result, torch.Tensor):
        yield result
    elif isinstance(result, list | tuple):
        for one in result:
            yield from leaves(one)
    elif isinstance(result, dict):
        yield from leaves(list(result.values()))


def copied(inputs: Inputs) -> Inputs:
    """Return new inputs with the same strides, views of each other and requirements of gradients."""
    memo: dict[int, Any] = {}
    return {name: _copied(value, memo) for name, value in inputs.items()}


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    storage = value.untyped_storage()
    if storage._cdata not in memo:
        memo[storage._cdata] = storage.clone()
    new = torch.empty(0, dtype=value.dtype)
    new.set_(memo[storage._cdata], value.storage_offset(), value.shape, value.stride())
    return new.requires_grad_(value.requires_grad)


# -- draws of values -----------------------------------------------------------------------------


def shape(rng: random.Random, *, most: int = 3, least: int = 1) -> tuple[int, ...]:
    """Draw a small shape; now and then with a dimension of zero or one."""
    return tuple(rng.choice((0, 1, 1, 2, 3, 4, 5)) for _ in range(rng.randint(least, most)))


def rows_to_loop_over(rng: random.Random) -> Iterator[Inputs]:
    """Draw a matrix `x`, whose rows a loop reads, and a small number `n`."""
    dtype, width, graded = rng.choice(_FLOATS), rng.randint(1, 4), rng.random() < 0.5
    for draw in range(DRAWS):
        rows = rng.choice((0, 1, 3, 6)) if draw else rng.choice((1, 4))
        x = floating(rng, (rows, width), dtype, odd=rng.choice((0, 0.2)))
        yield {"x": x.requires_grad_(graded), "n": rng.choice((1, 3, 7))}


def floating(
    rng: random.Random, size: tuple[int, ...], dtype: torch.dtype, *, odd: float = 0.0
) -> torch.Tensor:
    """Draw random numbers; a share of them NaN or infinite. Strided, now and then."""
    full = torch.randn(strided(rng, size), generator=_generator(rng)).to(dtype)
    for value in (float("nan"), float("inf"), float("-inf"), 0.0, -0.0):
        full[torch.rand(full.shape, generator=_generator(rng)) < odd / 5] = value
    return _narrowed(full, size)


def _generator(rng: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(rng.randrange(2**31))


def integral(
    rng: random.Random, size: tuple[int, ...], dtype: torch.dtype, low: int = -3, high: int = 4
) -> torch.Tensor:
    """Draw random integers of few values."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    full = torch.randint(low, high, strided(rng, size), generator=generator)
    return _narrowed(full.to(dtype), size)


def mask(rng: random.Random, size: tuple[int, ...]) -> torch.Tensor:
    """Draw a mask: empty, full or mixed."""
    share = rng.choice((0.0, 0.1, 0.5, 0.9, 1.0))
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    return _narrowed(torch.rand(strided(rng, size), generator=generator) < share, size)


def strided(rng: random.Random, size: tuple[int, ...]) -> tuple[int, ...]:
    """Draw the size, or a size that takes every second element of a dimension."""
    if not size or rng.random() < 0.6:
        return size
    at = rng.randrange(len(size))
    return (*size[:at], size[at] * 2, *size[at + 1 :])


def _narrowed(full: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
    for at, (has, wanted) in enumerate(zip(full.shape, size, strict=True)):
        if has != wanted:
            full = full[(slice(None),) * at + (slice(None, None, 2),)]
    return full
