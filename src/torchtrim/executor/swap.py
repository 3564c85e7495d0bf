"""Replace the forward of one module instance, reversibly."""

from __future__ import annotations

import copy
import copyreg
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx import _symbolic_trace

from torchtrim.errors import ApplyFailed

Forward = Callable[..., Any]
_SWAPPED = "_torchtrim_swapped"
_IS_MADE = "_torchtrim_is_made"
_PROTOCOL = 4  # The one that `copy` uses.
_KEYS = torch._C._TorchDispatchModeKey


def is_graphed() -> bool:
    """Return True where a model is compiled or exported instead of trained.

    Compilers come first: they evaluate that condition and do not trace the rest.
    """
    return (
        torch.compiler.is_compiling()
        or _symbolic_trace._is_fx_tracing_flag
        or torch._C._get_tracing_state() is not None
        or torch._C._get_dispatch_mode(_KEYS.PROXY) is not None
    )


def is_traced() -> bool:
    """Return True where a model is compiled, exported or transformed instead of trained."""
    return is_graphed() or torch._C._are_functorch_transforms_active()


def never() -> bool:
    """Return False: the replacement is used wherever the module is called."""
    return False


def does_not_train() -> bool:
    """Return True where a model is traced, or runs on fake tensors."""
    return is_traced() or torch._C._get_dispatch_mode(_KEYS.FAKE) is not None


def is_exported() -> bool:
    """Return True where a model is traced for another purpose than `torch.compile`."""
    return not _is_compiled() and does_not_train()


def is_exported_or_scripted() -> bool:
    """Return True where a graph of a model is made that runs without it, unlike by `torch.compile`."""
    return not _is_compiled() and is_graphed()


def _is_compiled() -> bool:
    return torch.compiler.is_compiling() and not torch.compiler.is_exporting()


class Swapped:
    """Replaces the forward of a module until `revert`.

    The instance gets a subclass of its own class, so parameters, buffers, hooks, names and `state_dict` stay.
    A copy or pickle of it has the original class and runs without the plan. Several replacements on a module
    can be reverted in any order: one below others is inactive from then on, and is removed with them.
    `original_if`: when calls run the original forward, by default where it does not train. `copied`: makes
    the forward of copies, if it computes another function or other gradients. If `original_if` is `never`,
    pickles have it too, and TorchScript does not support the module.
    """

    def __init__(
        self,
        module: nn.Module,
        wrap: Callable[[Forward], Forward],
        original_if: Callable[[], bool] = does_not_train,
        copied: Callable[[nn.Module], Forward] | None = None,
    ) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            raise ApplyFailed(
                f"{type(module).__name__} is compiled by TorchScript, so its forward cannot be "
                "replaced. Plan the original module."
            )
        if getattr(module, "_compiled_call_impl", None) is not None:
            raise ApplyFailed(
                f"{type(module).__name__} was compiled by its own `compile()`, which would trace the "
                "recomputation too. Plan first and compile afterwards, or plan a module around it."
            )
        self._module = module
        self._switch = _Switch(original_if)
        if (own := module.__dict__.get("forward")) is not None:
            module.__dict__["forward"] = _over(own, wrap, self._switch)
        else:
            module.__class__ = _subclass(type(module), wrap, self._switch, copied)

    def revert(self) -> None:
        """Restore the module."""
        self._switch.is_on = False
        while _take_off(self._module):
            pass


def is_swapped(module: nn.Module) -> bool:
    """Return True if a technique replaced the module's forward."""
    return hasattr(module.forward, _SWAPPED) or hasattr(type(module), _SWAPPED)


def is_of_another(forward: Forward, module: nn.Module) -> bool:
    """True if the wrapped forward belongs to a shallow copy with other parameters, such as a replica of
    `nn.DataParallel`.
    """
    bound: tuple[Any, ...] = getattr(forward, "args", ())
    return len(bound) > 0 and isinstance(bound[0], type(module)) and bound[0] is not module


class _Switch:
    """The state of a replacement."""

    def __init__(self, original_if: Callable[[], bool]) -> None:
        self.is_on = True
        self.original_if = original_if

    def is_used(self) -> bool:
        return self.is_on and not self.original_if()


def _over(own: Forward, wrap: Callable[[Forward], Forward], switch: _Switch) -> Forward:
    ours = wrap(own)

    @functools.wraps(own)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return (ours if switch.is_used() else own)(*args, **kwargs)

    setattr(forward, _SWAPPED, (forward, switch, own))
    return forward


def _take_off(module: nn.Module) -> bool:
    if (own := module.__dict__.get("forward")) is not None:
        forward, switch, under = getattr(own, _SWAPPED, (None, None, None))
        if forward is not own or switch is None or switch.is_on:
            return False
        module.__dict__["forward"] = under
        return True
    switch = type(module).__dict__.get(_SWAPPED)
    if switch is None or switch.is_on:
        return False
    before: Any = type(module).__base__
    module.__class__ = before
    return True


def _for_scripts(forward: Any, original: Any) -> Forward:
    """Return a forward that TorchScript compiles from the original's source and globals."""
    names = getattr(inspect.unwrap(original), "__globals__", forward.__globals__)
    copied = types.FunctionType(forward.__code__, names, "forward", None, forward.__closure__)
    return functools.wraps(original)(copied)


def _subclass(
    original: type[nn.Module],
    wrap: Callable[[Forward], Forward],
    switch: _Switch,
    copied: Callable[[nn.Module], Forward] | None,
) -> type[nn.Module]:
    always = copied is not None and switch.original_if is never

    def call(self: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run: Forward = functools.partial(original.forward, self)
        return (wrap(run) if switch.is_used() else run)(*args, **kwargs)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return call(self, args, kwargs)

    def reduce_ex(self: nn.Module, protocol: Any) -> Any:
        reduced = original.__reduce_ex__(self, protocol)
        if isinstance(reduced, str) or _SWAPPED in original.__dict__:
            return reduced
        state, *rest = reduced[2:]
        if copied is not None and always and switch.is_on:
            state = {**state, "forward": copied(self)}
        return copyreg._reconstructor, (original, object, None), state, *rest  # type: ignore[attr-defined]

    def copy_of(self: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
        make, given, state, *_ = reduce_ex(self, _PROTOCOL)
        made: Any = make(*given)
        if memo is not None:
            memo[id(self)] = made
            state = copy.deepcopy(state, memo)
        made.__setstate__(state)
        if copied is not None and switch.is_on:
            vars(made)["forward"] = copied(made)
        module: nn.Module = made
        return module

    def refuse_script(self: nn.Module) -> nn.Module:
        if not switch.is_on:
            return self
        raise ApplyFailed(
            f"the plan has replaced what a {type(self).__name__} of this model computes, and "
            "torch.jit.script compiles the original code. Write the replacement into the model, or call the "
            "plan's `revert()` first; torch.jit.trace and torch.export see the replacement."
        )

    namespace = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "__reduce_ex__": reduce_ex,
        "forward": _for_scripts(forward, original.forward),
        _SWAPPED: switch,
    }
    if copied is not None and not hasattr(original, "__deepcopy__"):
        namespace["__copy__"] = namespace["__deepcopy__"] = copy_of
    if always:
        namespace["__prepare_scriptable__"] = refuse_script
    of_class: Any = type(original)
    kind: type[nn.Module] = _alike(of_class)(original.__name__, (original,), namespace)
    return kind


@functools.cache
def _alike(kind: Any) -> Any:
    """Return a metaclass whose classes equal those they replace, for code that looks types up: torch's
    quantization does. An attribute set on such a class is set on the replaced one, which all its
    objects share.
    """

    def equals(one: type, other: object) -> Any:
        alike = isinstance(other, type) and _replaced(one) is _replaced(other)
        return alike or NotImplemented

    def begin(one: type, *args: Any) -> None:
        kind.__init__(one, *args)
        setattr(one, _IS_MADE, True)

    def set_on(one: type, name: str, value: Any) -> None:
        kind.__setattr__(_holder(one, name), name, value)

    def delete_from(one: type, name: str) -> None:
        kind.__delattr__(_holder(one, name), name)

    namespace = {
        "__eq__": equals,
        "__hash__": lambda one: hash(_replaced(one)),
        "__init__": begin,
        "__setattr__": set_on,
        "__delattr__": delete_from,
    }
    return type(kind.__name__, (kind,), namespace)


def _holder(kind: type, name: str) -> type:
    """Return the class that holds an attribute: the new one has Python's, ours, its own, such as the forward
    that a library wraps and sets again, and what `__init_subclass__` sets.
    """
    is_its_own = name.startswith(("__", "_abc_", "_torchtrim_")) or name in vars(kind)
    return kind if is_its_own or _IS_MADE not in vars(kind) else _replaced(kind)


def _replaced(kind: type) -> type:
    return next(one for one in kind.__mro__ if _SWAPPED not in vars(one))
