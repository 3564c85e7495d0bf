"""Saves and restores the state of models and optimizers, in the same tensor objects."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchtrim.capture.recording import tensors_in
from torchtrim.dispatch.storages import element_bytes, storages_in
from torchtrim.errors import Unsupported

OF_TORCH = frozenset(vars(nn.Module())) - {"training"}
"""Attributes of `nn.Module` itself, such as tables of parameters and hooks."""


class Snapshot:
    """The saved state of parameters, buffers, gradients, module attributes (and containers in them),
    optimizers and random generators, including those of modules.

    `values=False` does not copy tensor elements, which would double the memory: enough for dry runs. Copies
    are on the host, or in files of the folder, if one is given, where they would take more bytes than `room`.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        values: bool = True,
        folder: Path | None = None,
        room: float = 0,
    ) -> None:
        self._values = values
        self._roots = (*modules,)
        every = list(dict.fromkeys(module for root in modules for module in root.modules()))
        self._modules = [_KeptModule(module) for module in every]
        self._optimizers = [_KeptOptimizer(optimizer) for optimizer in optimizers]
        self._tensors: dict[int, _KeptTensor] = {}
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._random = random_state()
        holders: list[Any] = [[m.parameters, m.buffers, m.tensors] for m in self._modules]
        holders += [[one.groups, list(one.states.values())] for one in self._optimizers]
        tensors = [*tensors_in(holders)]
        large = sum(map(element_bytes, tensors)) > room
        self._folder = folder if large else None
        with torch.no_grad():
            for tensor in tensors:
                self._keep(tensor)

    def restore(self) -> None:
        """Restore everything."""
        for module in self._modules:
            module.restore()
        for optimizer in self._optimizers:
            optimizer.restore()
        with torch.no_grad():
            for kept in self._tensors.values():
                kept.restore()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        set_random_state(self._random)

    def forget(self) -> None:
        """Free the copies. Whoever lists `kept` storages may outlive the need for them."""
        for kept in self._tensors.values():
            kept.forget()
        for parts in (self._modules, self._optimizers, self._tensors, self._gradients):
            parts.clear()

    def kept(self) -> list[Any]:
        """Return storages that only this snapshot keeps alive: its copies, and originals since replaced."""
        used = storages_in(_in_use(self._roots, [one.optimizer for one in self._optimizers]))
        ours = storages_in(tensor for module in self._modules for tensor in module.every_tensor)
        for kept in self._tensors.values():
            ours |= storages_in([kept.memory]) | kept.copied()
        return [storage for key, storage in ours.items() if key not in used]

    def _keep(self, tensor: torch.Tensor) -> None:
        if is_lazy(tensor):
            raise Unsupported(
                "the model has lazy parameters, whose shape is unknown until it runs. "
                "Run it once on a batch first."
            )
        if id(tensor) in self._tensors:
            return
        file = None if self._folder is None else self._folder / f"copy-{len(self._tensors)}"
        self._tensors[id(tensor)] = _KeptTensor(tensor, self._values, file)
        if tensor.is_leaf:
            self._gradients.append((tensor, tensor.grad))
            if tensor.grad is not None:
                self._keep(tensor.grad)


class _KeptTensor:
    def __init__(self, tensor: torch.Tensor, values: bool, file: Path | None) -> None:
        self._tensor = tensor
        self.memory = tensor.detach()
        self._requires_grad = tensor.requires_grad
        self._strided = tensor.layout is torch.strided
        self._overlaps = self._strided and 0 in tensor.stride()
        source: Any = self.memory.untyped_storage() if self._overlaps else self.memory
        plain = type(self.memory) is torch.Tensor and self._strided and not self._overlaps
        filed = values and plain and tensor.numel() > 0
        self._file = file if filed else None
        self._value: Any = None
        if self._file is not None:
            self._mapped().copy_(source)
        elif values:
            self._value = _host_copy(source)

    def copied(self) -> dict[int, Any]:
        if self._value is None:
            return {}
        return {self._value._cdata: self._value} if self._overlaps else storages_in([self._value])

    def restore(self) -> None:
        tensor, memory = self._tensor, self.memory
        if tensor.dtype != memory.dtype or (self._strided and not tensor.is_set_to(memory)):
            tensor.data = memory
        value = self._value
        if self._file is not None:
            value = self._mapped()
        if value is not None:
            (memory.untyped_storage() if self._overlaps else tensor).copy_(value)
        if tensor.is_leaf:
            tensor.requires_grad = self._requires_grad

    def _mapped(self) -> torch.Tensor:
        """Return the elements in the file, which this maps into memory, and creates at first."""
        memory = self.memory
        flat = torch.from_file(
            str(self._file), shared=True, size=memory.numel(), dtype=memory.dtype, device="cpu"
        )
        return flat.view(memory.shape)

    def forget(self) -> None:
        if self._file is not None:
            self._file.unlink(missing_ok=True)


class _KeptModule:
    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.parameters = dict(module._parameters)
        self.buffers = dict(module._buffers)
        own = {k: v for k, v in vars(module).items() if k not in OF_TORCH}
        self._attributes = own
        self._contents = {k: v.copy() for k, v in own.items() if type(v) in (list, dict, set)}
        states = ((one, generator_state(one)) for one in own.values())
        self._generators = [(one, state) for one, state in states if state is not None]
        self.every_tensor = [
            value
            for value in (*own.values(), *tensors_in(list(self._contents.values())))
            if isinstance(value, torch.Tensor) and not is_lazy(value)
        ]
        self.tensors = [value for value in self.every_tensor if not value.requires_grad]

    def restore(self) -> None:
        own = vars(self._module)
        for name in own.keys() - self._attributes.keys() - OF_TORCH:
            del own[name]
        own.update(self._attributes)
        for name, content in self._contents.items():
            own[name].clear()
            own[name].extend(content) if isinstance(content, list) else own[name].update(content)
        for generator, state in self._generators:
            set_state(generator, state)
        _refill(self._module._parameters, self.parameters)
        _refill(self._module._buffers, self.buffers)


class _KeptOptimizer:
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.states = {parameter: _shallow(state) for parameter, state in optimizer.state.items()}
        self.groups = [_shallow(group) for group in optimizer.param_groups]

    def restore(self) -> None:
        optimizer = self.optimizer
        _refill(optimizer.state, {key: _shallow(state) for key, state in self.states.items()})
        del optimizer.param_groups[len(self.groups) :]
        for group, values in zip(optimizer.param_groups, self.groups, strict=True):
            _refill(group, _shallow(values))


def _host_copy(source: Any) -> Any:
    """Return a copy on the host; meta tensors and storages stay on their device."""
    if source.device.type in ("cpu", "meta"):
        return source.clone()
    if isinstance(source, torch.UntypedStorage):
        return source.cpu()  # type: ignore[no-untyped-call]
    return source.to("cpu", copy=True)


def _in_use(
    roots: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]
) -> Iterator[torch.Tensor]:
    """Yield the tensors that modules and optimizers hold now, with gradients."""
    holders: list[Any] = [optimizer.param_groups for optimizer in optimizers]
    holders += [list(optimizer.state.values()) for optimizer in optimizers]
    for root in roots:
        for module in root.modules():
            own = [v for k, v in vars(module).items() if k not in OF_TORCH and type(v) is not set]
            holders += [module._parameters, module._buffers, own]
    for tensor in tensors_in(holders):
        if not is_lazy(tensor):
            yield tensor
            if tensor.is_leaf and tensor.grad is not None:
                yield tensor.grad


def _refill(mapping: Any, values: dict[Any, Any]) -> None:
    mapping.clear()
    mapping.update(values)


def generator_state(value: Any) -> Any:
    """Return the state of a random generator of torch, Python or numpy, None for anything else."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, random.Random):
        return value.getstate()
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is None:
        return None
    if isinstance(value, numpy.RandomState):  # It has more state than its bits.
        return value.get_state(legacy=False)
    bits = getattr(value, "bit_generator", value)
    return bits.state if isinstance(bits, numpy.BitGenerator) else None


def set_state(generator: Any, state: Any) -> None:
    """Set the state of a random generator of torch, Python or numpy."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        getattr(generator, "bit_generator", generator).state = state


def _shallow(state: Any) -> Any:
    """Copy an optimizer state and its lists, since LBFGS appends to them."""
    if not isinstance(state, dict):
        return state
    return {key: list(value) if type(value) is list else value for key, value in state.items()}


def random_state() -> dict[str, Any]:
    """Return the states of the global random generators."""
    torch_state = bytes(torch.get_rng_state().tolist())
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch_state}
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state(legacy=False)
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Set the global random generators to the states of `random_state`."""
    random.setstate(state["python"])
    torch.set_rng_state(torch.tensor(list(state["torch"]), dtype=torch.uint8, device="cpu"))
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])
