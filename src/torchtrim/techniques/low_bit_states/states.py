"""Keeps the states of Adam in few bits with torchao's arithmetic, and widens them for each step."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from torchtrim.capture.optimizers import parameters_of
from torchtrim.errors import ApplyFailed
from torchtrim.executor.stepping import Hooked, OwnStep, cut, refuse
from torchtrim.techniques.low_bit_states import BLOCK, LEAST

State = dict[str, Any]
Seeds = Mapping[torch.Tensor, int]
Tensors = Sequence[torch.Tensor]
AllKept = Mapping[torch.Tensor, Mapping[str, Tensors]]
"""The narrow tensors of each parameter's states."""

_UNSIGNED = ("exp_avg_sq", "max_exp_avg_sq")
_PIECE = {
    "cpu": 2**14
}  # Arbitrary: elements converted at a time, with 40 bytes each of temporaries.
_LARGE_PIECE = 2**22  # The same on other devices: fewer launches, for 160 MiB of temporaries.


def format_of(options: Mapping[str, Any]) -> StateFormat:
    """Return the format that a plan names. Raises `ApplyFailed`, also without torchao."""
    states = options.get("states")
    if states not in _FORMATS or len(options) != 1:
        raise ApplyFailed(
            f"low_bit_states has one option, `states`, one of {', '.join(_FORMATS)}; the plan has "
            f"{dict(options)!r}."
        )
    return _FORMATS[states](torchao())


@functools.cache
def torchao() -> Any:
    """Return torchao's arithmetic. Raises `ApplyFailed` if torchao is missing or too old."""
    if importlib.util.find_spec("torchao") is None:
        raise ApplyFailed(
            "low_bit_states needs torchao, which is not installed here: "
            'pip install "torchtrim[torchao]".'
        )
    with _in_silence():
        found = importlib.import_module("torchao.optim.quant_utils")
    lacks = [name for name in _NEEDED if not hasattr(found, name)]
    if lacks:
        raise ApplyFailed(
            f"this torchao lacks {', '.join(lacks)}, which low_bit_states needs: "
            'pip install "torchao==0.18.0".'
        )
    return found


_NEEDED = (
    *("create_dynamic_map", "scale_tensor", "quantize_8bit_with_qmap", "dequant_with_qmap"),
    "_fp32_to_bf16_sr",
)


@contextlib.contextmanager
def _in_silence() -> Iterator[None]:
    """Suppress torchao's warnings at import about GPU kernels that did not load; they are not needed."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


class EightBitFormat:
    """Codes of one byte, and a scale for each block.

    As every format, it has a narrow tensor for each suffix, and writes into the tensors of `into`, if given.
    """

    name = "8bit"
    suffixes: tuple[str, ...] = ("codes", "scale")

    def __init__(self, torchao: Any) -> None:
        self._torchao = torchao
        self._maps: dict[tuple[torch.device, bool], torch.Tensor] = {}

    def fits(self, value: Any) -> bool:
        """Return True for a state of whole blocks, in half or single precision."""
        large = isinstance(value, torch.Tensor) and value.numel() >= LEAST
        whole = large and value.numel() % BLOCK == 0 and value.element_size() <= 4
        return whole and value.is_floating_point()

    def kinds(self, count: int) -> tuple[tuple[torch.dtype, int], ...]:
        """Return the types and sizes of codes and scales."""
        return (torch.uint8, count), (torch.float32, count // BLOCK)

    def narrowed(self, key: str, value: torch.Tensor, into: Tensors, seed: int) -> Tensors:
        """Return the nearest code of each element, and the scales."""
        flat = value.reshape(-1)
        codes, scale = into or _empty(self, flat)
        known = self._map(value.device, key)
        for piece, blocks in _pieces(flat):
            scaled, scale[blocks] = self._torchao.scale_tensor(flat[piece].float(), BLOCK)
            codes[piece] = self._torchao.quantize_8bit_with_qmap(scaled, known)
        return codes, scale

    def widened(self, key: str, kept: Tensors, like: torch.Tensor) -> torch.Tensor:
        """Return the values of the codes."""
        codes, scale = kept
        known = self._map(codes.device, key)
        found = torch.empty_like(like, device=codes.device)
        flat = found.view(-1) if found.is_contiguous() else found.new_empty(found.numel())
        for piece, blocks in _pieces(codes):
            flat[piece] = self._torchao.dequant_with_qmap(codes[piece], known, scale[blocks])
        return found if found.is_contiguous() else found.copy_(flat.view(found.shape))

    def _map(self, device: torch.device, key: str) -> torch.Tensor:
        """Return the values of the codes, as fractions of the scale."""
        signed = key not in _UNSIGNED
        if (device, signed) not in self._maps:
            values = self._torchao.create_dynamic_map(signed)
            self._maps[device, signed] = torch.tensor(values, dtype=torch.float32, device=device)
        return self._maps[device, signed]


class Bfloat16Format:
    """bfloat16 with stochastic rounding."""

    name = "bf16"
    suffixes: tuple[str, ...] = ("bf16",)

    def __init__(self, torchao: Any) -> None:
        self._torchao = torchao

    def fits(self, value: Any) -> bool:
        """Return True for a state in single precision."""
        large = isinstance(value, torch.Tensor) and value.numel() >= LEAST
        return large and value.dtype is torch.float32

    def kinds(self, count: int) -> tuple[tuple[torch.dtype, int], ...]:
        """Return the type and size of one tensor of two bytes per element."""
        return ((torch.bfloat16, count),)

    def narrowed(self, key: str, value: torch.Tensor, into: Tensors, seed: int) -> Tensors:
        """Round up or down, with noise that depends only on the seed."""
        flat = value.reshape(-1)
        (kept,) = into or _empty(self, flat)
        with _random(value.device, seed + (key in _UNSIGNED)):
            for piece, _ in _pieces(flat):
                kept[piece] = self._torchao._fp32_to_bf16_sr(flat[piece])
        return (kept,)

    def widened(self, key: str, kept: Tensors, like: torch.Tensor) -> torch.Tensor:
        """Return the state in single precision."""
        return torch.empty_like(like, device=kept[0].device).copy_(kept[0].view(like.shape))


StateFormat = EightBitFormat | Bfloat16Format
_FORMATS: dict[str, Callable[[Any], StateFormat]] = {"8bit": EightBitFormat, "bf16": Bfloat16Format}


def _empty(form: StateFormat, flat: torch.Tensor) -> Tensors:
    return [flat.new_empty(size, dtype=dtype) for dtype, size in form.kinds(flat.numel())]


class NarrowStates:
    """An optimizer whose states are narrow between steps. `revert` restores the optimizer, with wide states.

    Raises `ApplyFailed` for an optimizer that does not update each element independently, or has step hooks.
    """

    def __init__(self, where: str, optimizer: torch.optim.Optimizer, form: StateFormat) -> None:
        refuse(where, optimizer)
        self._optimizer = optimizer
        self._form = form
        self._before: dict[torch.Tensor, State] = {
            parameter: _on_host({key: value for key, value in state.items() if form.fits(value)})
            for parameter, state in optimizer.state.items()
        }
        self._own = OwnStep(where, optimizer, self._run, self._whole)
        self._saved = _StateDictHooks(optimizer, form)
        _narrow_all(optimizer, form, _seeds(optimizer), {})

    def revert(self) -> None:
        """Restore the optimizer. If it has not stepped, its states are restored bit for bit."""
        self._own.revert()
        self._saved.revert()
        _widen_all(self._optimizer, self._form)
        for parameter, state in self._before.items():
            for key, value in state.items():
                self._optimizer.state[parameter][key] = value.to(parameter.device)
        self._before.clear()

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        self._before.clear()
        seeds = _seeds(self._optimizer)
        kept = _widen_all(self._optimizer, self._form)
        yield
        _narrow_all(self._optimizer, self._form, seeds, kept)

    def _run(self, step: Callable[[], Any]) -> None:
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

    def __init__(self, where: str, optimizer: torch.optim.Optimizer, form: StateFormat) -> None:
        seeds = dict(_seeds(optimizer))
        kept: dict[torch.Tensor, Mapping[str, Tensors]] = {}

        def before(*_: Any) -> None:
            seeds.update(_seeds(optimizer))
            kept.update(_widen_all(optimizer, form))

        def after(*_: Any) -> None:
            _narrow_all(optimizer, form, seeds, kept)
            kept.clear()

        after()
        self._hooks = Hooked(
            optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)
        )
        self._saved = _StateDictHooks(optimizer, form)
        self._wide = functools.partial(_widen_all, optimizer, form)

    def revert(self) -> None:
        """Remove the hooks."""
        self._hooks.revert()
        self._saved.revert()
        self._wide()


class _StateDictHooks(Hooked):
    """Hooks on saving and loading an optimizer: states are saved wide, with the narrow ones beside them."""

    def __init__(self, optimizer: torch.optim.Optimizer, form: StateFormat) -> None:
        self._form = form
        self._coming: Any = None
        super().__init__(
            optimizer.register_state_dict_post_hook(self._saves),
            optimizer.register_load_state_dict_pre_hook(self._comes),
            optimizer.register_load_state_dict_post_hook(self._loaded),
        )

    def _saves(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        parameters = list(parameters_of(optimizer))
        wide = {number: _on_host(state) for number, state in saved["state"].items()}
        kept = {number: _widen(self._form, wide[number], parameters[number]) for number in wide}
        beside = {"states": self._form.name, "state": kept}
        return {**saved, "state": wide, _BESIDE: beside}

    def _comes(self, _: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        self._coming = saved.get(_BESIDE)

    def _loaded(self, optimizer: torch.optim.Optimizer) -> None:
        """Narrow the loaded states: to the narrow states saved with them, if they belong together."""
        coming, self._coming = self._coming, None
        ours = isinstance(coming, dict) and coming.get("states") == self._form.name
        beside = coming.get("state") if ours else None
        seeds = _seeds(optimizer)
        for number, parameter in enumerate(parameters_of(optimizer)):
            state = optimizer.state.get(parameter, {})
            kept = beside.get(number) if isinstance(beside, dict) else None
            if isinstance(kept, dict):
                _restore_narrow(self._form, state, kept, parameter)
            _narrow(self._form, state, {}, seeds[parameter])


_BESIDE = "low_bit_states"


def _restore_narrow(
    form: StateFormat, state: State, kept: Mapping[str, Any], parameter: torch.Tensor
) -> None:
    """Replace wide states by the saved narrow ones, if these widen to the same values."""
    for key, tensors in kept.items():
        if key not in state or not _may_be_narrow(form, tensors, state[key]):
            continue
        here = [tensor.to(parameter.device) for tensor in tensors]
        if torch.equal(form.widened(key, here, parameter), state[key]):
            del state[key]
            state.update(_by_state_name(form, key, here))


def _may_be_narrow(form: StateFormat, tensors: Any, wide: torch.Tensor) -> bool:
    if not form.fits(wide) or not isinstance(tensors, (tuple, list)):
        return False
    flat = [one for one in tensors if isinstance(one, torch.Tensor) and one.dim() == 1]
    kinds = tuple((tensor.dtype, tensor.numel()) for tensor in flat)
    return len(flat) == len(tensors) and kinds == form.kinds(wide.numel())


def _by_state_name(form: StateFormat, key: str, kept: Tensors) -> State:
    return {f"{key}_{suffix}": one for suffix, one in zip(form.suffixes, kept, strict=True)}


def _widen(form: StateFormat, state: State, like: torch.Tensor) -> dict[str, Tensors]:
    found: dict[str, Tensors] = {}
    last = f"_{form.suffixes[0]}"
    for key in [name.removesuffix(last) for name in state if name.endswith(last)]:
        found[key] = [state.pop(f"{key}_{suffix}") for suffix in form.suffixes]
        state[key] = form.widened(key, found[key], like)
    return found


def _narrow(form: StateFormat, state: State, kept: Mapping[str, Tensors], seed: int) -> None:
    """Narrow the states of one parameter, into their former narrow tensors if there are any."""
    for key in [name for name, value in state.items() if form.fits(value)]:
        narrow = form.narrowed(key, state.pop(key), kept.get(key, ()), seed)
        state.update(_by_state_name(form, key, narrow))


def _widen_all(optimizer: torch.optim.Optimizer, form: StateFormat) -> AllKept:
    return {one: _widen(form, state, one) for one, state in optimizer.state.items()}


def _narrow_all(
    optimizer: torch.optim.Optimizer, form: StateFormat, seeds: Seeds, kept: AllKept
) -> None:
    """Narrow all states; states that a step left alone, such as of frozen parameters, are as before."""
    for parameter, state in optimizer.state.items():
        _restore_narrow(form, state, kept.get(parameter, {}), parameter)
        _narrow(form, state, {}, seeds.get(parameter, 0))


def _on_host(state: Mapping[str, Any]) -> State:
    return {
        key: value.cpu() if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
    }


def _seeds(optimizer: torch.optim.Optimizer) -> Seeds:
    """Return a seed for each parameter, different in each step."""
    parameters = list(parameters_of(optimizer))
    counts = (state["step"] for state in optimizer.state.values() if "step" in state)
    first = int(next(counts, 0)) * len(parameters)
    return {parameter: 2 * (first + n) for n, parameter in enumerate(parameters)}


@contextlib.contextmanager
def _random(device: torch.device, seed: int) -> Iterator[None]:
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _pieces(flat: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    size = _PIECE.get(flat.device.type, _LARGE_PIECE)
    for begin in range(0, flat.numel(), size):
        end = min(begin + size, flat.numel())
        yield slice(begin, end), slice(begin // BLOCK, end // BLOCK)
