"""What a script compiles is run eagerly: inside a compiled graph nothing can be seen or planned."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from torchtrim.records.trial import Request

NOTE = (
    "the script uses torch.compile: what it compiles was run eagerly here, and every figure is of that. "
    "A plan holds for eager runs too, and `torchtrim run` runs it so"
)


class Eagerly:
    """From `install` on, `torch.compile` gives what it always does, and calling that compiles nothing.

    `asked` tells whether the script ever compiled, `told` is called when it first does.
    """

    def __init__(self, told: Callable[[], None] = lambda: None) -> None:
        self.asked = False
        self._told = told

    def install(self) -> None:
        """Stand in for `torch.compile`, the decorator too, and for `Module.compile`."""
        original = torch.compile

        @functools.wraps(original)
        def compile_nothing(model: Any = None, **options: Any) -> Any:
            self._ask()
            for unused in ("backend", "mode", "options"):
                options.pop(unused, None)
            return original(model, backend="eager", **options)

        @functools.wraps(nn.Module.compile)
        def stay_eager(_module: nn.Module, *_: Any, **__: Any) -> None:
            self._ask()

        self._instead = torch.compile, nn.Module.compile
        torch.compile = compile_nothing
        nn.Module.compile = stay_eager  # type: ignore[assignment, method-assign]

    def remove(self) -> None:
        """What `install` replaced is there again."""
        torch.compile, nn.Module.compile = self._instead  # type: ignore[method-assign]
        if self.asked:
            torch.compiler.set_stance("default")

    def _ask(self) -> None:
        if not self.asked:
            self.asked = True
            torch.compiler.set_stance("force_eager")
            self._told()


_OLD_TYPES = (torch, "FloatTensor", "DoubleTensor"), (torch.cuda, "FloatTensor", "DoubleTensor")
_NAMES = {
    f"{module.__name__}.{one}": f"{module.__name__}.{other}" for module, one, other in _OLD_TYPES
}


def widen_old_types() -> None:
    """`torch.FloatTensor(2, 3)`, which no mode sees, makes float64 in this process from now on."""
    for module, narrow, wide in _OLD_TYPES:
        setattr(module, narrow, getattr(module, wide))


def load_as_written() -> None:
    """What is read from a file, or sent by a loader's worker, has the type that it was written in."""
    rebuild = torch._utils._rebuild_tensor

    @functools.wraps(rebuild)
    def as_written(*args: Any) -> Any:
        with torch._C.DisableTorchFunction():
            return rebuild(*args)  # type: ignore[no-untyped-call]

    torch._utils._rebuild_tensor = as_written


def keep_wide_in_backward() -> None:
    """What runs again in backward does so under `Wide`, as at first: torch turns modes off there."""
    run_backward = torch.autograd.graph._engine_run_backward

    @functools.wraps(run_backward)
    def wide(*args: Any, **kwargs: Any) -> Any:
        with Wide():
            return run_backward(*args, **kwargs)

    for owner in (torch.autograd, torch.autograd.graph):
        owner._engine_run_backward = wide  # type: ignore[attr-defined]


def prepare(root: nn.Module, request: Request) -> None:
    """Widen and nudge its parameters, buffers and what it is first called with, as is requested."""
    if request.double:
        root.double()
    if request.nudged:
        with torch.no_grad():
            for tensor in (*root.parameters(), *root.buffers()):
                tensor.copy_(_nudged(tensor))
        _nudge_inputs(root, torch.float64 if request.double else None)


def _nudge_inputs(root: nn.Module, dtype: torch.dtype | None) -> None:
    """Nudge the inputs of the next call, those of float32 in the wider type."""

    def nudge(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _nudged(value.to(dtype) if dtype and value.dtype is torch.float32 else value)
        return value

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        handle.remove()
        return tree_map(nudge, args), tree_map(nudge, kwargs)

    handle = root.register_forward_pre_hook(before, with_kwargs=True)


def _nudged(value: torch.Tensor) -> torch.Tensor:
    """The numbers moved by one rounding each, up or down at random, the same way each time.

    Of a type narrower than float32 they stay, since there one rounding is no small change.
    """
    if value.dtype not in (torch.float32, torch.float64) or value.layout is not torch.strided:
        return value
    own = torch.Generator("cpu").manual_seed(value.numel())
    signs = (
        torch.randint(2, value.shape, generator=own, dtype=torch.int64, device="cpu").to(value) * 2
        - 1
    )
    return value * (1 + torch.finfo(value.dtype).eps * signs)


class Wide(TorchFunctionMode):
    """What is cast to or made in float32 is in float64: `x.float()`, `softmax(x, -1, dtype=torch.float32)`,
    `x.type("torch.FloatTensor")`. So is data that came in float32 and meets float64 where torch wants one
    type, but for what is written to.

    Else the program rounds to float32 itself, and by how much less two runs differ says nothing.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        named = {name: _wide(value) for name, value in (kwargs or {}).items()}
        args = tuple(map(_wide, args))
        try:
            return func(*args, **named)
        except RuntimeError:
            if not _are_mixed((*args, *named.values())) or _writes_narrow(func, args, named):
                raise
        named = {name: _widened(value) for name, value in named.items()}
        return func(*map(_widened, args), **named)


def _are_mixed(values: tuple[Any, ...]) -> bool:
    """Whether there are tensors of float32 and of float64."""
    types = {value.dtype for value in values if isinstance(value, torch.Tensor)}
    return {torch.float32, torch.float64} <= types


def _writes_narrow(func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Whether a function writes to a tensor of float32: to a copy in float64 it would be lost."""
    name = getattr(func, "__name__", "")
    in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    return _is_narrow(named.get("out")) or (in_place and _is_narrow(args[0] if args else None))


def _widened(value: Any) -> Any:
    """A tensor of float32 in float64; anything else as it is."""
    return value.double() if _is_narrow(value) else value


def _is_narrow(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.float32


def _wide(value: Any) -> Any:
    if isinstance(value, str):
        return _NAMES.get(value, value)
    return torch.float64 if value is torch.float32 else value


_SEED = 7_081_990
_SCALE = 0.02
_NOTE = (
    "{count} tensors of {root}, first `{first}`, hold what `to_empty` left in memory: the script has not "
    "written them before its first forward. Here they are the same small numbers in every run; without "
    "torchtrim they hold anything. Have `reset_parameters` reach them"
)


class _Left(NamedTuple):
    """A tensor as `to_empty` left it, and the versions that it and this rank's part of it had."""

    tensor: weakref.ref[torch.Tensor]
    versions: tuple[int, int]


_left: dict[int, _Left] = {}


def fill_uninitialized() -> None:
    """From now on fill what `to_empty` leaves, in this process."""
    original = nn.Module.to_empty

    @functools.wraps(original)
    def to_empty(module: nn.Module, *args: Any, **options: Any) -> Any:
        result = original(module, *args, **options)
        with _disable_current_modes(), torch.no_grad():
            _fill(module)
        return result

    nn.Module.to_empty = to_empty  # type: ignore[assignment, method-assign]


def note_uninitialized(root: nn.Module) -> tuple[str, ...]:
    """What is to be said of a root whose first forward begins; nothing where all was written."""
    names = [name for name, tensor in _tensors_of(root) if _is_left(tensor)]
    if not names:
        return ()
    return (_NOTE.format(count=len(names), root=type(root).__name__, first=names[0]),)


def _fill(module: nn.Module) -> None:
    draws = torch.Generator().manual_seed(_SEED)
    for _, tensor in _tensors_of(module):
        own = _own_part(tensor)
        if own.is_floating_point():
            drawn = torch.empty(own.shape, dtype=torch.float32, device="cpu")
            own.copy_(drawn.normal_(0.0, _SCALE, generator=draws))
        else:
            own.zero_()
        _left[id(tensor)] = _Left(weakref.ref(tensor), _versions(tensor))


def _is_left(tensor: torch.Tensor) -> bool:
    left = _left.get(id(tensor))
    return left is not None and left.tensor() is tensor and left.versions == _versions(tensor)


def _versions(tensor: torch.Tensor) -> tuple[int, int]:
    """What writes to a sharded tensor counts at that, or at its part."""
    return tensor._version, _own_part(tensor)._version


def _own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Of a tensor that is shared out over ranks, the part of this one."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def _tensors_of(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Parameters and buffers, by name."""
    return [*module.named_parameters(), *module.named_buffers()]
