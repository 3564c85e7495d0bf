"""Turns a live `DistributedDataParallel` into shards of FSDP2, and back."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from itertools import count
from typing import Any

import torch
from torch import nn

from torchtrim.errors import ApplyFailed
from torchtrim.techniques.exchanging import make_anew, refuse, without_reducer
from torchtrim.techniques.swap import Forward, Swapped

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_ADVICE = "Take shard out of the plan, or plan again."
_CONTAINERS = (list, tuple, dict, set)
_PATIENCE_SECONDS = 60.0
_POLL_SECONDS = 0.01


class Sharded:
    """A `DistributedDataParallel` whose module is sharded over its ranks."""

    def __init__(self, where: str, module: Any, reshard: bool, patterns: tuple[str, ...]) -> None:
        refuse(where, module)
        self._where, self._module, self._inner = where, module, module.module
        self._whole = dict(self._inner.named_parameters(remove_duplicate=False))
        blocks = list(matching(self._inner, patterns) if patterns else repeated(self._inner))
        _check(where, self._whole, [path for path, _ in blocks])
        optimizers = list(_optimizers(self._whole.values()))
        _check_kept(where, module, self._whole, optimizers)
        self._gathering = _Gathering(where, module.process_group)
        self._marks = _Marks(self._inner)
        without_reducer(module)
        try:
            self._shard(blocks, reshard)
        except (AssertionError, ValueError, NotImplementedError) as error:
            self._put_back()
            make_anew(module)
            raise ApplyFailed(f"`{where}`: fully_shard says: {error}. {_ADVICE}") from error
        self._shards = dict(self._inner.named_parameters(remove_duplicate=False))
        self._adopted = [_Adopted(one, self._by_id(), self._gathering) for one in optimizers]
        self._module_parameters = list(module._module_parameters)
        module._module_parameters[:] = [
            self._by_id().get(id(one), one) for one in module._module_parameters
        ]
        for parameter in self._whole.values():
            parameter.data = parameter.data.new_empty(0)
        self._hooks = [
            self._inner.register_state_dict_post_hook(lambda *given: self._gathers(*given)),
            self._inner.register_load_state_dict_pre_hook(self._splits),
        ]
        self._swapped = Swapped(module, self._without_reducer)

    def revert(self) -> None:
        """Gather everything, and exchange gradients as before. All ranks have to."""
        whole = {name: self._gathering.whole(one).detach() for name, one in self._shards.items()}
        states = [one.whole_states() for one in self._adopted]
        self._swapped.revert()
        for hook in self._hooks:
            hook.remove()
        for name, parameter in self._whole.items():
            parameter.data, parameter.grad = whole[name], None
        self._put_back()
        for adopted, state in zip(self._adopted, states, strict=True):
            adopted.revert(state)
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
        """The modules as they were, with the parameters that they had."""
        self._marks.erase()
        for name, parameter in self._whole.items():
            owner, _, last = name.rpartition(".")
            self._inner.get_submodule(owner)._parameters[last] = parameter

    def _by_id(self) -> dict[int, Any]:
        """The shard of each parameter."""
        return {id(one): self._shards[name] for name, one in self._whole.items()}

    def _without_reducer(self, _: Forward) -> Forward:
        """What forward of `DistributedDataParallel` does beside the reducer's work."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            module = self._module
            if not module._lazy_init_ran:
                module._lazy_init()
            self._inner.set_requires_gradient_sync(module.require_backward_grad_sync)
            if module.will_sync_module_buffers():
                module._sync_buffers()
            if torch.is_grad_enabled():
                module.require_forward_param_sync = module.require_backward_grad_sync
            return self._inner(*args, **kwargs)

        return forward

    def _gathers(self, module: nn.Module, state: Any, prefix: str, _: Any) -> None:
        """Whole tensors in a `state_dict`."""
        self._gathering.meet("state_dict")
        for name in [name for name in state if name.startswith(prefix)]:
            state[name] = self._gathering.whole(state[name])

    def _splits(self, module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        """The parts of whole tensors that are loaded."""
        for name, shard in self._shards.items():
            if f"{prefix}{name}" in state:
                state[f"{prefix}{name}"] = _part(state[f"{prefix}{name}"], shard)


class _Gathering:
    """Makes whole tensors of the parts that ranks have."""

    def __init__(self, where: str, group: Any) -> None:
        self._where, self._group, self._numbers = where, group, count()

    def whole(self, value: Any) -> Any:
        """The tensor of all parts; anything else as it is. All ranks have to ask."""
        return value.full_tensor() if _is_part(value) else value

    def meet(self, what: str) -> None:
        """Wait for the other ranks. Raises `ApplyFailed` where they do not come within a minute."""
        distributed: Any = torch.distributed
        ranks = distributed.get_world_size(self._group)
        store = distributed.distributed_c10d._get_default_store()
        key = f"torchtrim/{self._where}/{self._group.group_name}/{next(self._numbers)}"
        store.add(key, 1)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while (here := store.add(key, 0)) < ranks:
            if time.monotonic() > deadline:
                raise ApplyFailed(
                    f"`{self._where}` is sharded: {what}() was called on {here} of {ranks} ranks, each has "
                    f"a part of it. Call it on all of them, and save what it gives on one. {_ADVICE}"
                )
            time.sleep(_POLL_SECONDS)


class _Adopted:
    """An optimizer that updates the parts of what it was made for."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, shards: Mapping[int, Any], gathering: _Gathering
    ) -> None:
        self._optimizer, self._gathering = optimizer, gathering
        self._whole = [list(group["params"]) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"][:] = [shards.get(id(one), one) for one in group["params"]]
        for one in [one for one in optimizer.state if id(one) in shards]:
            shard = shards[id(one)]
            state = optimizer.state.pop(one)
            optimizer.state[shard] = {key: _part(value, shard) for key, value in state.items()}
        self._hooks = [
            optimizer.register_state_dict_post_hook(self._gathers),
            optimizer.register_load_state_dict_pre_hook(self._splits),
        ]

    def whole_states(self) -> list[dict[str, Any]]:
        """The whole states of each parameter, in the order of the groups."""
        return [
            _mapped(self._optimizer.state.get(one, {}), self._gathering.whole)
            for group in self._optimizer.param_groups
            for one in group["params"]
        ]

    def revert(self, states: list[dict[str, Any]]) -> None:
        """Update the whole parameters again, with these states."""
        for hook in self._hooks:
            hook.remove()
        following = iter(states)
        for group, whole in zip(self._optimizer.param_groups, self._whole, strict=True):
            for one in group["params"]:
                self._optimizer.state.pop(one, None)
            group["params"][:] = whole
            for one in whole:
                if state := next(following):
                    self._optimizer.state[one] = state

    def _gathers(self, optimizer: Any, saved: Any) -> Any:
        self._gathering.meet("state_dict")
        states = {
            key: _mapped(state, self._gathering.whole) for key, state in saved["state"].items()
        }
        return {**saved, "state": states}

    def _splits(self, optimizer: Any, saved: Any) -> Any:
        numbers = [n for group in saved["param_groups"] for n in group["params"]]
        shards = [one for group in optimizer.param_groups for one in group["params"]]
        states = dict(saved["state"])
        for number, shard in zip(numbers, shards, strict=False):
            if number in states:
                states[number] = {key: _part(value, shard) for key, value in states[number].items()}
        return {**saved, "state": states}


class _Marks:
    """What `fully_shard` leaves on modules: classes, attributes and hooks."""

    def __init__(self, root: nn.Module) -> None:
        self._before = [(one, type(one), set(vars(one)), _hooks_of(one)) for one in root.modules()]

    def erase(self) -> None:
        """Take off what came since."""
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
    """This rank's part of a tensor that has a shard's shape; anything else as it is."""
    from torch.distributed.tensor import distribute_tensor

    if not isinstance(value, torch.Tensor) or _is_part(value) or not _is_part(shard):
        return value
    if value.shape != shard.shape:
        return value
    on_device = value.to(shard.device)
    return distribute_tensor(on_device, shard.device_mesh, shard.placements, src_data_rank=None)


def _filled(known: Any, part: Any) -> Any:
    """The part, in the memory of the one that is there."""
    if not _is_part(part) or not _is_part(known) or known.dtype != part.dtype:
        return part
    known.to_local().copy_(part.to_local())
    return known


def _optimizers(parameters: Any) -> Iterator[torch.optim.Optimizer]:
    """Those that update any of the parameters."""
    wanted = {id(one) for one in parameters}
    for one in gc.get_objects():
        if issubclass(type(one), torch.optim.Optimizer) and any(
            id(parameter) in wanted for group in one.param_groups for parameter in group["params"]
        ):
            yield one


def _check(where: str, parameters: Mapping[str, nn.Parameter], blocks: list[str]) -> None:
    """Raises `ApplyFailed` for what cannot be sharded."""
    if any(one.grad is not None for one in parameters.values()):
        raise ApplyFailed(f"`{where}` has gradients from before the plan. {_ADVICE}")
    if len({one.dtype for one in parameters.values()}) > 1:
        raise ApplyFailed(f"`{where}` has parameters of several types. {_ADVICE}")
    if tied := split_parameter(parameters.items(), blocks):
        raise ApplyFailed(
            f"`{where}`: {tied[0]} and {tied[1]} are one parameter, and would be sharded apart. Say with "
            f"`blocks` which modules are sharded one by one. {_ADVICE}"
        )


def _check_kept(
    where: str,
    module: Any,
    parameters: Mapping[str, nn.Parameter],
    optimizers: list[torch.optim.Optimizer],
) -> None:
    """Raises `ApplyFailed` where the script has a container with some of the parameters: they would be whole
    there, and get no gradients."""
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
                f"`{where}`: the script keeps parameters in a {type(holder).__name__} of {len(holder)}, "
                "besides "
                "the model and its optimizers, where they would stay whole. Ask the model for them when they "
                f"are needed. {_ADVICE}"
            )


def split_parameter(parameters: Any, blocks: list[str]) -> tuple[str, str] | None:
    """Two paths of one parameter that lie in two blocks, or in one and outside of all; None for none."""
    owners: dict[int, tuple[str, str]] = {}
    for path, parameter in parameters:
        owner = max((one for one in blocks if path.startswith(f"{one}.")), key=len, default="")
        first, before = owners.setdefault(id(parameter), (path, owner))
        if before != owner:
            return first, path
    return None


def matching(root: nn.Module, patterns: tuple[str, ...]) -> Iterator[tuple[str, nn.Module]]:
    """The modules with parameters whose paths match a pattern."""
    for path, module in root.named_modules():
        wanted = any(fnmatchcase(path.removeprefix("module."), pattern) for pattern in patterns)
        if path and wanted and any(True for _ in module.parameters()):
            yield path, module


def repeated(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The blocks that a model repeats: what is most often of one class in its outermost lists of modules.

    Only what has parameters counts; a list with no two alike is looked into, as any other module is.
    """
    return _repeated(root, "")


def _repeated(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    children = [
        (f"{path}.{name}" if path else name, child) for name, child in module.named_children()
    ]
    kind = _usual(module)
    for where, child in children:
        if kind is not None and type(child) is kind:
            yield where, child
        else:
            yield from _repeated(child, where)


def _usual(module: nn.Module) -> type | None:
    """The class that repeats in a list of modules; None where none does."""
    if not isinstance(module, _LISTS):
        return None
    owning = [type(one) for one in module.children() if any(True for _ in one.parameters())]
    kind, number = next(iter(Counter(owning).most_common(1)), (None, 0))
    return kind if number > 1 else None
