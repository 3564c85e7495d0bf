"""Change how a live `DistributedDataParallel` synchronizes gradients, reversibly."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from torchtrim.errors import ApplyFailed
from torchtrim.executor.failing import note
from torchtrim.executor.registry import Handle

_ADVICE = "Remove it from the plan, or plan again."
_TYPES = {
    "gradient_as_bucket_view": bool,
    "static_graph": bool,
    "accumulate": int,
    "bucket_cap_mb": int,
}
_CAPS = ("bucket_bytes_cap", "bucket_bytes_cap_default", "bucket_bytes_cap_list", "_bucket_config")


def changed(where: str, module: Any, options: Mapping[str, Any]) -> Handle:
    """Change one setting of the module's gradient synchronization. Raises `ApplyFailed`."""
    replica_at(where, module, "data_parallel")
    name = next(iter(options), "")
    value: Any = options.get(name)
    kind = type(value)
    if len(options) == 1 and kind is _TYPES.get(name):
        if name == "accumulate" and value > 1:
            return Accumulating(where, module, value)
        if name == "gradient_as_bucket_view" and value:
            return BucketViews(where, module)
        if name == "bucket_cap_mb" and value > 0:
            return OtherBuckets(where, module, value * 2**20)
        if name == "static_graph" and value:
            return StaticGraph(where, module)
    raise ApplyFailed(
        f"`{where}`: data_parallel has one option, `gradient_as_bucket_view` or `static_graph`, true, "
        "`accumulate`, 2 or more, or `bucket_cap_mb`, 1 or more, and the plan has "
        f"{dict(options)!r}."
    )


def replica_at(where: str, module: Any, technique: str) -> Any:
    """Return the module. Raises `ApplyFailed` if it is not a `DistributedDataParallel`."""
    if not isinstance(module, DistributedDataParallel):
        raise ApplyFailed(
            f"`{where}` is a {type(module).__name__}, and {technique} changes a "
            f"DistributedDataParallel. {_ADVICE}"
        )
    return module


class BucketViews:
    """Makes the gradients of a module views of its buckets."""

    def __init__(self, where: str, module: Any) -> None:
        refuse(where, module)
        if module.gradient_as_bucket_view:
            raise ApplyFailed(f"`{where}`: its gradients are already views of buckets. {_ADVICE}")
        self._module = module
        module.gradient_as_bucket_view = True
        make_anew(module)

    def revert(self) -> None:
        """Give each gradient its own memory again."""
        self._module.gradient_as_bucket_view = False
        make_anew(self._module)
        for parameter in self._module._module_parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()


class OtherBuckets:
    """Sets a module's bucket size to `cap` bytes."""

    def __init__(self, where: str, module: Any, cap: int) -> None:
        refuse(where, module)
        self._module = module
        self._before = {name: module.__dict__[name] for name in _CAPS if name in module.__dict__}
        module.bucket_bytes_cap, module.bucket_bytes_cap_default = cap, False
        if "_bucket_config" in self._before:
            module.bucket_bytes_cap_list = []
            module._bucket_config = dataclasses.replace(
                self._before["_bucket_config"],
                bucket_bytes_cap=cap,
                per_bucket_bytes_caps=(),
                first_bucket_bytes_cap=cap,
            )
        make_anew(module)

    def revert(self) -> None:
        """Restore the bucket size."""
        self._module.__dict__.update(self._before)
        make_anew(self._module)


class StaticGraph:
    """Makes a module search for unused parameters only in its first step."""

    def __init__(self, where: str, module: Any) -> None:
        refuse(where, module)
        if module.static_graph:
            raise ApplyFailed(f"`{where}`: its graph is already static. {_ADVICE}")
        self._where, self._module = where, module
        self._hook = module.register_forward_pre_hook(self._begins)
        module.static_graph = True
        make_anew(module)

    def revert(self) -> None:
        """Search in each step again."""
        self._hook.remove()
        self._module.static_graph = False
        make_anew(self._module)

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


class Compressed:
    """Sends a module's gradients in bfloat16, by a communication hook."""

    def __init__(self, where: str, module: Any, hook: Any) -> None:
        refuse(where, module)
        if module._comm_hooks:
            raise ApplyFailed(f"`{where}`: its gradients are already sent in bfloat16. {_ADVICE}")
        self._module = module
        module._comm_hooks.append((hook, None))
        make_anew(module)

    def revert(self) -> None:
        """Send gradients in their own precision again."""
        self._module._comm_hooks.clear()
        make_anew(self._module)


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
        "mixed precision of its own": module.mixed_precision is not None,
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
