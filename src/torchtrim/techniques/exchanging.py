"""Changes how a live `DistributedDataParallel` exchanges, and takes that back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from torchtrim.errors import ApplyFailed
from torchtrim.techniques.base import Handle
from torchtrim.techniques.failing import note

_ADVICE = "Take data_parallel out of the plan, or plan again."


def changed(where: str, module: Any, options: Mapping[str, Any]) -> Handle:
    """The module with gradients as views of buckets, or with fewer exchanges. Raises `ApplyFailed`."""
    if not isinstance(module, DistributedDataParallel):
        raise ApplyFailed(
            f"`{where}` is a {type(module).__name__}, and data_parallel changes a "
            f"DistributedDataParallel. {_ADVICE}"
        )
    if options.get("gradient_as_bucket_view") is True and "accumulate" not in options:
        return BucketViews(where, module)
    count = options.get("accumulate")
    if type(count) is not int or count < 2 or len(options) > 1:
        raise ApplyFailed(
            f"`{where}`: data_parallel has the option `gradient_as_bucket_view`, true, or `accumulate`, 2 or "
            f"more, and the plan has {dict(options)!r}."
        )
    return Accumulating(where, module, count)


class BucketViews:
    """A module whose gradients are views of its buckets."""

    def __init__(self, where: str, module: DistributedDataParallel) -> None:
        _refuse(where, module)
        if module.gradient_as_bucket_view:
            raise ApplyFailed(f"`{where}`: its gradients are views of buckets already. {_ADVICE}")
        self._module = module
        _make_anew(module, views=True)

    def revert(self) -> None:
        """Give each gradient memory of its own again."""
        _make_anew(self._module, views=False)
        for parameter in self._module._module_parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()


class Accumulating:
    """A module of which only every `count`-th forward with gradients is followed by an exchange."""

    def __init__(self, where: str, module: DistributedDataParallel, count: int) -> None:
        _refuse(where, module)
        if module.find_unused_parameters or (module.forward_sync_buffers and [*module.buffers()]):
            raise ApplyFailed(
                f"`{where}` looks for unused parameters or broadcasts buffers in each forward, which "
                f"micro-batches without exchange do not. {_ADVICE}"
            )
        self._where, self._module, self._count = where, module, count
        self._forwards = 0
        self._version = -1
        self._hooks = [
            module.register_forward_pre_hook(self._begins),
            module.register_forward_hook(self._ended, always_call=True),
        ]

    def revert(self) -> None:
        """Exchange after each backward again."""
        for hook in self._hooks:
            hook.remove()
        self._module.require_backward_grad_sync = True

    def _begins(self, module: Any, _: Any) -> None:
        if not torch.is_grad_enabled() or not module.training:
            return
        version = sum(parameter._version for parameter in module._module_parameters)
        if self._forwards % self._count and version != self._version:
            raise self._fewer()
        self._version = version
        self._forwards += 1
        module.require_backward_grad_sync = self._forwards % self._count == 0

    def _ended(self, module: Any, _: Any, __: Any) -> None:
        module.require_backward_grad_sync = True

    def _fewer(self) -> ApplyFailed:
        error = ApplyFailed(
            f"`{self._where}`: parameters changed after {self._forwards % self._count} micro-batches, and "
            f"the plan was made for {self._count} in each step: the last update was of gradients that the "
            f"ranks had not exchanged. {_ADVICE}"
        )
        note(error, self._where)
        return error


def _refuse(where: str, module: Any) -> None:
    hook = module._get_ddp_logging_data().get("comm_hook")
    unusual = {
        "a communication hook": hook or module._comm_hooks,
        "mixed precision of its own": module.mixed_precision is not None,
        "exchanges that are delayed": module._delay_all_reduce_params,
        "optimizers in backward": any(
            hasattr(one, "_in_backward_optimizers") for one in module._module_parameters
        ),
        "a reducer in Python": module._use_python_reducer,
    }
    for name, there in unusual.items():
        if there:
            raise ApplyFailed(f"`{where}` has {name}, which data_parallel does not take. {_ADVICE}")


def _make_anew(module: Any, *, views: bool) -> None:
    """Make its reducer as `__setstate__` does; what the old one has hooked goes with it."""
    module.gradient_as_bucket_view = views
    module._remove_autograd_hooks()
    module.reducer = module.logger = None
    module._has_rebuilt_buckets = False
    parameters, sparse = module._build_params_for_reducer()
    names = module._build_debug_param_to_name_mapping(parameters)
    module._ddp_init_helper(parameters, sparse, names, module.static_graph)
    if module.static_graph:
        module._static_graph_delay_allreduce_enqueued = False
        module.reducer._set_static_graph()
        module.logger._set_static_graph()
