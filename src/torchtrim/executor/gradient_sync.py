"""Change how a live `DistributedDataParallel` synchronizes gradients, reversibly."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from torchtrim.errors import ApplyFailed
from torchtrim.executor.failing import note
from torchtrim.executor.registry import Handle

_ADVICE = "Remove it from the plan, or plan again."


def changed(where: str, module: Any, options: Mapping[str, Any]) -> Handle:
    """Change one setting of the module's gradient synchronization. Raises `ApplyFailed`."""
    replica_at(where, module, "data_parallel")
    name = next(iter(options), "")
    value: Any = options.get(name)
    if len(options) == 1 and name in _SETTINGS:
        kind, least, change = _SETTINGS[name]
        is_of_kind = type(value) is kind
        if is_of_kind and value >= least:
            return change(where, module, value)
    raise ApplyFailed(
        f"`{where}`: data_parallel takes one option: `gradient_as_bucket_view` or "
        "`static_graph` (true), `accumulate` (2 or more) or `bucket_cap_mb` (1 or more); the "
        "plan has "
        f"{dict(options)!r}."
    )


def replica_at(where: str, module: Any, technique: str) -> Any:
    """Return the module. Raises `ApplyFailed` if it is not a `DistributedDataParallel`."""
    if not isinstance(module, DistributedDataParallel):
        raise ApplyFailed(
            f"`{where}` is a {type(module).__name__}, but {technique} applies to a "
            f"DistributedDataParallel. {_ADVICE}"
        )
    return module


class OtherSettings:
    """Changes attributes of a module and rebuilds its reducer."""

    def __init__(self, module: Any, **settings: Any) -> None:
        self._module = module
        self._before = {name: module.__dict__[name] for name in settings}
        module.__dict__.update(settings)
        make_anew(module)

    def revert(self) -> None:
        """Restore the attributes."""
        self._module.__dict__.update(self._before)
        make_anew(self._module)


class BucketViews(OtherSettings):
    """Makes the gradients of a module views of its buckets."""

    def __init__(self, where: str, module: Any, _on: bool) -> None:
        refuse(where, module)
        if module.gradient_as_bucket_view:
            raise ApplyFailed(f"`{where}`: its gradients are already views of buckets. {_ADVICE}")
        super().__init__(module, gradient_as_bucket_view=True)

    def revert(self) -> None:
        """Give each gradient its own memory again."""
        super().revert()
        for parameter in self._module._module_parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()


def other_buckets(where: str, module: Any, megabytes: int) -> Handle:
    """Set a module's bucket size."""
    refuse(where, module)
    cap = megabytes * 2**20
    settings: dict[str, Any] = {"bucket_bytes_cap": cap, "bucket_bytes_cap_default": False}
    if (config := module.__dict__.get("_bucket_config")) is not None:
        caps = {"bucket_bytes_cap": cap, "first_bucket_bytes_cap": cap, "per_bucket_bytes_caps": ()}
        settings["_bucket_config"] = dataclasses.replace(config, **caps)
        settings["bucket_bytes_cap_list"] = []
    return OtherSettings(module, **settings)


class StaticGraph(OtherSettings):
    """Makes a module search for unused parameters only in its first step."""

    def __init__(self, where: str, module: Any, _on: bool) -> None:
        refuse(where, module)
        if module.static_graph:
            raise ApplyFailed(f"`{where}`: its graph is already static. {_ADVICE}")
        self._where = where
        self._hook = module.register_forward_pre_hook(self._begins)
        super().__init__(module, static_graph=True)

    def revert(self) -> None:
        """Search in each step again."""
        self._hook.remove()
        super().revert()

    def _begins(self, module: Any, _: Any) -> None:
        """Check that a synchronization follows the first forward; otherwise an assertion in torch fails."""
        if not torch.is_grad_enabled():
            return
        if not module.require_backward_grad_sync:
            raise _failed(
                self._where,
                "its first forward is inside no_sync(), and a static graph finds unused parameters in the "
                "first gradient synchronization.",
            )
        self._hook.remove()


class Accumulating:
    """Synchronizes gradients only after every `count`-th forward with gradients."""

    def __init__(self, where: str, module: Any, count: int) -> None:
        refuse(where, module)
        if module.find_unused_parameters or (module.forward_sync_buffers and [*module.buffers()]):
            raise ApplyFailed(
                f"`{where}` searches for unused parameters or broadcasts buffers in each forward, which "
                f"micro-batches without synchronization skip. {_ADVICE}"
            )
        self._where, self._module, self._count = where, module, count
        self._forwards = 0
        self._version = -1
        self._hooks = [
            module.register_forward_pre_hook(self._begins),
            module.register_forward_hook(self._ended, always_call=True),
        ]

    def revert(self) -> None:
        """Synchronize after each backward again."""
        for hook in self._hooks:
            hook.remove()
        self._module.require_backward_grad_sync = True

    def _begins(self, module: Any, _: Any) -> None:
        if not torch.is_grad_enabled() or not module.training:
            return
        version = sum(parameter._version for parameter in module._module_parameters)
        if self._forwards % self._count and version != self._version:
            raise _failed(
                self._where,
                f"parameters changed after {self._forwards % self._count} micro-batches, and the plan was "
                f"made for {self._count} per step: the last update used gradients that were not "
                "synchronized.",
            )
        self._version = version
        self._forwards += 1
        module.require_backward_grad_sync = self._forwards % self._count == 0

    def _ended(self, module: Any, _: Any, __: Any) -> None:
        module.require_backward_grad_sync = True


def _failed(where: str, why: str) -> ApplyFailed:
    error = ApplyFailed(f"`{where}`: {why} {_ADVICE}")
    note(error, where)
    return error


_SETTINGS: dict[str, tuple[type, int, Callable[[str, Any, Any], Handle]]] = {
    "gradient_as_bucket_view": (bool, True, BucketViews),
    "static_graph": (bool, True, StaticGraph),
    "accumulate": (int, 2, Accumulating),
    "bucket_cap_mb": (int, 1, other_buckets),
}
"""The settings: type, least value, and the change."""


class Compressed(OtherSettings):
    """Sends a module's gradients in bfloat16, by a communication hook."""

    def __init__(self, where: str, module: Any, hook: Any) -> None:
        refuse(where, module)
        if module._comm_hooks:
            raise ApplyFailed(f"`{where}`: its gradients are already sent in bfloat16. {_ADVICE}")
        super().__init__(module, _comm_hooks=[(hook, None)])


def halved(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Wrap torch's `bf16_compress_hook`, which checks for NCCL by name only. Gloo can sum bfloat16 too."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    return bf16_compress_hook(state, bucket)


def halved_by_hand(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Do the same by hand, waiting for each bucket."""
    wide = bucket.buffer()
    half = wide.to(torch.bfloat16) / torch.distributed.get_world_size()
    torch.distributed.all_reduce(half)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(wide.copy_(half))
    return done


def refuse(where: str, module: Any) -> None:
    """Raise `ApplyFailed` for a module with customized gradient synchronization."""
    hooked = bool(module._get_ddp_logging_data().get("comm_hook")) or bool(module._comm_hooks)
    ours = {hook for hook, _ in module._comm_hooks} in ({halved}, {halved_by_hand})
    unusual = {
        "a communication hook": hooked and not ours,
        "its own mixed precision": module.mixed_precision is not None,
        "delayed gradient synchronization": module._delay_all_reduce_params,
        "optimizers in backward": any(
            hasattr(one, "_in_backward_optimizers") for one in module._module_parameters
        ),
        "a reducer in Python": module._use_python_reducer,
    }
    for name, there in unusual.items():
        if there:
            raise ApplyFailed(f"`{where}` has {name}, which is not supported. {_ADVICE}")


def without_reducer(module: Any) -> None:
    """Remove the module's reducer and its hooks."""
    if module.reducer is not None:
        module._remove_autograd_hooks()
    module.reducer = module.logger = None


def make_anew(module: Any) -> None:
    """Rebuild the module's reducer from its settings, as `__setstate__` does."""
    without_reducer(module)
    module._has_rebuilt_buckets = False
    parameters, sparse = module._build_params_for_reducer()
    names = module._build_debug_param_to_name_mapping(parameters)
    module._ddp_init_helper(parameters, sparse, names, module.static_graph)
    if module.static_graph:
        module._static_graph_delay_allreduce_enqueued = False
        module.reducer._set_static_graph()
        module.logger._set_static_graph()
    for hook, state in module._comm_hooks:
        module.logger._set_comm_hook_name(hook.__qualname__)
        distributed: Any = torch.distributed
        distributed._register_comm_hook(module.reducer, state, hook)
