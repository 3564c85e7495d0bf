"""Collects evidence of a step's results: named digests of every loss, output, gradient, parameter, state,
buffer, attribute and random generator, call counts of modules and hooks, and exceptions."""

from __future__ import annotations

import copy
import ctypes
import hashlib
import math
import random
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.nn.parameter import is_lazy

from torchtrim.capture.allocator import own
from torchtrim.capture.modules import Modules
from torchtrim.capture.optimizers import parameters_of
from torchtrim.capture.recording import tensors_in
from torchtrim.capture.saved import type_name
from torchtrim.capture.spent import Spent
from torchtrim.capture.watch import Listener
from torchtrim.dispatch.storages import parts_of
from torchtrim.evidence.attributes import attributes
from torchtrim.evidence.generators import text_of
from torchtrim.evidence.script_state import ScriptState
from torchtrim.records.trial import RootCall, TrialStep

QUANTITIES = (
    "initial state",
    "checkpoint",
    "loss",
    "output",
    "gradient",
    "parameter",
    "optimizer state",
    "hyperparameter",
    "buffer",
    "input gradient",
    "attribute",
    "script state",
    "script generator",
    "random state",
    "call",
    "exception",
)

_PLAIN = "plain "
_DIGITS = 24
"""96 bits: no collision among all tensors of all runs, at three eighths of the size of SHA-256."""

HEADER = 64
"""Bytes before a kept value, so that it is aligned in the file for any type."""

_HOW = frozenset(("foreach", "fused", "capturable", "differentiable"))


class Evidence(Listener):
    """A collector of a step's evidence. `keep` is called with the name and value of each tensor.

    `digests`: hash the values. `graded`: ignore outputs computed without gradients. `looks`: include the
    inputs of root modules. `script`: include the script's other state. `gathers`: gather sharded tensors, for
    a plan that shards tensors of the original.
    """

    def __init__(
        self,
        modules: Modules,
        keep: Callable[[str, torch.Tensor], None] | None = None,
        *,
        digests: bool = True,
        graded: bool = True,
        looks: bool = False,
        script: ScriptState | None = None,
    ) -> None:
        self.step = TrialStep()
        self.gathers = False
        self._modules = modules
        self._keep = keep
        self._digests = digests
        self._graded = graded
        self._looks = looks
        self._script = script
        self._counts: dict[str, int] = {}
        self._known_names: dict[int, str] | None = None
        self._numbers: weakref.WeakKeyDictionary[torch.optim.Optimizer, dict[int, int]] = (
            weakref.WeakKeyDictionary()
        )
        self._inputs: dict[str, weakref.ref[torch.Tensor]] = {}
        self._called: dict[int, list[int]] = {}

    def next_step(self) -> TrialStep:
        """Return the step so far and begin the next one."""
        step, self.step = self.step, TrialStep()
        self._counts.clear()
        self._known_names = None
        self._inputs.clear()
        self._called.clear()
        return step

    def is_called(self, module: nn.Module, depth: int) -> None:
        """Count a call of a module and of its hooks, unless it is a recomputation."""
        if depth < 0 or (self._graded and not torch.is_grad_enabled()):
            return
        number = self._modules.number(module)
        if number >= 0:
            counts = self._called.setdefault(number, [0, 0, 0])
            counts[0] += 1
            counts[1] += _own_hooks(module._forward_pre_hooks)
            counts[2] += _own_hooks(module._forward_hooks)

    def module_starts(self, module: nn.Module, args: Any, kwargs: Any, depth: int) -> None:
        if depth != 0 or (self._graded and not torch.is_grad_enabled()):
            return
        root, tensors = self._root_name(module), list(tensors_in((args, kwargs)))
        for number, tensor in enumerate(tensors):
            if tensor.is_leaf and tensor.requires_grad and not isinstance(tensor, nn.Parameter):
                self._inputs[f"{root}.{number}"] = weakref.ref(tensor)
            if has_bits(tensor) and self._looks:
                name = f"{root}.{number} ({len(self.step.inputs)})"
                self.step.inputs[name] = digest_of(tensor)
        inputs = (*map(kind_of, tensors), *autocast_now())
        call = RootCall(root=root, training=module.training, inputs=inputs)
        if call not in self.step.calls:
            self.step.calls.append(call)

    def module_ends(self, module: nn.Module, output: Any, depth: int) -> None:
        if depth != 0 or (self._graded and not torch.is_grad_enabled()):
            return
        if output is None and (raised := sys.exc_info()[0]) is not None:
            name = self._count(f"exception:{self._root_name(module)}")
            self.step.digests[name] = raised.__qualname__
            return
        name = self._count(f"output:{self._root_name(module)}")
        for number, tensor in enumerate(tensors_in(output)):
            self._see(f"{name}.{number}", tensor)

    def backward_starts(self, tensors: tuple[torch.Tensor, ...]) -> None:
        for tensor in tensors:
            if tensor.dim() == 0:
                loss = math.nan if tensor.is_complex() else float(tensor.detach())
                self.step.losses.append(loss if math.isfinite(loss) else None)
                self._see(self._count("loss:loss"), tensor)

    def optimizer_ends(self, optimizer: torch.optim.Optimizer) -> None:
        names, numbers = self._names(), self.numbered(optimizer)
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None and not isinstance(parameter.grad, Spent):
                own = f"{type(optimizer).__name__}.{numbers[id(parameter)]}"
                name = names.get(id(parameter), own)
                self._see(self._count(f"gradient:{name}"), parameter.grad)

    def update_ends(self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
        """Note a gradient as its update leaves it, as after a step: some updates write into it."""
        if self._known_names is None:
            self._known_names = self._names()
        name = self._known_names.get(id(parameter), "")
        if not name:
            number = self.numbered(optimizer).get(id(parameter), -1)
            name = f"{type(optimizer).__name__}.{number}"
        if parameter.grad is not None:
            self._see(self._count(f"gradient:{name}"), parameter.grad)

    def numbered(self, optimizer: torch.optim.Optimizer) -> dict[int, int]:
        """Return each parameter's number in its optimizer, which stays while a plan splits its groups."""
        numbers = self._numbers.setdefault(optimizer, {})
        for parameter in parameters_of(optimizer):
            numbers.setdefault(id(parameter), len(numbers))
        return numbers

    def begins(self, name: str, root: nn.Module) -> None:
        """Add a root's parameters and buffers before its first call."""
        self._known_names = None
        if self._script is not None:
            self._script.begins(sys._getframe())
        for path, tensor in (*root.named_parameters(), *root.named_buffers()):
            if not is_lazy(tensor):
                self.step.state_bytes += tensor.nbytes
                self._see(f"initial state:{name}.{path}", tensor)

    def state(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Add the state after the step: parameters, buffers, optimizer states, random generators."""
        for kind, name, tensor in self._modules.named_tensors():
            if kind != "gathered":
                self._see(f"{kind}:{name}", tensor)
        names = self._names()
        for number, optimizer in enumerate(optimizers):
            for index, parameter in enumerate(parameters_of(optimizer)):
                if (owner := names.get(id(parameter), "")) == "":
                    owner = str(index)
                    self._see(f"parameter:optimizer{number}.{owner}", parameter)
                for key, value in optimizer.state.get(parameter, {}).items():
                    name = f"optimizer state:{number}.{owner}.{key}"
                    if isinstance(value, (int, float)):
                        self.step.digests[name] = repr(value)
                    for place, tensor in enumerate(tensors_in(value)):
                        self._see(f"{name}.{place}", tensor)
            for key, text in _settings(optimizer, names):
                self.step.digests[f"hyperparameter:{number}.{key}"] = text
        for name, known in self._inputs.items():
            if (leaf := known()) is not None and leaf.grad is not None:
                self._see(f"input gradient:{name}", leaf.grad)
        for name, value in attributes(self._modules.live()):
            self._see(f"attribute:{name}", value)
        if self._script is not None:
            for name, value in self._script.changes(sys._getframe()):
                self._see(f"script state:{name}", value)
            for name, value in self._script.generators.states(sys._getframe()):
                self.step.digests[f"script generator:{name}"] = value
        for name, value in random_states():
            self.step.digests[f"random state:{name}"] = value
        for number, counts in self._called.items():
            self.step.digests[f"call:{self._modules.records[number].path}"] = repr(counts)

    def round_trip(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Round-trip the `state_dict` of models and optimizers, and add it."""
        holders: dict[str, Any] = {**self._modules.roots}
        holders |= {f"optimizer{number}": one for number, one in enumerate(optimizers)}
        for name, holder in holders.items():
            try:
                saved = copy.deepcopy(holder.state_dict())
                holder.load_state_dict(saved)
            except Exception as error:
                self.step.digests[f"checkpoint:{name}"] = f"raises {type(error).__name__}"
                continue
            for key, tensor in _saved_tensors(saved):
                self._see(f"checkpoint:{name}.{key}", tensor)

    def _names(self) -> dict[int, str]:
        return {
            id(tensor): name
            for kind, name, tensor in self._modules.named_tensors()
            if kind == "parameter"
        }

    def _root_name(self, module: nn.Module) -> str:
        number = self._modules.number(module)
        return self._modules.records[number].path if number >= 0 else type(module).__name__

    def _count(self, name: str) -> str:
        count = self._counts[name] = self._counts.get(name, 0) + 1
        return name if count == 1 else f"{name} ({count})"

    def _see(self, name: str, value: Any) -> None:
        if not isinstance(value, torch.Tensor):
            self.step.digests[name] = f"{_PLAIN}{value}"
        elif has_bits(value):
            with torch.no_grad(), own():
                self._digest(name, value)

    def _digest(self, name: str, value: torch.Tensor) -> None:
        """Gathers a sharded tensor, and lets go of it at the end, within torchtrim's own range."""
        kind: Any = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
        if self.gathers and isinstance(value, kind):
            value = value.full_tensor()
        self.step.digests[name] = digest_of(value) if self._digests else ""
        if self._keep is not None:
            self._keep(name, value)


def _settings(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> Iterator[tuple[str, str]]:
    """Yield each setting and its value, however parameters are grouped.

    A setting with several values is named by the first parameter of each, and has the others in its text.
    """
    found: dict[str, dict[str, str]] = {}
    numbers = {id(p): str(number) for number, p in enumerate(parameters_of(optimizer))}
    for group in optimizer.param_groups:
        owners = [names.get(id(p), numbers[id(p)]) for p in group["params"]]
        for key, value in group.items():
            if isinstance(value, torch.Tensor) and value.numel() == 1:
                value = value.item()
            if key not in _HOW and isinstance(value, (int, float, tuple, bool)):
                found.setdefault(key, {}).update(dict.fromkeys(owners, repr(value)))
    for key, values in found.items():
        owners_of: dict[str, list[str]] = {}
        for owner, text in sorted(values.items()):
            owners_of.setdefault(text, []).append(owner)
        for text, owners in owners_of.items():
            alone = len(owners_of) == 1
            yield (
                (key, text)
                if alone
                else (f"{key} of {owners[0]}", f"{text} of {', '.join(owners)}")
            )


def _own_hooks(hooks: Mapping[int, Any]) -> int:
    named = (getattr(hook, "__module__", None) or type(hook).__module__ for hook in hooks.values())
    # Hooks of FSDP and of parallel layers compute what is compared anyway.
    return sum(not str(name).startswith(("torchtrim.", "torch.distributed.")) for name in named)


def _saved_tensors(saved: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(saved, torch.Tensor):
        yield name, saved
    elif isinstance(saved, Mapping):
        for key, value in saved.items():
            yield from _saved_tensors(value, f"{name}.{key}" if name else str(key))


def kind_of(tensor: torch.Tensor) -> str:
    """Return dtype and shape, such as `float32[8, 3]`; `*` for a size that differs within a nested tensor."""
    sizes = (str(size) if type(size) is int else "*" for size in tensor.shape)
    return f"{type_name(tensor.dtype)}[{', '.join(sizes)}]"


def autocast_now() -> tuple[str, ...]:
    """Return `("autocast to bfloat16",)` for each type that autocast is on for."""
    devices = (device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device))
    types = dict.fromkeys(type_name(torch.get_autocast_dtype(device)) for device in devices)
    return tuple(f"autocast to {name}" for name in types)


def has_bits(tensor: torch.Tensor) -> bool:
    """Return True for a dense tensor with values. FSDP2 frees the storage of gathered parameters.

    A tensor wrapped by a transform, such as `torch.vmap`, is compared where it is not wrapped.
    """
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return False
    if is_functorch_wrapped_tensor(tensor):
        return False
    return all(one.untyped_storage().nbytes() or not one.numel() for one in parts_of(tensor))


def digest_of(tensor: torch.Tensor) -> str:
    """Return a hash of shape, dtype and every bit. A contiguous CPU tensor is read in place.

    SHA-256 is Python's fastest hash on processors with instructions for it, as most have.
    """
    digest = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), usedforsecurity=False)
    digest.update(bytes_of(tensor))
    return digest.hexdigest()[:_DIGITS]


def sketch_of(tensor: torch.Tensor) -> str:
    """Return a sum of a real tensor's elements under drawn signs, and their norm; its kind for another."""
    if not tensor.is_floating_point():
        return kind_of(tensor)
    flat = tensor.detach().to(torch.float64).flatten()
    signs = torch.randint(
        2, flat.shape, generator=torch.Generator("cpu").manual_seed(1), device="cpu"
    )
    return f"{float((flat * (signs.to(flat) * 2 - 1)).sum())!r} {float(flat.norm())!r}"


def bytes_of(tensor: torch.Tensor) -> bytes | memoryview:
    """Return the elements in order, as bytes; a view of the tensor if it is contiguous and on CPU.

    A distributed tensor gives the bytes of its local shards.
    """
    wrapper: Any = tensor
    if type(wrapper).__module__.startswith("torch.distributed."):
        return b"".join(bytes(bytes_of(part)) for part in parts_of(tensor))
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    if not flat.nbytes:
        return b""
    view = memoryview((ctypes.c_ubyte * flat.nbytes).from_address(flat.data_ptr()))
    is_shared = tensor.device.type == "cpu" and flat.data_ptr() == tensor.data_ptr()
    return view if is_shared else bytes(view)


def keep_value(file: Path, tensor: torch.Tensor) -> None:
    """Write a value in the format of `certify.compare.load_kept`: its type in `HEADER` bytes, and its own."""
    with file.open("wb") as written:
        written.write(type_name(tensor.dtype).encode().ljust(HEADER))
        written.write(bytes_of(tensor))


def random_states() -> Iterator[tuple[str, str]]:
    """Yield digests of the random generators of Python, torch and, if loaded, numpy."""
    yield "python", _hash(repr(random.getstate()).encode())
    yield "torch", digest_of(torch.get_rng_state())
    if "numpy" in sys.modules:
        yield "numpy", _hash(text_of(sys.modules["numpy"].random.get_state(legacy=False)).encode())
    if torch.cuda.is_available():
        for number, state in enumerate(torch.cuda.get_rng_state_all()):
            yield f"cuda:{number}", digest_of(state)


def _hash(data: bytes) -> str:
    return hashlib.sha256(data, usedforsecurity=False).hexdigest()[:_DIGITS]
