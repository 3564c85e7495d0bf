"""Makes one optimizer update each parameter in backward, as soon as its gradient is final."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from torchtrim.capture.build import rank_and_world
from torchtrim.capture.code.step_paths import step_follows
from torchtrim.capture.optimizers import parameters_of
from torchtrim.capture.spent import Spent, updating
from torchtrim.errors import ApplyFailed
from torchtrim.executor.failing import note
from torchtrim.executor.notices import say_once
from torchtrim.executor.stepping import Stepping, has_step_hooks


class EarlyUpdates:
    """Updates each parameter after its gradient's `added`-th accumulation since the last step.

    `step` updates the other parameters. A backward that a step may not follow leaves all updates to `step`,
    as in the original, and so does one while the optimizer has step hooks. `revert` restores the optimizer.
    Raises `ApplyFailed`, in backward, `step` or `state_dict`, if the script does anything that would change
    the result.
    """

    def __init__(self, where: str, optimizer: torch.optim.Optimizer, added: int) -> None:
        _refuse(where, optimizer)
        self._where = where
        self._optimizer = optimizer
        self._needed = added
        self._added: Counter[int] = Counter()
        self._used: list[torch.Tensor] = []
        self._settings: dict[int, Any] = {}
        self._stepping = Stepping(where, optimizer, self._around)
        self._step: Any = getattr(type(optimizer).step, "__wrapped__")  # noqa: B009
        self._backward = -1
        self._late = False
        self._retains: bool | None = None
        self._placeholders: list[torch.Tensor] = []
        self._saved = optimizer.register_state_dict_pre_hook(lambda _: self.check_settled())
        self._marks: dict[int, Spent] = {}
        self._lists: list[list[torch.Tensor]] = []
        self._groups: dict[int, int] = {}
        trained: list[Any] = [
            one for one in parameters_of(optimizer) if one.requires_grad and one.is_leaf
        ]
        self._hooks = [p.register_post_accumulate_grad_hook(self._accumulated) for p in trained]

    def revert(self) -> None:
        """Restore the optimizer, and remove the placeholders of used gradients."""
        for hook in self._hooks:
            hook.remove()
        self._saved.remove()
        self._stepping.revert()
        self._take_marks()

    def check_settled(self) -> None:
        """Raise `ApplyFailed` if parameters were updated and no `step` followed."""
        if self._used:
            raise self._refused(
                f"{len(self._used)} parameters were updated in backward, and the program continues without "
                "the `step` that should follow"
            )

    def _accumulated(self, parameter: torch.Tensor) -> None:
        if not self._is_early():
            return
        self._added[id(parameter)] += 1
        count = self._added[id(parameter)]
        if count < self._needed:
            return
        if count > self._needed:
            raise self._refused(
                f"a gradient was accumulated {count} times before `step`, but the plan was made for "
                f"{self._needed}"
            )
        self._update(parameter)

    def _is_early(self) -> bool:
        """Return True if this backward, and each before it since the last step, may update parameters."""
        backward = torch._C._current_graph_task_id()
        if backward != self._backward and not self._late:
            self._backward = backward
            why = self._why_late()
            self._late = bool(why)
            if why:
                say_once(
                    self._where,
                    f"{why}, so this backward leaves the updates to `step`, as without the plan, and its "
                    "gradients stay.",
                )
        return not self._late

    def _why_late(self) -> str:
        retains = torch._C._autograd._get_current_graph_task_keep_graph()
        self._retains = retains if self._retains is None else self._retains
        if retains and not self._retains:
            return "it keeps its graph for another backward, which needs the weights as they are"
        if has_step_hooks(self._optimizer):
            return "the optimizer has step hooks, which would see no gradients"
        follows = step_follows(self._optimizer)
        return "" if follows.sure else f"a `step` may not follow: {follows.why_not}"

    def _group_of(self, parameter: torch.Tensor) -> int | None:
        """Return the number of the parameter's group, or None if the program has taken it out of all."""
        lists = [group["params"] for group in self._optimizer.param_groups]
        known = zip(self._lists, lists, strict=False)
        same = len(lists) == len(self._lists) and all(one is other for one, other in known)
        if not same or sum(map(len, lists)) != len(self._groups):
            self._lists = lists
            self._groups = {id(one): number for number, held in enumerate(lists) for one in held}
        return self._groups.get(id(parameter))

    def _update(self, parameter: torch.Tensor) -> None:
        optimizer, number = self._optimizer, self._group_of(parameter)
        if number is None:
            return
        self._keep_order()
        whole = optimizer.param_groups
        group = whole[number]
        if number not in self._settings:
            self._settings[number] = _settings(group)
        with updating(optimizer, parameter):
            optimizer.param_groups = [{**group, "params": [parameter]}]
            try:
                self._step(optimizer)
            finally:
                optimizer.param_groups = whole
        parameter.grad = self._mark(parameter)
        self._used.append(parameter)

    def _keep_order(self) -> None:
        """Put the states into the order that `step` would give them, before the first is created."""
        if self._placeholders or self._used:
            return
        state = self._optimizer.state
        for parameter in parameters_of(self._optimizer):
            if parameter not in state:
                state[parameter] = {}
                self._placeholders.append(parameter)

    def _drop_placeholders(self) -> None:
        for parameter in self._placeholders:
            if not self._optimizer.state.get(parameter, True):
                del self._optimizer.state[parameter]
        self._placeholders = []

    def _mark(self, parameter: torch.Tensor) -> Spent:
        """Return the placeholder of a gradient; the parameter may have changed its type or device."""
        mark = self._marks.get(id(parameter))
        if mark is None or (mark.dtype, mark.device) != (parameter.dtype, parameter.device):
            mark = self._marks[id(parameter)] = Spent(parameter, self._where)
        return mark

    @contextlib.contextmanager
    def _around(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Make `step` skip the parameters that are already updated."""
        for number, settings in self._settings.items():
            if settings != _settings(optimizer.param_groups[number]):
                raise self._refused(
                    "a parameter group's settings, such as the learning rate, were changed between backward "
                    "and `step`, after parameters had been updated"
                )
        used = self._used
        self._check_marks()
        if used and has_step_hooks(optimizer):
            raise self._refused(
                "the optimizer now has step hooks, which see no gradients of parameters that were updated in "
                "backward"
            )
        if not all(isinstance(parameter.grad, Spent) for parameter in used):
            raise self._refused(
                "gradients were dropped or replaced between backward and `step`, after parameters had been "
                "updated"
            )
        self._take_marks()
        self._settings.clear()
        self._added.clear()
        self._late = False
        self._used = []
        try:
            yield
        finally:
            self._drop_placeholders()
            for parameter in used:
                if parameter.grad is None:
                    parameter.grad = self._mark(parameter)

    def _check_marks(self) -> None:
        """Raise `ApplyFailed` in a second `step` on the same gradients, which no longer exist."""
        used = set(map(id, self._used))
        for parameter in parameters_of(self._optimizer):
            if isinstance(parameter.grad, Spent) and id(parameter) not in used:
                raise self._refused("`step` was called again without a backward in between")

    def _take_marks(self) -> None:
        for parameter in parameters_of(self._optimizer):
            if isinstance(parameter.grad, Spent):
                parameter.grad = None

    def _refused(self, reason: str) -> ApplyFailed:
        error = ApplyFailed(
            f"`{self._where}`: {reason}, so optimizer_in_backward would change the result. Remove it from "
            "the plan, or plan again for a typical step."
        )
        note(error, self._where)
        return error


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {
        key: (id(value), value._version) if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key != "params"
    }


def _refuse(where: str, optimizer: torch.optim.Optimizer) -> None:
    if any(parameter.layout is not torch.strided for parameter in parameters_of(optimizer)):
        raise ApplyFailed(
            f"`{where}` has sparse parameters, which optimizer_in_backward does not support."
        )
    if rank_and_world()[1] > 1:
        raise ApplyFailed(
            f"`{where}`: gradients are exchanged between processes after backward has computed them, so "
            "they are not final in backward. Remove optimizer_in_backward from the plan."
        )
    if not getattr(type(optimizer).step, "hooked", False):
        raise ApplyFailed(
            f"`{where}`: the `step` of its class was replaced, so it cannot run for one parameter. Remove "
            "this optimizer from the plan."
        )
