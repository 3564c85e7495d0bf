"""Calls a function before and after its fixes on equal arguments, for `bench.unsafe_fixes`.

Arguments are searched for, since a function accepts few that are drawn blindly: a draw that ran more lines of
the original is changed in an argument or two next. A draw counts where the original returns.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import os
import random
import resource
import select
import signal
import sys
import textwrap
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

import torchtrim
from bench import unsafe_draws as draws
from bench.fix_cases import proving
from bench.unsafe_loading import Pair

_CALL_SECONDS = 1.0
_MEMORY = 4 * 2**30
_FILE_BYTES = 2**20
_ENOUGH, _ENOUGH_REACHED = 60, 24
_EMULATED = 6
_DEEP = 7


class TooLong(BaseException):
    """A call took longer than it may."""


class Draw(NamedTuple):
    """The seeds of a call's arguments, by name; of the object that it is a method of, and its attributes."""

    shapes: int
    picks: dict[str, int]
    owner: int
    bare: bool
    attributes: tuple[str, ...] = ()


class Outcome(NamedTuple):
    """What a call left, as leaves by path; or the error that it raised."""

    leaves: dict[str, Any]
    error: BaseException | None = None


class Unit:
    """One changed function and the ways to call it."""

    def __init__(self, pair: Pair, changed: set[int], equivalence: str) -> None:
        self.pair = pair
        self.exact = equivalence == "BITWISE"
        self.tree = _tree(pair.original)
        self.hints = draws.hints(pair.original, self.tree)
        self.changed = changed
        self.attributes: set[str] = set()
        self.on_device = False
        if pair.bound != "static":
            self.hints = self.hints[1:]

    def drawn(self, rng: random.Random, best: Draw | None) -> Draw:
        """Draw the next call: anew, or the best so far with another argument or two."""
        names = [*(hint.name for hint in self.hints)]
        seed = lambda: rng.randrange(2**31)  # noqa: E731
        if best is None or rng.random() < 0.25:
            bare = rng.random() < 0.5
            picks = {name: seed() for name in names}
            return Draw(seed(), picks, seed(), bare, tuple(sorted(self.attributes)))
        picks = dict(best.picks)
        for name in rng.sample(names, min(len(names), rng.choice((0, 1, 1, 2)))):
            picks[name] = seed()
        return Draw(
            seed() if rng.random() < 0.2 else best.shapes,
            picks,
            seed() if rng.random() < 0.3 else best.owner,
            best.bare,
            tuple(sorted(self.attributes)),
        )

    def given(self, draw: Draw) -> tuple[Any, ...]:
        """The arguments of a draw, made anew. Raises what a constructor raises."""
        shared = draws.shapes(random.Random(draw.shapes))
        own = () if self.pair.bound == "static" else (self._owner(draw, shared),)
        picked = []
        for hint in self.hints:
            _seed(draw.picks[hint.name])
            picked.append(draws.value(hint, random.Random(draw.picks[hint.name]), shared))
        made = (*own, *picked)
        return tuple(_moved(one) for one in made) if self.on_device else made

    def _owner(self, draw: Draw, shared: draws.Shapes) -> Any:
        kind = self.pair.owner
        assert kind is not None
        if self.pair.bound == "class":
            return kind
        _seed(draw.owner)
        rng = random.Random(draw.owner)
        if not draw.bare:
            return draws.instance(kind, rng, shared)
        kind = draws.concrete(kind)
        made = kind.__new__(kind)
        if isinstance(made, nn.Module):
            nn.Module.__init__(made)
        for name in draw.attributes:
            with contextlib.suppress(AttributeError):
                setattr(made, name, draws.attribute(name, rng, shared, self.tree))
        return made

    def outcome(self, function: Callable[..., Any], draw: Draw) -> Outcome:
        """What a call leaves: its result, its arguments, gradients, and the random stream."""
        try:
            with _within(_CALL_SECONDS):
                given = self.given(draw)
                _seed(7)
                words = self._words(given)
                result = function(*words[0], **words[1])
                if inspect.isgenerator(result):
                    result = [one for one, _ in zip(result, range(50), strict=False)]
                back = _backward(result)
        except (Exception, TooLong, SystemExit) as error:
            return Outcome({}, error)
        everything = {"result": result, "given": given, "backward": back}
        leaves = dict(_flat(everything, "", set()))
        leaves["random"] = (torch.get_rng_state(), random.random())
        return Outcome(leaves)

    def _words(self, given: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        own = len(given) - len(self.hints)
        kinds = inspect.signature(self.pair.original).parameters
        positional, words = [*given[:own]], {}
        for hint, one in zip(self.hints, given[own:], strict=True):
            if kinds[hint.name].kind is inspect.Parameter.KEYWORD_ONLY:
                words[hint.name] = one
            else:
                positional.append(one)
        return tuple(positional), words

    def note(self, error: BaseException, draw: Draw) -> None:
        """Note what a call lacked: an attribute of an object made bare, processes to work with."""
        if "process group" in str(error) and not torch.distributed.is_initialized():
            store = torch.distributed.HashStore()
            torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        name = getattr(error, "name", None) or str(error).rpartition("attribute '")[2].rstrip("'")
        if draw.bare and isinstance(error, AttributeError) and name.isidentifier():
            self.attributes.add(name)


def _tree(function: types.FunctionType) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(function.__code__)))


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextlib.contextmanager
def _within(seconds: float) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TooLong

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 0.2)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _backward(result: Any) -> str:
    """Go backward from what a call returned; the name of the error where that is not possible."""
    losses = [
        one for one in proving.leaves(result) if one.requires_grad and one.is_floating_point()
    ]
    try:
        if losses:
            sum(
                (one.double() * proving.weight_of(one).to(one.device)).sum() for one in losses
            ).backward()
    except Exception as error:
        return type(error).__name__
    return ""


def _moved(value: Any) -> Any:
    """The argument on the emulated device, with what it holds."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cuda").requires_grad_(value.requires_grad)
    if isinstance(value, nn.Module):
        for name, one in vars(value).items():
            if isinstance(one, torch.Tensor):
                setattr(value, name, _moved(one))
        return value.to("cuda")
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(map(_moved, value))
    if isinstance(value, dict):
        return type(value)((key, _moved(one)) for key, one in value.items())
    if isinstance(value, torch.device):
        return torch.device("cuda")
    for name, one in getattr(value, "__dict__", {}).items() if not isinstance(value, type) else ():
        if isinstance(one, torch.Tensor | nn.Module):
            setattr(value, name, _moved(one))
    return value


def _flat(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """The leaves of a value by their paths: tensors, numbers, names of types."""
    yield f"{path}:type", type(value).__qualname__
    if isinstance(value, torch.Tensor):
        yield from _of_tensor(value, path)
    elif isinstance(value, np.ndarray):
        yield path, value.tolist()
    elif isinstance(value, bool | int | float | complex | str | bytes | type(None) | torch.dtype):
        yield path, value
    elif id(value) not in seen and path.count("/") < _DEEP:
        seen.add(id(value))
        inner = _inner(value)
        yield f"{path}:keys", [str(name) for name, _ in inner]
        for name, one in inner:
            yield from _flat(one, f"{path}/{name}", seen)


def _of_tensor(value: torch.Tensor, path: str) -> Iterator[tuple[str, Any]]:
    yield f"{path}:where", (str(value.device), value.requires_grad)
    plain = value.detach()
    with contextlib.suppress(Exception):
        plain = plain.to_dense() if plain.layout != torch.strided else plain
    yield path, plain.cpu()
    if value.is_leaf and value.grad is not None:
        yield f"{path}:grad", value.grad.detach().cpu()


def _inner(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return [*value.items()]
    if isinstance(value, list | tuple):
        return [*enumerate(value)]
    if isinstance(value, type | types.FunctionType | types.ModuleType | types.MethodType):
        return []
    return [*getattr(value, "__dict__", {}).items()]


def differs(one: Outcome, other: Outcome, *, exact: bool) -> str:
    """Where two outcomes differ, in words; empty for nowhere."""
    if other.error is not None:
        return f"raises {type(other.error).__name__}: {str(other.error)[:200]}"
    if list(one.leaves) != list(other.leaves):
        return f"other parts: {sorted(set(one.leaves) ^ set(other.leaves))[:4]}"
    terms = _largest(one)
    for path, leaf in one.leaves.items():
        if not _same(leaf, other.leaves[path], exact=exact, terms=terms):
            return f"{path}: {_short(leaf)} became {_short(other.leaves[path])}"
    return ""


def _same(one: Any, other: Any, *, exact: bool, terms: float) -> bool:
    try:
        return proving.same(one, other, exact=exact, terms=terms)
    except (RuntimeError, KeyError):
        return bool(torch.equal(one, other))


def _largest(one: Outcome) -> float:
    given = [leaf for path, leaf in one.leaves.items() if path.startswith("/given")]
    floats = {str(n): leaf for n, leaf in enumerate(given) if isinstance(leaf, torch.Tensor)}
    return proving._largest(floats)


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    if isinstance(value, torch.Tensor):
        text = f"{str(value.dtype)[6:]}{list(value.shape)} {text}"
    return text if len(text) < 160 else f"{text[:160]}..."


def lines_run(
    function: types.FunctionType, call: Callable[[], Outcome]
) -> tuple[Outcome, set[int]]:
    """The outcome of a call of the function, and the lines of its body that ran."""
    ran: set[int] = set()
    codes = {function.__code__, *_within_code(function.__code__)}

    def local(frame: types.FrameType, event: str, _: Any) -> Any:
        if event == "line":
            ran.add(frame.f_lineno)
        return local

    sys.settrace(lambda frame, *_: local if frame.f_code in codes else None)
    try:
        return call(), ran
    finally:
        sys.settrace(None)


def _within_code(code: types.CodeType) -> Iterator[types.CodeType]:
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield one
            yield from _within_code(one)


def tried(unit: Unit, seconds: float, seed: str) -> dict[str, Any]:
    """Search for calls that the original accepts, and say what the same calls of the fixed one gave."""
    found = _search(unit, seconds, f"{seed}/host")
    wants = "cuda" in ast.unparse(unit.tree) and not found["accepted"]
    if wants or found["accepted"]:
        with torchtrim.emulate():
            unit.on_device = True
            if wants:
                found |= _search(unit, seconds, f"{seed}/device")
            else:
                found["emulated"] = _again(unit, found)
            unit.on_device = False
    return {name: value for name, value in found.items() if name != "accepted"}


def _search(unit: Unit, seconds: float, seed: str) -> dict[str, Any]:
    rng, end = random.Random(seed), time.process_time() + seconds
    best, most, reached, tries = None, -1, 0, 0
    accepted: list[Draw] = []
    errors: Counter[str] = Counter()
    failures: list[str] = []
    while time.process_time() < end and not failures:
        if reached >= _ENOUGH_REACHED or len(accepted) >= _ENOUGH * (1 + 9 * (not reached)):
            break
        draw = unit.drawn(rng, best)
        tries += 1
        before, ran = lines_run(
            unit.pair.original, lambda d=draw: unit.outcome(unit.pair.original, d)
        )
        hit = bool(ran & unit.changed)
        score = len(ran) + 5 * hit + (before.error is None)
        if score >= most:
            best, most = draw, score
        if before.error is not None:
            unit.note(before.error, draw)
            errors[f"{type(before.error).__name__}: {str(before.error)[:100]}"] += 1
            continue
        accepted.append(draw)
        reached += hit
        failures += _compared(unit, draw, before)
    return {
        "accepted": accepted,
        "calls": len(accepted),
        "reached": reached,
        "tries": tries,
        "failures": failures,
        "errors": [text for text, _ in errors.most_common(3)],
    }


def _compared(unit: Unit, draw: Draw, before: Outcome) -> list[str]:
    """What differs after the fix, unless the original differs from itself as well."""
    after = unit.outcome(unit.pair.fixed, draw)
    what = differs(before, after, exact=unit.exact)
    if not what or differs(before, unit.outcome(unit.pair.original, draw), exact=unit.exact):
        return []
    return [f"{what} | {described(unit, draw)}"]


def _again(unit: Unit, found: dict[str, Any]) -> int:
    """Make accepted calls on an emulated device; how many of them the original accepts there."""
    count = 0
    for draw in found["accepted"][-_EMULATED:]:
        before = unit.outcome(unit.pair.original, draw)
        if before.error is None:
            count += 1
            if not found["failures"]:
                found["failures"] += [f"emulated: {one}" for one in _compared(unit, draw, before)]
    return count


def described(unit: Unit, draw: Draw) -> str:
    """The arguments of a draw, in short."""
    given = unit.given(draw)[-len(unit.hints) :] if unit.hints else ()
    named = zip((hint.name for hint in unit.hints), given, strict=True)
    return ", ".join(f"{name}={_short(one)}" for name, one in named)[:600]


def apart(function: Callable[[], dict[str, Any]], seconds: float) -> dict[str, Any]:
    """The result of a function in a process of its own, with limits; why there is none, under "died"."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        _answer(function, write)
    os.close(write)
    text, end = b"", time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0 and select.select([read], [], [], left)[0]:
        part = os.read(read, 2**16)
        if not part:
            break
        text += part
    else:
        os.kill(child, signal.SIGKILL)
    os.close(read)
    status = os.waitpid(child, 0)[1]
    with contextlib.suppress(ValueError):
        return dict(json.loads(text))
    return {"died": f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "no answer"}


def _answer(function: Callable[[], dict[str, Any]], write: int) -> None:
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        text = json.dumps(function())
    except BaseException as error:
        text = json.dumps({"died": f"{type(error).__name__}: {str(error)[:200]}"})
    os.write(write, text.encode())
    os._exit(0)


def limit() -> None:
    """Bound what this process may take from now on: memory, and the size of files."""
    has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (has + _MEMORY, has + _MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES, _FILE_BYTES))
    for number in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)
