"""Turns a live `DistributedDataParallel` into shards of FSDP2, and back."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import nn

from torchtrim.errors import ApplyFailed
from torchtrim.executor.gradient_sync import make_anew, refuse, without_reducer
from torchtrim.executor.stepping import Hooked
from torchtrim.executor.swap import Forward, Swapped

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_ADVICE = "Remove shard from the plan, or plan again."
_CONTAINERS = (list, tuple, dict, set)
_PATIENCE_SECONDS = 60.0  # Arbitrary; ranks of one step seldom differ by as much.
# Arbitrary; pauses between looks at the store start short and double up to the longest.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.05
# Every rank applies the same plans in the same order, so all agree on the number.
_APPLICATIONS = count()


class ShardedReplica:
    """A `DistributedDataParallel` whose module is sharded over its ranks."""

    def __init__(self, where: str, module: Any, reshard: bool, patterns: tuple[str, ...]) -> None:
        refuse(where, module)
        self._where, self._module, self._inner = where, module, module.module
        self._whole = dict(self._inner.named_parameters(remove_duplicate=False))
        blocks = list(matching(self._inner, patterns) if patterns else repeated(self._inner))
        if patterns and not blocks:
            raise ApplyFailed(
                f"`{where}`: no module with parameters matches the blocks {' '.join(patterns)!r}, which "
                f"must be patterns of paths below it, such as 'layers.*'. {_ADVICE}"
            )
        _refuse_unsupported(where, module, self._whole, [path for path, _ in blocks])
        optimizers = _optimizers_of(self._whole.values())
        _refuse_kept_parameters(where, module, self._whole, optimizers)
        self._gathering = _Gatherer(where, module.process_group)
        self._marks = _FsdpState(self._inner)
        without_reducer(module)
        try:
            self._shard(blocks, reshard)
        except Exception as error:
            self._put_back()
            make_anew(module)
            raise ApplyFailed(f"`{where}`: fully_shard failed: {error}. {_ADVICE}") from error
        self._shards = dict(self._inner.named_parameters(remove_duplicate=False))
        shards = {id(one): self._shards[name] for name, one in self._whole.items()}
        self._adopted = [_ShardedOptimizer(one, shards, self._gathering) for one in optimizers]
        self._module_parameters = list(module._module_parameters)
        module._module_parameters[:] = [
            shards.get(id(one), one) for one in module._module_parameters
        ]
        for parameter in self._whole.values():
            parameter.data = parameter.data.new_empty(0)
        hooks = (hook for one in self._inner.named_modules() for hook in self._hooked(*one))
        self._hooks = Hooked(*hooks)
        self._swapped = Swapped(module, self._without_reducer)

    def revert(self) -> None:
        """Gather everything, and exchange gradients as before. All ranks must call it."""
        whole = {name: self._gathering.whole(one).detach() for name, one in self._shards.items()}
        parameters = {id(self._shards[name]): one for name, one in self._whole.items()}
        updating = _optimizers_of(self._shards.values())
        states = [self._gathering.states(one) for one in updating]
        self._swapped.revert()
        self._hooks.revert()
        for name, parameter in self._whole.items():
            parameter.data, parameter.grad = whole[name], None
        self._put_back()
        for adopted in self._adopted:
            adopted.revert()
        for optimizer, state in zip(updating, states, strict=True):
            _replace_parameters(optimizer, parameters, state)
        self._module._module_parameters[:] = self._module_parameters
        make_anew(self._module)

    def _shard(self, blocks: list[tuple[str, nn.Module]], reshard: bool) -> None:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        device = next(iter(self._whole.values())).device.type
        mesh = DeviceMesh.from_group(self._module.process_group, device)
        options: Any = {"mesh": mesh} if reshard else {"mesh": mesh, "reshard_after_forward": False}
        for _, block in reversed(blocks):
            fully_shard(block, **options)
        fully_shard(self._inner, **options)

    def _put_back(self) -> None:
        self._marks.erase()
        for name, parameter in self._whole.items():
            owner, _, last = name.rpartition(".")
            self._inner.get_submodule(owner)._parameters[last] = parameter

    def _without_reducer(self, _: Forward) -> Forward:
        """Return a forward that does what `DistributedDataParallel` does, except for the reducer's work."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            module = self._module
            if not module._lazy_init_ran:
                module._lazy_init()
            self._inner.set_requires_gradient_sync(module.require_backward_grad_sync)
            if module.will_sync_module_buffers():
                module._sync_buffers()
            module.require_forward_param_sync = (
                torch.is_grad_enabled() and module.require_backward_grad_sync
            )
            return self._inner(*args, **kwargs)

        return forward

    def _hooked(self, path: str, owner: Any) -> Iterator[Any]:
        """Yield hooks that save and load whole tensors of a module with parameters, whoever calls it."""
        if not owner._parameters:
            return
        start = f"{path}." if path else ""
        shards = {name: self._shards.get(f"{start}{name}") for name in owner._parameters}
        yield owner.register_state_dict_post_hook(lambda *given: self._gather_saved(*given))
        yield owner.register_load_state_dict_pre_hook(partial(_split_loaded, shards))

    def _gather_saved(self, module: nn.Module, state: Any, prefix: str, _: Any) -> None:
        self._gathering.meet("state_dict")
        for name in module._parameters:
            if f"{prefix}{name}" in state:
                state[f"{prefix}{name}"] = self._gathering.whole(state[f"{prefix}{name}"])


def _split_loaded(
    shards: Mapping[str, Any], _: nn.Module, state: Any, prefix: str, *__: Any
) -> None:
    for name, shard in shards.items():
        if f"{prefix}{name}" in state:
            state[f"{prefix}{name}"] = _part(state[f"{prefix}{name}"], shard)


class _Gatherer:
    def __init__(self, where: str, group: Any) -> None:
        self._where, self._group = where, group
        self._application, self._meetings = next(_APPLICATIONS), 0

    def states(self, optimizer: torch.optim.Optimizer) -> dict[int, dict[str, Any]]:
        return {
            id(one): _mapped(optimizer.state[one], self.whole)
            for group in optimizer.param_groups
            for one in group["params"]
            if one in optimizer.state
        }

    def whole(self, value: Any) -> Any:
        """Return the tensor of all parts, or any other value unchanged. All ranks must call it."""
        return value.full_tensor() if _is_part(value) else value

    def meet(self, what: str) -> None:
        """Wait for the other ranks. Raises `ApplyFailed` if they do not arrive within a minute."""
        distributed: Any = torch.distributed
        ranks = distributed.get_world_size(self._group)
        store = distributed.distributed_c10d._get_default_store()
        group = self._group.group_name
        key = f"torchtrim/shard/{group}/{self._application}/{self._meetings}"
        store.add(key, 1)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        pause = _SHORTEST_PAUSE
        while (here := store.add(key, 0)) < ranks:
            if time.monotonic() > deadline:
                store.add(key, -1)
                raise ApplyFailed(
                    f"`{self._where}` is sharded: {what}() was called on {here} of {ranks} ranks, but each "
                    f"has a part of it. Call it on all of them, and save the result on one. {_ADVICE}"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        self._meetings += 1


class _ShardedOptimizer(Hooked):
    """An optimizer that updates this rank's parts instead of whole parameters."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, shards: Mapping[int, Any], gathering: _Gatherer
    ) -> None:
        self._gathering = gathering
        states = {
            id(one): {key: _part(value, shards[id(one)]) for key, value in state.items()}
            for one, state in optimizer.state.items()
            if id(one) in shards
        }
        _replace_parameters(optimizer, shards, states)
        super().__init__(
            optimizer.register_state_dict_post_hook(self._gather_saved),
            optimizer.register_load_state_dict_pre_hook(self._split_loaded),
        )

    def _gather_saved(self, optimizer: Any, saved: Any) -> Any:
        self._gathering.meet("state_dict")
        states = {
            key: _mapped(state, self._gathering.whole) for key, state in saved["state"].items()
        }
        return {**saved, "state": states}

    def _split_loaded(self, optimizer: Any, saved: Any) -> Any:
        numbers = (n for group in saved["param_groups"] for n in group["params"])
        shards = (one for group in optimizer.param_groups for one in group["params"])
        states = dict(saved["state"])
        for number, shard in zip(numbers, shards, strict=False):
            if number in states:
                states[number] = {key: _part(value, shard) for key, value in states[number].items()}
        return {**saved, "state": states}


def _replace_parameters(
    optimizer: torch.optim.Optimizer,
    instead: Mapping[int, Any],
    states: Mapping[int, dict[str, Any]],
) -> None:
    """Make an optimizer update `instead`, with `states`; ids of the current tensors are keys of both."""
    for group in optimizer.param_groups:
        for one in group["params"]:
            if id(one) in instead:
                optimizer.state.pop(one, None)
                if id(one) in states:
                    optimizer.state[instead[id(one)]] = states[id(one)]
        group["params"][:] = [instead.get(id(one), one) for one in group["params"]]


class _FsdpState:
    """Classes, attributes and hooks that `fully_shard` adds to modules."""

    def __init__(self, root: nn.Module) -> None:
        self._before = [(one, type(one), set(vars(one)), _hooks_of(one)) for one in root.modules()]

    def erase(self) -> None:
        from torch.distributed import _composable_state

        known: Any = getattr(_composable_state, "_module_state_mapping", {})
        for module, kind, names, hooks in self._before:
            for name, added in _hooks_of(module).items():
                for key in added - hooks.get(name, set()):
                    vars(module)[name].pop(key, None)
            for name in set(vars(module)) - names:
                del vars(module)[name]
            module.__class__ = kind
            known.pop(module, None)


def _hooks_of(module: nn.Module) -> dict[str, set[Any]]:
    return {
        name: set(value)
        for name, value in vars(module).items()
        if "hook" in name and isinstance(value, dict)
    }


def _mapped(state: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    return {key: change(value) for key, value in state.items()}


def _is_part(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and hasattr(value, "full_tensor")


def _part(value: Any, shard: Any) -> Any:
    """Return this rank's part of a tensor with the shape of a shard, or any other value unchanged."""
    from torch.distributed.tensor import distribute_tensor

    plain = isinstance(value, torch.Tensor) and not _is_part(value)
    if not plain or not _is_part(shard) or value.shape != shard.shape:
        return value
    on_device = value.to(shard.device)
    return distribute_tensor(on_device, shard.device_mesh, shard.placements, src_data_rank=None)


def _optimizers_of(parameters: Iterable[Any]) -> list[torch.optim.Optimizer]:
    numbers = {id(one): number for number, one in enumerate(parameters)}
    found = []
    for one in gc.get_objects():
        if issubclass(type(one), torch.optim.Optimizer):
            every = [parameter for group in one.param_groups for parameter in group["params"]]
            known = [numbers[id(parameter)] for parameter in every if id(parameter) in numbers]
            found += [(known, one)] if known else []
    return [one for _, one in sorted(found, key=lambda pair: pair[0])]


def _refuse_unsupported(
    where: str, module: Any, parameters: Mapping[str, nn.Parameter], blocks: list[str]
) -> None:
    if ignored := sorted(module.parameters_to_ignore & parameters.keys()):
        raise ApplyFailed(
            f"`{where}`: DistributedDataParallel ignores {ignored[0]}, but fully_shard would not. "
            f"{_ADVICE}"
        )
    if any(one.grad is not None for one in parameters.values()):
        raise ApplyFailed(f"`{where}` has gradients from before the plan. {_ADVICE}")
    if len({one.dtype for one in parameters.values()}) > 1:
        raise ApplyFailed(f"`{where}` has parameters of several types. {_ADVICE}")
    if tied := split_parameter(parameters.items(), blocks):
        raise ApplyFailed(
            f"`{where}`: {tied[0]} and {tied[1]} are one parameter, but would be sharded separately. "
            f"Name the modules to shard one by one in `blocks`. {_ADVICE}"
        )


def _refuse_kept_parameters(
    where: str,
    module: Any,
    parameters: Mapping[str, nn.Parameter],
    optimizers: list[torch.optim.Optimizer],
) -> None:
    """Raise `ApplyFailed` if the script has a container with parameters: they would stay whole there."""
    ours = [
        parameters,
        module._module_parameters,
        *(vars(one)["_parameters"] for one in module.modules()),
    ]
    ours += [group["params"] for one in optimizers for group in one.param_groups]
    ours += [one.state for one in optimizers]
    wanted = [*parameters.values()]
    known = {id(wanted), *map(id, ours)}
    for holder in gc.get_referrers(*wanted):
        if type(holder) in _CONTAINERS and id(holder) not in known:
            raise ApplyFailed(
                f"`{where}`: the script keeps parameters in a {type(holder).__name__} of {len(holder)} "
                "items, outside of the model and its optimizers. Parameters in it would stay whole. Get them "
                f"from the model when they are needed. {_ADVICE}"
            )


def split_parameter(parameters: Any, blocks: list[str]) -> tuple[str, str] | None:
    """Return two paths of one parameter in different blocks, or inside and outside of a block, or None."""
    owners: dict[int, tuple[str, str]] = {}
    for path, parameter in parameters:
        owner = max((one for one in blocks if path.startswith(f"{one}.")), key=len, default="")
        first, before = owners.setdefault(id(parameter), (path, owner))
        if before != owner:
            return first, path
    return None


def matching(root: nn.Module, patterns: tuple[str, ...]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules with parameters whose paths match a pattern."""
    for path, module in root.named_modules():
        wanted = any(fnmatchcase(path.removeprefix("module."), pattern) for pattern in patterns)
        if path and wanted and any(True for _ in module.parameters()):
            yield path, module


def repeated(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the blocks that a model repeats: the most frequent class in its outermost lists of modules.

    Only modules with parameters count. A list without two of a class is searched like any other module.
    """
    owning = [type(one) for one in module.children() if any(True for _ in one.parameters())]
    most = [kind for kind, number in Counter(owning).most_common(1) if number > 1]
    repeated_class = most[0] if most and isinstance(module, _LISTS) else None
    for name, child in module.named_children():
        where = f"{path}.{name}" if path else name
        if type(child) is repeated_class:
            yield where, child
        else:
            yield from repeated(child, where)
