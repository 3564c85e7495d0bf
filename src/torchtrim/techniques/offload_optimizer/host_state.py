"""Keeps the state of an optimizer on the host or in files, and fetches it in parts while it steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from torchtrim.executor.mapped_files import mapped
from torchtrim.executor.stepping import Group, OwnStep, cut, refuse

Parameter = torch.Tensor


class _Copy(NamedTuple):
    """One tensor of the state, on the host and for a while on the device."""

    parameter: Parameter
    key: str
    host: torch.Tensor
    here: torch.Tensor


class _State(defaultdict[Parameter, Any]):
    """The state, for whoever looks at it between steps: copies to the host have arrived by then."""

    def __init__(self, settle: Callable[[], None], values: Any) -> None:
        super().__init__(dict, values)
        self._settle = settle

    def __getitem__(self, key: Any) -> Any:
        self._settle()
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        """As of a dict."""
        self._settle()
        return super().get(key, default)

    def items(self) -> Any:
        """As of a dict."""
        self._settle()
        return super().items()

    def values(self) -> Any:
        """As of a dict."""
        self._settle()
        return super().values()

    def __reduce__(self) -> Any:
        self._settle()
        return defaultdict, (dict, dict(super().items()))


class HostState:
    """An optimizer whose state is on the host between steps. `revert` makes it what it was.

    A step takes parameters of at most `most` bytes at a time: their state is fetched while those before them
    are updated, and written back while those after them are. State of two parts is on the device at most.
    `in_file`: it is in memory-mapped files; parameters of a CPU are updated with those as they are.
    Raises `ApplyFailed` for an optimizer that does not update each element by itself, or has step hooks.
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
        self._streams: tuple[Any, Any] | None = None
        self._written: Any = None
        self._hosts: defaultdict[Parameter, dict[str, torch.Tensor]] = defaultdict(dict)
        self._own = OwnStep(optimizer, self._steps)
        self._load = optimizer.register_load_state_dict_post_hook(self._loaded)
        self._loaded(optimizer)

    def revert(self) -> None:
        """Make the optimizer what it was, its state on the device."""
        if not self._on:
            return
        self._settle()
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
            self._run_here(step)

    def _run(self, step: Callable[[], Any]) -> None:
        """A step in parts, each fetched while the one before it is updated."""
        optimizer = self._optimizer
        whole = optimizer.param_groups
        parts = [part for group in whole for part in cut(group, self._most)]
        self._busy = True
        if self._written is not None:
            self._both()[1].wait_event(self._written)
        try:
            coming = self._fetched(parts[0]) if parts else []
            leaving: Any = None
            for number, part in enumerate(parts):
                here, arrived = coming, self._arrived()
                leaving = self._gone(leaving)
                coming = self._fetched(parts[number + 1]) if number + 1 < len(parts) else []
                arrived.wait()
                for one in here:
                    optimizer.state[one.parameter][one.key] = one.here
                optimizer.param_groups = [part]
                step()
                leaving = self._written_back(part)
                del here
            self._gone(leaving)
        finally:
            optimizer.param_groups = whole
            self._busy = False

    def _run_here(self, step: Callable[[], Any]) -> None:
        """A step in parts on a CPU: what is new of the state of each goes to files."""
        optimizer = self._optimizer
        whole = optimizer.param_groups
        try:
            for part in (part for group in whole for part in cut(group, self._most)):
                optimizer.param_groups = [part]
                step()
                self._filed(part)
        finally:
            optimizer.param_groups = whole

    def _filed(self, part: Group) -> None:
        """The large state of a part is in files."""
        for parameter in part["params"] if self._in_file else ():
            state = dict.get(self._optimizer.state, parameter, {})
            for key, value in state.items():
                if (
                    self._is_large(value, parameter)
                    and self._hosts[parameter].get(key) is not value
                ):
                    state[key] = self._home_of(parameter, key, value).copy_(value)

    def _arrived(self) -> Any:
        return self._both()[1].record_event()

    def _both(self) -> tuple[Any, Any]:
        if self._streams is None:
            self._streams = torch.cuda.Stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        return self._streams

    def _fetched(self, part: Group) -> list[_Copy]:
        """The state of a part on its way to the device, into memory of the compute stream."""
        found = [
            _Copy(parameter, key, host, torch.empty_like(host, device=parameter.device))
            for parameter, key, host in self._offloaded(part["params"])
        ]
        _, home = self._both()
        home.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(home):
            for one in found:
                one.here.copy_(one.host, non_blocking=True)
        return found

    def _offloaded(
        self, parameters: list[Parameter]
    ) -> Iterator[tuple[Parameter, str, torch.Tensor]]:
        for parameter in parameters:
            state: dict[str, Any] = dict.get(self._optimizer.state, parameter, {})
            for key, value in state.items():
                host = self._hosts[parameter].get(key)
                if host is not None and host is value:
                    yield parameter, key, host

    def _written_back(self, part: Group) -> tuple[list[torch.Tensor], Any] | None:
        """The state of a part on its way to the host; what is on the device must be kept until the event."""
        if not any(parameter.is_cuda for parameter in part["params"]):
            return None
        out, _ = self._both()
        out.wait_stream(torch.cuda.current_stream())
        kept = []
        with torch.cuda.stream(out):
            for parameter in part["params"]:
                state = dict.get(self._optimizer.state, parameter, {})
                for key, value in state.items():
                    if self._is_large(value, parameter):
                        kept.append(value)
                        state[key] = self._home_of(parameter, key, value)
                        state[key].copy_(value, non_blocking=True)
        self._written = out.record_event()
        return kept, self._written

    def _home_of(self, parameter: Parameter, key: str, value: torch.Tensor) -> torch.Tensor:
        """Where a tensor of the state is on the host."""
        known = self._hosts[parameter].get(key)
        if known is None or known.shape != value.shape or known.dtype != value.dtype:
            known = self._hosts[parameter][key] = self._made(value)
        return known

    def _made(self, value: torch.Tensor) -> torch.Tensor:
        """Memory for a tensor of the state."""
        if not self._in_file:
            return torch.empty_like(value, device="cpu", pin_memory=True)
        like = torch.empty_like(value, device="meta")
        return mapped(value.nbytes).view(value.dtype).as_strided(like.size(), like.stride())

    @staticmethod
    def _gone(leaving: tuple[list[torch.Tensor], Any] | None) -> None:
        """Let go on the device what has been written back."""
        if leaving is not None:
            kept, written = leaving
            written.wait()
            kept.clear()

    def _settle(self) -> None:
        """The host looks: what was written back is there."""
        if not self._busy and self._written is not None:
            self._written.synchronize()

    def _loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """State that was there, or was loaded, goes to the host."""
        self._settle()
        optimizer.state = _State(self._settle, optimizer.state)
        for group in optimizer.param_groups:
            self._gone(self._written_back(group))
            if not any(parameter.is_cuda for parameter in group["params"]):
                self._filed(group)

    def _is_large(self, value: Any, parameter: Parameter) -> bool:
        """Whether it is worth it: counts of steps stay where they are."""
        there = isinstance(value, torch.Tensor) and value.device == parameter.device
        return there and (value.is_cuda or self._in_file) and value.numel() > 1
