"""Optimizer state on the host or in files, fetched in chunks during the step."""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torchtrim.executor.mapped_files import mapped
from torchtrim.executor.stepping import Group, OwnStep, cut, refuse

Parameter = torch.Tensor
StateTensor = tuple[Parameter, str, torch.Tensor]


class _State(defaultdict[Parameter, Any]):
    """State dict that waits for pending copies to the host when it is read between steps."""

    def __init__(self, settle: Callable[[], None], values: Any) -> None:
        super().__init__(dict, values)
        self._wait_for_copies = settle

    def __getitem__(self, key: Any) -> Any:
        self._wait_for_copies()
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        self._wait_for_copies()
        return super().get(key, default)

    def items(self) -> Any:
        self._wait_for_copies()
        return super().items()

    def values(self) -> Any:
        self._wait_for_copies()
        return super().values()

    def __reduce__(self) -> Any:
        self._wait_for_copies()
        return defaultdict, (dict, dict(super().items()))


class HostState:
    """Handle of an optimizer whose state is on the host between steps.

    A step updates parameters of at most `most` bytes at a time, while the next chunk's state is fetched and
    the previous chunk's is written back, so at most two are on the device.
    `in_file`: the state is in memory-mapped files; CPU parameters are updated with the mapped tensors. Raises
    `ApplyFailed` if the optimizer does not update each element independently, or has step hooks.
    """

    def __init__(
        self, where: str, optimizer: torch.optim.Optimizer, most: int, *, in_file: bool = False
    ) -> None:
        refuse(where, optimizer)
        self._in_file = in_file
        self._optimizer = optimizer
        self._most = most
        self._on = True
        self._busy = False
        self._written: Any = None
        self._hosts: defaultdict[Parameter, dict[str, torch.Tensor]] = defaultdict(dict)
        self._own = OwnStep(where, optimizer, self._steps, self._whole)
        self._load = optimizer.register_load_state_dict_post_hook(self._offload_state)
        self._offload_state(optimizer)

    def revert(self) -> None:
        """Restore the optimizer, with its state on the device."""
        if not self._on:
            return
        self._wait_for_copies()
        self._on = False
        self._load.remove()
        optimizer = self._optimizer
        state = defaultdict(dict, optimizer.state)
        for parameter, key, host in self._offloaded(list(state)):
            state[parameter][key] = host.to(parameter.device, copy=True)
        optimizer.state = state
        self._hosts.clear()
        self._own.revert()

    def _steps(self, step: Callable[[], Any]) -> None:
        groups = self._optimizer.param_groups
        if any(p.is_cuda for group in groups for p in group["params"]):
            self._run(step)
        else:
            self._run_on_cpu(step)

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """Have all of the state on the device for a step, as the original does."""
        self._wait_for_copies()
        for parameter, key, host in [*self._offloaded(list(dict.keys(self._optimizer.state)))]:
            if parameter.is_cuda:
                self._optimizer.state[parameter][key] = host.to(parameter.device)
        yield
        self._offload_state(self._optimizer)

    def _run(self, step: Callable[[], Any]) -> None:
        """Step chunk by chunk, fetching each while the one before it is updated."""
        optimizer = self._optimizer
        whole = optimizer.param_groups
        parts = [part for group in whole for part in cut(group, self._most)]
        self._busy = True
        if self._written is not None:
            self._copy_streams[1].wait_event(self._written)
        try:
            coming = self._fetch(parts[0]) if parts else []
            leaving: Any = None
            for number, part in enumerate(parts):
                here, arrived = coming, self._copy_streams[1].record_event()
                leaving = self._free_written(leaving)
                coming = self._fetch(parts[number + 1]) if number + 1 < len(parts) else []
                arrived.wait()
                for parameter, key, tensor in here:
                    optimizer.state[parameter][key] = tensor
                optimizer.param_groups = [part]
                step()
                leaving = self._write_back(part)
                del here
            self._free_written(leaving)
        finally:
            optimizer.param_groups = whole
            self._busy = False

    def _run_on_cpu(self, step: Callable[[], Any]) -> None:
        optimizer = self._optimizer
        whole = optimizer.param_groups
        try:
            for part in (part for group in whole for part in cut(group, self._most)):
                optimizer.param_groups = [part]
                step()
                self._move_to_files(part)
        finally:
            optimizer.param_groups = whole

    def _move_to_files(self, part: Group) -> None:
        for parameter in part["params"] if self._in_file else ():
            state = dict.get(self._optimizer.state, parameter, {})
            for key, value in state.items():
                in_file = self._hosts[parameter].get(key) is value
                if self._is_large(value, parameter) and not in_file:
                    state[key] = self._host_tensor(parameter, key, value).copy_(value)

    @functools.cached_property
    def _copy_streams(self) -> tuple[Any, Any]:
        return torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def _fetch(self, part: Group) -> list[StateTensor]:
        """Start to copy the state of a chunk to the device, into memory of the compute stream."""
        hosts = [*self._offloaded(part["params"])]
        fetched = [(p, key, torch.empty_like(host, device=p.device)) for p, key, host in hosts]
        _, home = self._copy_streams
        home.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(home):
            for (*_, host), (*_, tensor) in zip(hosts, fetched, strict=True):
                tensor.copy_(host, non_blocking=True)
        return fetched

    def _offloaded(self, parameters: list[Parameter]) -> Iterator[StateTensor]:
        for parameter in parameters:
            state: dict[str, Any] = dict.get(self._optimizer.state, parameter, {})
            for key, value in state.items():
                host = self._hosts[parameter].get(key)
                if host is not None and host is value:
                    yield parameter, key, host

    def _write_back(self, part: Group) -> tuple[list[torch.Tensor], Any] | None:
        """Start to copy the state of a chunk to the host. Keep the device tensors until the event."""
        if not any(parameter.is_cuda for parameter in part["params"]):
            return None
        out, _ = self._copy_streams
        out.wait_stream(torch.cuda.current_stream())
        kept = []
        with torch.cuda.stream(out):
            for parameter in part["params"]:
                state = dict.get(self._optimizer.state, parameter, {})
                for key, value in state.items():
                    if self._is_large(value, parameter):
                        kept.append(value)
                        state[key] = self._host_tensor(parameter, key, value)
                        state[key].copy_(value, non_blocking=True)
        self._written = out.record_event()
        return kept, self._written

    def _host_tensor(self, parameter: Parameter, key: str, value: torch.Tensor) -> torch.Tensor:
        host = self._hosts[parameter].get(key)
        if host is None or host.shape != value.shape or host.dtype != value.dtype:
            if self._in_file:
                like = torch.empty_like(value, device="meta")
                host = mapped(value.nbytes).view(value.dtype)
                host = host.as_strided(like.size(), like.stride())
            else:
                host = torch.empty_like(value, device="cpu", pin_memory=True)
            self._hosts[parameter][key] = host
        return host

    @staticmethod
    def _free_written(leaving: tuple[list[torch.Tensor], Any] | None) -> None:
        if leaving is not None:
            kept, written = leaving
            written.wait()
            kept.clear()

    def _wait_for_copies(self) -> None:
        if not self._busy and self._written is not None:
            self._written.synchronize()

    def _offload_state(self, optimizer: torch.optim.Optimizer) -> None:
        self._wait_for_copies()
        optimizer.state = _State(self._wait_for_copies, optimizer.state)
        for group in optimizer.param_groups:
            self._free_written(self._write_back(group))
            if not any(parameter.is_cuda for parameter in group["params"]):
                self._move_to_files(group)

    def _is_large(self, value: Any, parameter: Parameter) -> bool:
        """Return True for tensors worth moving. Step counts stay where they are."""
        there = isinstance(value, torch.Tensor) and value.device == parameter.device
        return there and (value.is_cuda or self._in_file) and value.numel() > 1
