"""What the checks that plans make in every step cost, as a share of the step: at most 1 % is the goal.

    pip install --no-deps torchvision==0.28.0 && pip install transformers
    python -m bench.watching [NAME...] [--steps N] [--json]

A clock around each check adds up its seconds within a step, so that the share holds on a busy machine too:
whatever slows the checks slows the rest of the step as well. Recomputed models also run under torch's own
`checkpoint`, which checks nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import time
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from tests.cases import nets, zoo
from torch import nn
from torch.utils.checkpoint import checkpoint

from bench import machine
from torchtrim.executor.block_state import Before, BlockState
from torchtrim.records.plan import Technique
from torchtrim.techniques.optimizer_in_backward import running as early_update
from torchtrim.techniques.optimizer_in_backward.running import EarlyUpdates
from torchtrim.techniques.optimizer_in_backward.technique import TECHNIQUE as OPTIMIZER_IN_BACKWARD
from torchtrim.techniques.overwrite.running import Holders
from torchtrim.techniques.overwrite.technique import TECHNIQUE as OVERWRITE
from torchtrim.techniques.overwrite.technique import TYPES
from torchtrim.techniques.recompute import rerun
from torchtrim.techniques.recompute.technique import TECHNIQUE as RECOMPUTE

GOAL = 0.01
_WARMUP = 2
_OURS = "torchtrim.bench"

Check = tuple[Any, str]
CHECKS: dict[str, tuple[Check, ...]] = {
    "recompute": (
        (BlockState, "why_once"),
        (BlockState, "begin"),
        (Before, "has_run"),
        (Before, "again"),
        (rerun, "GivenArguments"),
    ),
    "optimizer_in_backward": (
        (EarlyUpdates, "_is_early"),
        (EarlyUpdates, "_keep_order"),
        (EarlyUpdates, "_check_marks"),
        (EarlyUpdates, "_take_marks"),
        (early_update, "has_step_hooks"),
        (early_update, "_settings"),
    ),
    "overwrite": ((Holders, "is_replaced"), (Holders, "are_more")),
}
MODELS: dict[str, dict[str, tuple[str, ...]]] = {
    "recompute": {
        "gpt2": ("GPT2Block",),
        "bert": ("BertLayer",),
        "vit_b_16": ("EncoderBlock",),
        "convnext_tiny": ("CNBlock",),
        "resnet50": ("Bottleneck",),
        "mobilenet_v2": ("InvertedResidual",),
        "own unet": ("Sequential",),
    },
    "optimizer_in_backward": dict.fromkeys(
        ("gpt2", "bert", "vit_b_16", "convnext_tiny", "resnet50", "own unet"), ("AdamW",)
    ),
    "overwrite": dict.fromkeys(
        ("resnet50", "vgg11", "mobilenet_v2", "densenet121", "own unet"), tuple(sorted(TYPES))
    ),
}
_ZOO = {
    **zoo.CALIBRATION,
    "mobilenet_v2": zoo.vision("mobilenet_v2", 160, 8),
    "own unet": zoo.own(nets.UNet, lambda: zoo.pixels(8, 192)),
}


class Clock:
    """The seconds spent in checks, by name; a check within another counts for the outer one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._depth = 0

    def __enter__(self) -> None:
        self._depth += 1
        self._begin = time.perf_counter() if self._depth == 1 else self._begin

    def __exit__(self, *error: object) -> None:
        self._depth -= 1

    def add(self, name: str) -> None:
        """Add the time since the outermost check began, if that is the one that has just ended."""
        if not self._depth:
            took = time.perf_counter() - self._begin
            self.seconds[name] = self.seconds.get(name, 0.0) + took

    def around(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its time taken; of a context manager, entry and exit are timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self:
                result = function(*args, **kwargs)
            self.add(name)
            is_context = isinstance(result, contextlib.AbstractContextManager)
            return _TimedContext(result, self, name) if is_context else result

        return _within_the_package(timed)


class _TimedContext(contextlib.AbstractContextManager[Any]):
    """A context manager with the time of its entry and of its exit taken."""

    def __init__(self, inner: Any, clock: Clock, name: str) -> None:
        self._enter = clock.around(name, inner.__enter__)
        self._exit = clock.around(name, inner.__exit__)

    def __enter__(self) -> Any:
        return self._enter()

    def __exit__(self, *error: object) -> Any:
        return self._exit(*error)


def _within_the_package(function: Any) -> Callable[..., Any]:
    """Return the function as one of torchtrim's: checks that walk the stack stop at the program's frames."""
    names = {**function.__globals__, "__name__": _OURS}
    return types.FunctionType(
        function.__code__, names, function.__name__, None, function.__closure__
    )


@contextlib.contextmanager
def clocked(checks: Sequence[Check]) -> Iterator[Clock]:
    """Put a clock around checks."""
    clock = Clock()
    before = [getattr(owner, name) for owner, name in checks]
    for (owner, name), function in zip(checks, before, strict=True):
        setattr(owner, name, clock.around(name.strip("_"), function))
    try:
        yield clock
    finally:
        for (owner, name), function in zip(checks, before, strict=True):
            setattr(owner, name, function)


class Took(NamedTuple):
    """One step: its seconds, and those of its checks by name."""

    step: float
    checks: dict[str, float]

    @property
    def share(self) -> float:
        """The share of the step that its checks take."""
        return sum(self.checks.values()) / self.step


def run(
    sample: zoo.Sample, optimizer: torch.optim.Optimizer, clock: Clock, steps: int
) -> list[Took]:
    """Train for some steps after a warm-up."""
    took = []
    for _ in range(_WARMUP + steps):
        clock.seconds, begin = {}, time.perf_counter()
        loss = sample.loss(sample.model, sample.batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        took.append(Took(time.perf_counter() - begin, clock.seconds))
    return took[_WARMUP:]


def places(model: nn.Module, kinds: Sequence[str]) -> tuple[str, ...]:
    """Return the paths of a model's modules of some types."""
    name = type(model).__name__
    return tuple(
        f"{name}.{path}" for path, one in model.named_modules() if _is(one, kinds) and path
    )


def _is(module: nn.Module, kinds: Sequence[str]) -> bool:
    return type(module).__name__ in kinds


def apply(technique: str, model: nn.Module, optimizer: Any, kinds: Sequence[str]) -> Any:
    """Apply a technique wherever it can be, and return its handle."""
    if technique == "optimizer_in_backward":
        plan = Technique(name=technique, where=tuple(kinds), options={"backwards": 1})
        return OPTIMIZER_IN_BACKWARD.apply({kinds[0]: optimizer}, plan)
    one = RECOMPUTE if technique == "recompute" else OVERWRITE
    plan = Technique(name=technique, where=places(model, kinds))
    return one.apply({type(model).__name__: model}, plan)


def measure(technique: str, name: str, steps: int) -> dict[str, Any]:
    """The checks of one technique on one model."""
    torch.manual_seed(0)
    sample = _ZOO[name]()
    sample.model.train()
    if hasattr(sample.model, "config"):
        sample.model.config.use_cache = False  # type: ignore[union-attr]
    optimizer = torch.optim.AdamW(sample.model.parameters(), lr=1e-5)
    kinds = MODELS[technique][name]
    with clocked(CHECKS[technique]) as clock:
        handle = apply(technique, sample.model, optimizer, kinds)
        took = run(sample, optimizer, clock, steps)
        handle.revert()
    found = _summary(took)
    found["places"] = 1 if kinds == ("AdamW",) else len(places(sample.model, kinds))
    if technique == "recompute":
        _checkpoint(sample.model, kinds)
        found["plain_ms"] = _ms(min(one.step for one in run(sample, optimizer, Clock(), steps)))
    return found


def _checkpoint(model: nn.Module, kinds: Sequence[str]) -> None:
    """Have torch's own `checkpoint` run the modules again."""
    for module in model.modules():
        if module is not model and _is(module, kinds):
            forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
            module.forward = forward  # type: ignore[assignment]


def _summary(took: Sequence[Took]) -> dict[str, Any]:
    shares = [one.share for one in took]
    names = sorted({name for one in took for name in one.checks})
    return {
        "checks_ms": _ms(statistics.median(sum(one.checks.values()) for one in took)),
        "step_ms": _ms(statistics.median(one.step for one in took)),
        "fastest_step_ms": _ms(min(one.step for one in took)),
        "share": round(statistics.median(shares), 5),
        "largest_share": round(max(shares), 5),
        "by_check_ms": {
            name: _ms(statistics.median(one.checks.get(name, 0.0) for one in took))
            for name in names
        },
    }


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)


def show(technique: str, name: str, found: dict[str, Any]) -> None:
    """Print one line."""
    each = ", ".join(f"{check} {ms:.2f}" for check, ms in found["by_check_ms"].items())
    over = "" if found["share"] <= GOAL else "  OVER"
    print(
        f"{technique:<22} {name:<14} {found['places']:3d} places  checks {found['checks_ms']:7.2f} ms of "
        f"{found['step_ms']:8.1f} ms: {found['share']:6.2%}{over}  ({each})",
        flush=True,
    )


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="techniques; all of them by default"
    )
    parser.add_argument("--json", action="store_true", help="save the results as JSON")
    parser.add_argument("--steps", type=int, default=7)
    options = parser.parse_args()
    if unknown := set(options.names) - set(MODELS):
        parser.error(f"no technique {sorted(unknown)[0]!r}; there are {', '.join(MODELS)}")
    torch.set_num_threads(1)
    found: dict[str, dict[str, Any]] = {}
    for technique in options.names or MODELS:
        for name in MODELS[technique]:
            one = measure(technique, name, options.steps)
            found.setdefault(technique, {})[name] = one
            show(technique, name, one)
    if options.json:
        print(f"wrote {machine.save('watching', {'goal': GOAL, 'techniques': found})}")


if __name__ == "__main__":
    main()
