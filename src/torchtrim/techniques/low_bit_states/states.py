"""Keeps the states of an Adam in few bits, by torchao's arithmetic, and widens them where it steps."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from torchtrim.capture.optimizers import parameters_of
from torchtrim.errors import ApplyFailed
from torchtrim.executor.stepping import OwnStep, cut, refuse
from torchtrim.techniques.low_bit_states.sizes import BLOCK, LEAST

State = dict[str, Any]
Seeds = Mapping[torch.Tensor, int]
Tensors = Sequence[torch.Tensor]

_UNSIGNED = ("exp_avg_sq", "max_exp_avg_sq")
_PIECE = {"cpu": 2**14}
_LARGE_PIECE = 2**22
"""Elements, whole blocks of them: values on the way take some 40 bytes an element."""


class Form(Protocol):
    """How a state is kept: under which names, and what is under them."""

    name: str
    suffixes: tuple[str, ...]

    def fits(self, value: Any) -> bool:
        """Whether it is a state that is narrowed."""
        ...

    def kinds(self, count: int) -> tuple[tuple[torch.dtype, int], ...]:
        """The type and size of each tensor that so many elements are kept in."""
        ...

    def narrowed(self, key: str, value: torch.Tensor, into: Tensors, seed: int) -> Tensors:
        """The narrow state, a tensor for each suffix: those of `into` if they are not empty."""
        ...

    def widened(self, key: str, kept: Tensors, like: torch.Tensor) -> torch.Tensor:
        """The state as a tensor like another."""
        ...


def form_of(options: Mapping[str, Any]) -> Form:
    """The form that a plan names. Raises `ApplyFailed`, where there is no torchao too."""
    states = options.get("states")
    if states not in _FORMS or len(options) != 1:
        raise ApplyFailed(
            f"low_bit_states has the option `states`, one of {', '.join(_FORMS)}, and the plan has "
            f"{dict(options)!r}."
        )
    return _FORMS[states](torchao())


@functools.cache
def torchao() -> Any:
    """torchao's arithmetic. Raises `ApplyFailed` where it is not installed, or too old."""
    if importlib.util.find_spec("torchao") is None:
        raise ApplyFailed(
            "low_bit_states computes with torchao, which is not installed here: "
            'pip install "torchtrim[torchao]".'
        )
    with _in_silence():
        found = importlib.import_module("torchao.optim.quant_utils")
    lacks = [name for name in _NEEDED if not hasattr(found, name)]
    if lacks:
        raise ApplyFailed(
            f"this torchao has no {', '.join(lacks)}, which low_bit_states computes with: "
            'pip install "torchao==0.18.0".'
        )
    return found


_NEEDED = (
    *("create_dynamic_map", "scale_tensor", "quantize_8bit_with_qmap", "dequant_with_qmap"),
    "_fp32_to_bf16_sr",
)


@contextlib.contextmanager
def _in_silence() -> Iterator[None]:
    """torchao says at its import which of its kernels for GPUs it could not load; none is needed."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


class Eight:
    """Codes of one byte and a scale for each block."""

    name = "8bit"
    suffixes: tuple[str, ...] = ("codes", "scale")

    def __init__(self, torchao: Any) -> None:
        self._torchao = torchao
        self._maps: dict[tuple[torch.device, bool], torch.Tensor] = {}

    def fits(self, value: Any) -> bool:
        """A state of whole blocks, in half precision or single."""
        large = isinstance(value, torch.Tensor) and value.numel() >= LEAST
        return large and value.is_floating_point() and _is_whole(value)

    def kinds(self, count: int) -> tuple[tuple[torch.dtype, int], ...]:
        """Codes, and scales."""
        return (torch.uint8, count), (torch.float32, count // BLOCK)

    def narrowed(self, key: str, value: torch.Tensor, into: Tensors, seed: int) -> Tensors:
        """The nearest code of each."""
        flat = value.reshape(-1)
        codes, scale = into or _empty(self, flat)
        known = self._map(value.device, key)
        for piece, blocks in _pieces(flat):
            scaled, scale[blocks] = self._torchao.scale_tensor(flat[piece].float(), BLOCK)
            codes[piece] = self._torchao.quantize_8bit_with_qmap(scaled, known)
        return codes, scale

    def widened(self, key: str, kept: Tensors, like: torch.Tensor) -> torch.Tensor:
        """What the codes stand for."""
        codes, scale = kept
        known = self._map(codes.device, key)
        found = torch.empty_like(like, device=codes.device)
        flat = found.view(-1) if found.is_contiguous() else found.new_empty(found.numel())
        for piece, blocks in _pieces(codes):
            flat[piece] = self._torchao.dequant_with_qmap(codes[piece], known, scale[blocks])
        return found if found.is_contiguous() else found.copy_(flat.view(found.shape))

    def _map(self, device: torch.device, key: str) -> torch.Tensor:
        """What the codes of a state stand for, in parts of the scale."""
        signed = key not in _UNSIGNED
        if (device, signed) not in self._maps:
            values = self._torchao.create_dynamic_map(signed)
            self._maps[device, signed] = torch.tensor(values, dtype=torch.float32, device=device)
        return self._maps[device, signed]


class Half:
    """bfloat16, rounded at random."""

    name = "bf16"
    suffixes: tuple[str, ...] = ("bf16",)

    def __init__(self, torchao: Any) -> None:
        self._torchao = torchao

    def fits(self, value: Any) -> bool:
        """A state in single precision."""
        large = isinstance(value, torch.Tensor) and value.numel() >= LEAST
        return large and value.dtype is torch.float32

    def kinds(self, count: int) -> tuple[tuple[torch.dtype, int], ...]:
        """One, of two bytes an element."""
        return ((torch.bfloat16, count),)

    def narrowed(self, key: str, value: torch.Tensor, into: Tensors, seed: int) -> Tensors:
        """Up or down, by noise that depends on the seed alone."""
        flat = value.reshape(-1)
        (kept,) = into or _empty(self, flat)
        with _random(value.device, seed + (key in _UNSIGNED)):
            for piece, _ in _pieces(flat):
                kept[piece] = self._torchao._fp32_to_bf16_sr(flat[piece])
        return (kept,)

    def widened(self, key: str, kept: Tensors, like: torch.Tensor) -> torch.Tensor:
        """The same in single precision."""
        (one,) = kept
        return torch.empty_like(like, device=one.device).copy_(one.view(like.shape))


_FORMS: dict[str, Callable[[Any], Form]] = {"8bit": Eight, "bf16": Half}


def _empty(form: Form, flat: torch.Tensor) -> Tensors:
    return [flat.new_empty(size, dtype=dtype) for dtype, size in form.kinds(flat.numel())]


class NarrowStates:
    """An optimizer whose states are narrow between steps. `revert` makes it what it was, its states wide.

    Raises `ApplyFailed` for one that does not update each element by itself, or has step hooks.
    """

    def __init__(self, where: str, optimizer: torch.optim.Optimizer, form: Form) -> None:
        refuse(where, optimizer)
        self._optimizer = optimizer
        self._form = form
        self._before = _wide_states(optimizer, form)
        self._own = OwnStep(optimizer, self._run)
        self._saved = _Saved(optimizer, form)
        _narrow_all(optimizer, form, _seeds(optimizer))

    def revert(self) -> None:
        """Make the optimizer what it was. Where it has not stepped, states are as they were, to the bit."""
        self._own.revert()
        self._saved.revert()
        _widen_all(self._optimizer, self._form)
        for parameter, state in self._before.items():
            for key, value in state.items():
                self._optimizer.state[parameter][key] = value.to(parameter.device)
        self._before.clear()

    def _run(self, step: Callable[[], Any]) -> None:
        """The step, one parameter at a time."""
        optimizer, form = self._optimizer, self._form
        self._before.clear()
        whole = optimizer.param_groups
        seeds = _seeds(optimizer)
        try:
            for part in [part for group in whole for part in cut(group, 1)]:
                (parameter,) = part["params"]
                state = optimizer.state[parameter]
                kept = _widen(form, state, parameter)
                optimizer.param_groups = [part]
                step()
                _narrow(form, state, kept, seeds[parameter])
        finally:
            optimizer.param_groups = whole


class NarrowedByHand:
    """Hooks that widen all states before a step, and narrow them after it."""

    def __init__(self, where: str, optimizer: torch.optim.Optimizer, form: Form) -> None:
        seeds = dict(_seeds(optimizer))

        def before(*_: Any) -> None:
            seeds.update(_seeds(optimizer))
            _widen_all(optimizer, form)

        def after(*_: Any) -> None:
            _narrow_all(optimizer, form, seeds)

        after()
        self._hooks = [
            optimizer.register_step_pre_hook(before),
            optimizer.register_step_post_hook(after),
        ]
        self._saved = _Saved(optimizer, form)
        self._wide = functools.partial(_widen_all, optimizer, form)

    def revert(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._saved.revert()
        self._wide()


class _Saved:
    """Hooks of what an optimizer saves and loads: states are saved wide, and narrow beside."""

    def __init__(self, optimizer: torch.optim.Optimizer, form: Form) -> None:
        self._form = form
        self._coming: Any = None
        self._hooks = [
            optimizer.register_state_dict_post_hook(self._saves),
            optimizer.register_load_state_dict_pre_hook(self._comes),
            optimizer.register_load_state_dict_post_hook(self._loaded),
        ]

    def revert(self) -> None:
        """Take them off."""
        for hook in self._hooks:
            hook.remove()

    def _saves(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        parameters = list(parameters_of(optimizer))
        wide = {number: _on_host(state) for number, state in saved["state"].items()}
        kept = {number: _widen(self._form, wide[number], parameters[number]) for number in wide}
        beside = {"states": self._form.name, "state": kept}
        return {**saved, "state": wide, _BESIDE: beside}

    def _comes(self, _: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        self._coming = saved.get(_BESIDE)

    def _loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """Loaded states are narrowed: to the states saved beside them, where they belong together."""
        coming, self._coming = self._coming, None
        ours = isinstance(coming, dict) and coming.get("states") == self._form.name
        beside = coming.get("state") if ours else None
        seeds = _seeds(optimizer)
        for number, parameter in enumerate(parameters_of(optimizer)):
            state = optimizer.state.get(parameter, {})
            kept = beside.get(number) if isinstance(beside, dict) else None
            if isinstance(kept, dict):
                _take(self._form, state, kept, parameter)
            _narrow(self._form, state, {}, seeds[parameter])


_BESIDE = "low_bit_states"


def _take(form: Form, state: State, kept: Mapping[str, Any], parameter: torch.Tensor) -> None:
    """Put narrow states in the place of those that they give when they are widened."""
    for key, tensors in kept.items():
        if key not in state or not _are_of(form, tensors, state[key]):
            continue
        here = [tensor.to(parameter.device) for tensor in tensors]
        if torch.equal(form.widened(key, here, parameter), state[key]):
            del state[key]
            state.update(_named(form, key, here))


def _are_of(form: Form, tensors: Any, wide: torch.Tensor) -> bool:
    """Whether they may be the narrow state of a wide one."""
    if not form.fits(wide) or not isinstance(tensors, (tuple, list)):
        return False
    if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        return False
    found = tuple((tensor.dtype, tensor.numel()) for tensor in tensors)
    return found == form.kinds(wide.numel()) and all(tensor.dim() == 1 for tensor in tensors)


def _named(form: Form, key: str, kept: Tensors) -> State:
    """The narrow state under its names."""
    return {f"{key}_{suffix}": one for suffix, one in zip(form.suffixes, kept, strict=True)}


def _widen(form: Form, state: State, like: torch.Tensor) -> dict[str, Tensors]:
    """Widen the states of one parameter; what they were kept in, by their keys."""
    found: dict[str, Tensors] = {}
    last = f"_{form.suffixes[0]}"
    for key in [name.removesuffix(last) for name in state if name.endswith(last)]:
        found[key] = [state.pop(f"{key}_{suffix}") for suffix in form.suffixes]
        state[key] = form.widened(key, found[key], like)
    return found


def _narrow(form: Form, state: State, kept: Mapping[str, Tensors], seed: int) -> None:
    """Narrow the states of one parameter, into what they were kept in where there is that."""
    for key in [name for name, value in state.items() if form.fits(value)]:
        narrow = form.narrowed(key, state.pop(key), kept.get(key, ()), seed)
        state.update(_named(form, key, narrow))


def _widen_all(optimizer: torch.optim.Optimizer, form: Form) -> None:
    for parameter, state in optimizer.state.items():
        _widen(form, state, parameter)


def _narrow_all(optimizer: torch.optim.Optimizer, form: Form, seeds: Seeds) -> None:
    for parameter, state in optimizer.state.items():
        _narrow(form, state, {}, seeds[parameter])


def _wide_states(optimizer: torch.optim.Optimizer, form: Form) -> dict[torch.Tensor, State]:
    """The states that will be narrowed, on the host."""
    return {
        parameter: _on_host({key: value for key, value in state.items() if form.fits(value)})
        for parameter, state in optimizer.state.items()
    }


def _on_host(state: Mapping[str, Any]) -> State:
    return {
        key: value.cpu() if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
    }


def _seeds(optimizer: torch.optim.Optimizer) -> Seeds:
    """A seed for each parameter, another in each step."""
    parameters = list(parameters_of(optimizer))
    counts = (state["step"] for state in optimizer.state.values() if "step" in state)
    first = int(next(counts, 0)) * len(parameters)
    return {parameter: 2 * (first + n) for n, parameter in enumerate(parameters)}


@contextlib.contextmanager
def _random(device: torch.device, seed: int) -> Iterator[None]:
    """Random numbers from a seed; the program's own go on afterwards as they would have."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _is_whole(value: torch.Tensor) -> bool:
    return value.numel() % BLOCK == 0 and value.element_size() <= 4


def _pieces(flat: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Parts of a state, as its elements and as its blocks."""
    size = _PIECE.get(flat.device.type, _LARGE_PIECE)
    for begin in range(0, flat.numel(), size):
        end = min(begin + size, flat.numel())
        yield slice(begin, end), slice(begin // BLOCK, end // BLOCK)
