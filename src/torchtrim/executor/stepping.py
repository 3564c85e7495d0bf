"""Replace the `step` of one optimizer, reversibly."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from torchtrim.capture.code.hooks import is_ours
from torchtrim.capture.optimizers import parameters_of
from torchtrim.errors import ApplyFailed
from torchtrim.executor.notices import say_once
from torchtrim.step.optimizers import ONE_BY_ONE

Around = Callable[[torch.optim.Optimizer], contextlib.AbstractContextManager[None]]
Group = dict[str, Any]


class _ReplacedStep:
    """A replaced `step`, which stays after `revert` and only forwards calls if others wrapped it."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, run: Callable[..., Any], step: Callable[..., Any]
    ) -> None:
        self._optimizer = optimizer
        self._run: Callable[..., Any] | None = run
        method: Any = types.MethodType(step, optimizer)
        before = optimizer.__dict__.get("step")
        method.__func__.put = method, before, lambda: self._run is not None
        optimizer.__dict__["step"] = method

    def revert(self) -> None:
        """Restore the optimizer: remove replaced steps that are off, outermost first."""
        self._run = None
        own = self._optimizer.__dict__
        while (top := own.get("step")) is not None:
            step, before, is_on = getattr(top, "put", (None, None, None))
            if step is not top or is_on is None or is_on():
                return
            if before is None:
                del own["step"]
            else:
                own["step"] = before


class Stepping(_ReplacedStep):
    """Runs each step of an optimizer inside a context, except steps with a closure, which computes gradients.

    `closures`: those too. `whole`: the optimizer steps without the context once it has step hooks, which
    would see another state. A scheduler may wrap `step` before or after.
    """

    def __init__(
        self,
        where: str,
        optimizer: torch.optim.Optimizer,
        around: Around,
        *,
        whole: bool = False,
        closures: bool = False,
    ) -> None:
        refuse(where, optimizer)
        inner = optimizer.step
        function: Any = getattr(inner, "__func__", inner)

        @functools.wraps(function)
        def step(self_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            run = inner if function is inner else functools.partial(function, self_)
            closed = not closures and any(map(callable, (*args, *kwargs.values())))
            if self._run is None or closed:
                return run(*args, **kwargs)
            if whole and has_step_hooks(self_):
                say_once(where, _HOOKED)
                return run(*args, **kwargs)
            with self._run(self_):
                return run(*args, **kwargs)

        super().__init__(optimizer, around, step)


class OwnStep(_ReplacedStep):
    """Replaces the step of an optimizer by `run(original_step)`, which may call it once for each part.

    A closure runs first, so the original step is called without it. Inside `whole()` the step is the
    program's own, for all parameters at once: the optimizer steps so once it has step hooks.
    """

    def __init__(
        self,
        where: str,
        optimizer: torch.optim.Optimizer,
        run: Callable[[Callable[[], Any]], None],
        whole: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        inner: Any = optimizer.step

        @functools.wraps(getattr(inner, "__func__", inner))
        def step(_: torch.optim.Optimizer, closure: Any = None) -> Any:
            given = () if closure is None else (closure,)
            if self._run is None:
                return inner(*given)
            if has_step_hooks(optimizer):
                say_once(where, _HOOKED)
                with whole():
                    return inner(*given)
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._run(inner)
            return loss

        super().__init__(optimizer, run, step)


_HOOKED = (
    "it has step hooks now, which would see some parameters at a time, so it steps without the plan, and the "
    "plan's saving there is lost."
)


def run_in_chunks(most: int) -> Around:
    """During `step`, split each parameter group into groups of at most `most` bytes or one parameter.

    Parameters without a gradient are left out, since they are not updated.
    """

    @contextlib.contextmanager
    def around(optimizer: torch.optim.Optimizer) -> Iterator[None]:
        whole = optimizer.param_groups
        optimizer.param_groups = [part for group in whole for part in cut(group, most)]
        try:
            yield
        finally:
            optimizer.param_groups = whole

    return around


def run_fused(where: str, optimizer: torch.optim.Optimizer) -> Around:
    """During `step`, set `fused` in all groups. Raises `ApplyFailed` if torch has no such kernel."""
    if not all("fused" in group for group in optimizer.param_groups):
        raise ApplyFailed(
            f"`{where}` is a {type(optimizer).__name__}, and this torch has no fused kernel for it. Plan "
            "again without --allow rounding."
        )
    if not all(p.is_floating_point() for p in parameters_of(optimizer)):
        raise ApplyFailed(
            f"`{where}` has parameters that are not floating-point, which the fused kernel cannot "
            "update. Plan again without --allow rounding."
        )

    def around(optimizer: torch.optim.Optimizer) -> contextlib.AbstractContextManager[None]:
        grads = (parameter.grad for parameter in parameters_of(optimizer))
        if any(grad is not None and grad.layout is not torch.strided for grad in grads):
            say_once(where, "it has sparse gradients now, which the fused kernel cannot take.")
            return contextlib.nullcontext()
        if any(_gains_momentum(optimizer, group) for group in optimizer.param_groups):
            return contextlib.nullcontext()
        # A fused kernel reads step counts on the device.
        for parameter in parameters_of(optimizer):
            count = optimizer.state.get(parameter, {}).get("step")
            if isinstance(count, torch.Tensor) and count.device != parameter.device:
                optimizer.state[parameter]["step"] = count.to(parameter.device)
        return _with_settings(optimizer, lambda _: {"fused": True, "foreach": False})

    return around


def _gains_momentum(optimizer: torch.optim.Optimizer, group: Group) -> bool:
    """Return True for a step where some parameters get their first momentum, and others have one: the
    fused kernel of SGD takes all of one kind.
    """
    graded = [one for one in group["params"] if one.grad is not None]
    first = {optimizer.state.get(one, {}).get("momentum_buffer") is None for one in graded}
    return bool(group.get("momentum")) and len(first) > 1


@contextlib.contextmanager
def _with_settings(
    optimizer: torch.optim.Optimizer, settings: Callable[[Group], Group]
) -> Iterator[None]:
    changes = [(group, settings(group)) for group in optimizer.param_groups]
    before = [(group, {name: group[name] for name in change}) for group, change in changes]
    for group, change in changes:
        group.update(change)
    try:
        yield
        for group, change in changes:
            if changed := [name for name in change if group[name] is not change[name]]:
                raise ApplyFailed(
                    f"a step hook changed `{changed[0]}` of a {type(optimizer).__name__} while the plan had "
                    "another value there, so the hook's change would be lost. Remove the hook, or leave this "
                    "optimizer out of the plan."
                )
    finally:
        for group, change in before:
            group.update(change)


def cut(group: Group, most: int) -> list[Group]:
    """Split a group into groups of at most `most` bytes or one parameter, dropping those without gradient."""
    parts: list[list[torch.Tensor]] = []
    total = 0
    for parameter in group["params"]:
        if parameter.grad is None:
            continue
        size = parameter.untyped_storage().nbytes()
        if not parts or total + size > most:
            parts.append([])
            total = 0
        parts[-1].append(parameter)
        total += size
    return [{**group, "params": part} for part in parts]


def refuse(where: str, optimizer: torch.optim.Optimizer) -> None:
    """Raise `ApplyFailed` for an optimizer that is not element-wise or has step hooks."""
    kind = type(optimizer)
    if f"{kind.__module__}.{kind.__qualname__}" not in ONE_BY_ONE:
        raise ApplyFailed(
            f"`{where}` is a {kind.__module__}.{kind.__qualname__}, and only torch's own "
            "optimizers that update each element independently can be planned. Plan again for "
            "this script."
        )
    if has_step_hooks(optimizer):
        raise ApplyFailed(
            f"`{where}` has its own step hooks, which would see it in another state. Remove "
            "them, or "
            "leave this optimizer out of the plan."
        )


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if the program has step hooks on this optimizer or on all optimizers."""
    hooks = (*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values())
    own = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    return bool(own) or not all(map(is_ours, hooks))


def run_scaled(factor: float, warmup: int) -> Around:
    """During `step`, scale the learning rates by `factor`, reached after a warm-up."""
    steps = 0

    def around(optimizer: torch.optim.Optimizer) -> contextlib.AbstractContextManager[None]:
        nonlocal steps
        steps += 1
        times = factor_at(steps, factor, warmup)
        return _with_settings(optimizer, lambda group: {"lr": group["lr"] * times})

    return around


def factor_at(step: int, factor: float, warmup: int) -> float:
    """Return the factor of a step, counted from 1: linear from 1 over the warm-up."""
    return factor if step > warmup else 1 + (factor - 1) * step / (warmup + 1)


class Hooked:
    """Hooks of an optimizer, removed by `revert`."""

    def __init__(self, *hooks: Any) -> None:
        self._hooks = hooks

    def revert(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


def scaled_by_hand(optimizer: torch.optim.Optimizer, factor: float, warmup: int) -> Hooked:
    """Set and restore the learning rates by step hooks, as hand-written code would."""
    seen: list[list[Any]] = []

    def before(one: torch.optim.Optimizer, *_: Any) -> None:
        seen.append([group["lr"] for group in one.param_groups])
        now = factor_at(len(seen), factor, warmup)
        for group in one.param_groups:
            group["lr"] = now * group["lr"]

    def after(one: torch.optim.Optimizer, *_: Any) -> None:
        for group, rate in zip(one.param_groups, seen[-1], strict=True):
            group["lr"] = rate

    return Hooked(
        optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)
    )
