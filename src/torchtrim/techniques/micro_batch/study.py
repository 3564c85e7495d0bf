"""Studies one batch to find out whether a module may run in parts.

Detects mixing of samples and random numbers, and finds how results are joined. Runs as many samples as two
parts have: together, with other samples in the second half, and in halves. All side effects are undone.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from torchtrim import capture as observe
from torchtrim.capture.modules import HOOKS
from torchtrim.capture.recording import tensors_in
from torchtrim.errors import ApplyFailed
from torchtrim.executor.arguments import GivenArguments
from torchtrim.executor.block_state import BlockState
from torchtrim.executor.ordinals import Counting
from torchtrim.techniques.micro_batch.draws import SHARED, DrawRecorder, Draws, can_be_split
from torchtrim.techniques.micro_batch.inputs import Ambient, CallArguments
from torchtrim.techniques.micro_batch.losses import Losses
from torchtrim.techniques.micro_batch.rows import (
    SampleLayout,
    SampleRows,
    apart,
    leaves_of,
    order_of,
    split_dim,
)

SUM, SAME = -1, -2
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_NEAR = {torch.float64: 1e-6, torch.float32: 1e-3}  # Arbitrary: far above rounding of one layer.
_NEAR_SUM = {torch.float64: 1e-10, torch.float32: 2e-5}  # Arbitrary: rounding of a long sum.
_NARROW = 5e-2  # Arbitrary: a bound for float16 and bfloat16, some units in their last place.

Forward = Callable[..., Any]
Kept = dict[tuple[str, str], tuple[torch.Tensor, ...]]


class StudyResult(NamedTuple):
    """How a module runs in parts.

    `outputs`: batch dimension of each output tensor, `SUM` for a number that adds up, `SAME` for one that
    samples share. `graded`: outputs that depend on parameters. `draws`: layouts for `Draws`. `losses`: for
    each mean, True if it is over the samples. `orders`: as in `SampleLayout`.
    `scales`: True if all means have the same divisor, so numbers may be divided at the end. `second`: samples
    are along the second dimension of the inputs. `times`: how often the batch repeats in each output, one
    time step after another. `operators`: operator counts of one run, by name.
    """

    outputs: tuple[int, ...]
    graded: tuple[bool, ...]
    draws: tuple[SampleLayout, ...]
    losses: tuple[bool, ...]
    orders: tuple[tuple[int, ...], ...]
    times: tuple[int, ...]
    operators: Counter[str]
    scales: bool = False
    second: bool = False


class StudyRun(NamedTuple):
    """A run: its leaves, random draws, divisors of means, tensors on modules, and operator counts."""

    leaves: list[Any]
    drawn: DrawRecorder
    counts: list[torch.Tensor]
    kept: Kept
    operators: Counter[str]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Leaves that are tensors."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]


class Study:
    """Trial of one module on one batch. Raises `ApplyFailed` if it may not run in parts."""

    def __init__(
        self,
        where: str,
        module: nn.Module,
        forward: Forward,
        given: CallArguments,
        parts: int,
        state: BlockState,
    ) -> None:
        self._where = where
        self._state = state
        self._forward = forward
        self._given = given
        self._generators = GivenArguments(given.tree).generators
        self._modules = [*module.named_modules()]
        self._half = min(-(-given.size // parts), given.size // 2)
        self._tensors = [given.leaves[n].detach() for n in given.tensors]
        self._ambient = Ambient(self._tensors)

    def facts(self) -> StudyResult:
        """Return what running the module in parts requires."""
        try:
            return self._found()
        except ApplyFailed:
            raise
        except Exception as error:  # of the module's own code, which may count its samples
            raise self._failing(2 * self._half, error) from error

    def _found(self) -> StudyResult:
        self._check_modules()
        whole = self._watched()
        self._check_apart(whole)
        halves = [self._guarded(rows) for rows in self._halves]
        self._check_kept(whole, halves)
        draws = self._draws(whole, halves[0])
        losses = self._losses(whole, halves)
        outputs = self._outputs(whole, halves[0])
        facts = StudyResult(
            outputs,
            self._graded(whole),
            draws,
            losses,
            orders=tuple(map(order_of, whole.tensors)),
            times=(1,) * len(outputs),
            operators=whole.operators,
            second=self._given.times > 1,
        )
        facts = facts._replace(times=self._equal_times(facts, whole))
        return facts._replace(scales=self._scales(facts, whole))

    def _refused(self, reason: str) -> ApplyFailed:
        return ApplyFailed(f"`{self._where}` cannot run in parts of the batch: {reason}")

    def _name(self, name: str) -> str:
        return f"`{self._where}.{name}`" if name else f"`{self._where}`"

    def _check_modules(self) -> None:
        for name, inner in self._modules:
            if _takes_statistics(inner):
                raise self._refused(
                    f"{self._name(name)} is a {type(inner).__name__} in training mode, which takes "
                    "statistics over all samples. Pass `--allow semantic=replace_norm` to replace it "
                    "by GroupNorm, or freeze it with .eval()."
                )
            if any(getattr(inner, hooks) for hooks in HOOKS):
                raise self._refused(
                    f"{self._name(name)} has hooks, which would be called for each part."
                )
            for key, parameter in inner.named_parameters(recurse=False):
                if has_gradient_hooks(parameter):
                    raise self._refused(
                        f"{self._name(name)} has a hook on the gradient of its {key}, which would see the "
                        "gradient of each part. Remove the hook or micro_batch; optimizer_in_backward uses "
                        "such hooks."
                    )

    def _watched(self) -> StudyRun:
        before = {key: (value, value.clone()) for key, value in self._buffers()}
        versions = [t._version for t in self._tensors]
        run = self._run(self._rows(0, 2 * self._half))
        for key, value in self._buffers():
            if key not in before or not torch.equal(value, before[key][1]):
                self._restore(before)
                raise self._refused(
                    f"its buffer {key} changes in forward, and would change with each part."
                )
        if versions != [t._version for t in self._tensors]:
            raise self._refused("it changes its input in place, which a rerun would repeat.")
        return run

    def _restore(self, before: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Restore the buffers, which a run may have written, replaced or registered."""
        (_, root), *_ = self._modules
        for path, _ in [*self._buffers()]:
            owner, _, name = path.rpartition(".")
            buffers = root.get_submodule(owner)._buffers
            if path in before:
                value, then = before[path]
                buffers[name] = value.copy_(then)
            else:
                del buffers[name]

    def _check_kept(self, whole: StudyRun, halves: Sequence[StudyRun]) -> None:
        """Require that tensors held by modules after forward, such as masks, are the same for any samples."""
        for at, tensors in self._new(whole):
            if not all(_shared(tensors, run.kept.get(at, ())) for run in halves):
                raise self._refused(
                    f"{self._name(at[0])} keeps tensors of its forward in `self.{at[1]}`, which would "
                    "hold only one part. Return them instead."
                )

    def _new(self, run: StudyRun) -> Iterator[tuple[tuple[str, str], tuple[torch.Tensor, ...]]]:
        held = self._kept()
        for at, tensors in run.kept.items():
            if list(map(id, held.get(at, ()))) != list(map(id, tensors)):
                yield at, tensors

    def _check_apart(self, whole: StudyRun) -> None:
        """Require that the first half does not change when the second half does."""
        other = self._run(self._mixed())
        for one, two in zip(whole.tensors, other.tensors, strict=True):
            if one.shape == two.shape and not _near(*self._first_half(one, two), 1e-5):
                raise self._refused(
                    f"{self._mixing()} mixes samples: its result for some samples changes with the others. "
                    "Losses that compare samples, and batch statistics, need all samples at once."
                )

    def _first_half(
        self, one: torch.Tensor, two: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        both, times = 2 * self._half, self._given.times
        if times > 1 and one.dim() and one.shape[0] == times * both:
            one, two = (apart(tensor, 0, times) for tensor in (one, two))
        if times > 1 and one.dim() > 1 and one.shape[1] == both:
            return one[:, : self._half], two[:, : self._half]
        if one.dim() == 3 and one.shape[1] == both != one.shape[0]:
            return one[:, : self._half], two[:, : self._half]
        if not one.dim() or one.shape[0] % both:
            return one.new_empty(0), two.new_empty(0)
        count = one.shape[0] // 2
        return one[:count], two[:count]

    def _mixing(self) -> str:
        firsts = [self._noted(leaves) for leaves in (self._rows(0, 2 * self._half), self._mixed())]
        differing = (
            name
            for (name, one), (_, two) in zip(*firsts, strict=False)
            if one.shape == two.shape and not _near(one, two, 1e-5)
        )
        return self._name(next(differing, ""))

    def _noted(self, leaves: Sequence[Any]) -> list[tuple[str, torch.Tensor]]:
        noted: list[tuple[str, torch.Tensor]] = []

        def note(name: str, output: Any) -> None:
            for tensor in tensors_in(output):
                if tensor.dim():
                    noted.append((name, self._first_half(tensor, tensor)[0].clone()))

        with contextlib.ExitStack() as hooks:
            for name, inner in self._modules[1:]:
                hook = inner.register_forward_hook(lambda _m, _a, made, name=name: note(name, made))
                hooks.callback(hook.remove)
            self._run(leaves)
        return noted

    def _draws(self, whole: StudyRun, half: StudyRun) -> tuple[SampleLayout, ...]:
        layouts = []
        if whole.drawn.names != half.drawn.names:
            raise self._refused("the random numbers it draws depend on the number of samples.")
        drawn = whole.drawn
        for name, part, all_, order in zip(
            drawn.names, half.drawn.shapes, drawn.shapes, drawn.orders, strict=True
        ):
            dim = split_dim(part, all_, 2)
            if dim is None or (dim != SHARED and not can_be_split(name)):
                raise self._refused(
                    f"{name} draws random numbers for all samples at once, and a part cannot get its own."
                )
            if can_be_split(name):
                layouts.append(SampleLayout(dim, order))
        return tuple(layouts)

    def _losses(self, whole: StudyRun, halves: Sequence[StudyRun]) -> tuple[bool, ...]:
        counts = [run.counts for run in (whole, *halves)]
        if len({len(one) for one in counts}) != 1:
            raise self._refused("the number of means it takes depends on the number of samples.")
        return tuple(
            bool(torch.isclose(all_, one + two, rtol=1e-6))
            for all_, one, two in zip(*counts, strict=True)
        )

    def _outputs(self, whole: StudyRun, half: StudyRun) -> tuple[int, ...]:
        if len(whole.leaves) != len(half.leaves):
            raise self._refused("the structure of its result depends on the number of samples.")
        dims = []
        for all_, part in zip(whole.leaves, half.leaves, strict=True):
            if not isinstance(all_, torch.Tensor):
                self._check_plain(all_, part)
                continue
            dim = split_dim(tuple(part.shape), tuple(all_.shape), 2)
            if dim is None:
                raise self._refused(
                    f"it returns a tensor of {tuple(all_.shape)} for {2 * self._half} samples and of "
                    f"{tuple(part.shape)} for {self._half}."
                )
            dims.append(dim if dim >= 0 else SAME if torch.equal(all_, part) else SUM)
            if dims[-1] == SUM and all_.dim():
                raise self._refused(
                    f"it returns a tensor of {tuple(all_.shape)} that sums over samples."
                )
        return tuple(dims)

    def _check_plain(self, all_: Any, part: Any) -> None:
        if not isinstance(all_, _PLAIN):
            raise self._refused(
                f"it returns a {type(all_).__name__}, which cannot be joined from parts. If it is a "
                "cache, call the module with use_cache=False."
            )
        if all_ != part:
            raise self._refused(f"it returns {all_!r}, a number that depends on the samples.")

    def _graded(self, whole: StudyRun) -> tuple[bool, ...]:
        tensors = [t.detach() for t in self._tensors]
        for number, tensor in zip(self._given.tensors, tensors, strict=True):
            tensor.requires_grad_(self._given.leaves[number].requires_grad)
        leaves = self._given.part(SampleRows(0, self._half, self._given.size), tensors)
        run = self._run(leaves, graded=True)
        for at, held in self._new(run):
            if any(t.requires_grad for t in held):
                raise self._refused(
                    f"{self._name(at[0])} keeps a tensor with gradients in `self.{at[1]}`, which would "
                    "have no gradients. Return it instead."
                )
        made = run.tensors
        assert len(made) == len(whole.tensors)
        if whole.drawn.names:
            self._check_backward([t for t in made if t.requires_grad])
        return tuple(t.requires_grad for t in made)

    def _check_backward(self, made: list[torch.Tensor]) -> None:
        (_, root), *_ = self._modules
        trained = [p for p in root.parameters() if p.requires_grad]
        if not trained or not made:
            return
        zeros = [torch.zeros_like(t) for t in made]
        try:
            with self._ambient.aside(), DrawRecorder() as drawn:
                torch.autograd.grad(made, trained, zeros, allow_unused=True)
        except RuntimeError as error:
            raise self._refused(f"its backward fails by itself: {error}") from error
        if drawn.names:
            raise self._refused(
                f"its backward draws random numbers ({drawn.names[0]}), as a checkpoint does, and a "
                "part cannot get its own there. Take the checkpoint out; parts do not need it."
            )

    def _equal_times(self, facts: StudyResult, whole: StudyRun) -> tuple[int, ...]:
        """Require joined halves to equal the whole. Return how often the batch repeats in each output."""
        repeats = [1] * len(facts.outputs)
        halves = [self._guarded(rows, facts, whole.counts) for rows in self._halves]
        for number, (dim, all_) in enumerate(zip(facts.outputs, whole.tensors, strict=True)):
            parts = [run.tensors[number] for run in halves]
            if dim == SUM and not _near(parts[0] + parts[1], all_, _bound(_NEAR_SUM, all_)):
                raise self._refused(
                    "it returns a number that is neither a sum over samples nor torch's own mean of "
                    f"them ({float(all_):.6g} of all, {float(parts[0] + parts[1]):.6g} of two parts), "
                    "so the weight of each part is unknown. Take the loss outside, or use reduction='sum'."
                )
            if dim >= 0:
                repeats[number] = self._times(parts, all_, dim)
        return tuple(repeats)

    def _times(self, parts: Sequence[torch.Tensor], all_: torch.Tensor, dim: int) -> int:
        for times in {1: None, self._given.times: None}:
            if all_.shape[dim] % (times * 2 * self._half) == 0:
                halves = [apart(part, dim, times) for part in parts]
                joined = torch.cat(halves, dim + 1).flatten(dim, dim + 1)
                if _near(joined, all_, _bound(_NEAR, all_)):
                    return times
        raise self._refused(
            "its result for a part differs from its result for the same samples in the whole batch."
        )

    def _scales(self, facts: StudyResult, whole: StudyRun) -> bool:
        """Return True if the numbers are sums over parts that share the divisor of the first mean."""
        totals = [t for t, split in zip(whole.counts, facts.losses, strict=True) if split]
        if not totals or not all(bool(t == totals[0]) for t in totals):
            return False
        one, two = (self._guarded(rows, facts) for rows in self._halves)
        return all(
            _near((a + b) / totals[0].to(all_.dtype), all_, _bound(_NEAR_SUM, all_))
            for dim, all_, a, b in zip(
                facts.outputs, whole.tensors, one.tensors, two.tensors, strict=True
            )
            if dim == SUM
        )

    @property
    def _halves(self) -> list[SampleRows]:
        return [SampleRows(f, f + self._half, 2 * self._half) for f in (0, self._half)]

    def _guarded(
        self,
        rows: SampleRows,
        facts: StudyResult | None = None,
        totals: Sequence[torch.Tensor] | None = None,
    ) -> StudyRun:
        leaves = self._rows(rows.first, rows.last)
        try:
            if facts is None:
                return self._run(leaves)
            with Draws(facts.draws, rows) if facts.draws else contextlib.nullcontext():
                return self._run(leaves, losses=Losses(facts.losses, totals))
        except Exception as error:
            raise self._failing(rows.number, error) from error

    def _failing(self, number: int, error: Exception) -> ApplyFailed:
        said = f"{type(error).__name__}: {error}"
        return self._refused(f"its forward on {number} samples fails: {said}")

    def _rows(self, first: int, last: int) -> list[Any]:
        return self._given.part(SampleRows(first, last, self._given.size), self._tensors)

    def _mixed(self) -> list[Any]:
        """Return the batch with its second half replaced by the first, in reverse."""
        leaves = self._rows(0, self._half)
        for number, dim in self._given.batched.items():
            leaves[number] = torch.cat((leaves[number], leaves[number].flip(dim)), dim)
        self._given.pair(leaves)
        return leaves

    def _run(
        self, leaves: Sequence[Any], *, graded: bool = False, losses: Losses | None = None
    ) -> StudyRun:
        args, kwargs = self._given.arguments(leaves)
        python = self._state.begin(tensors=False, generators=self._generators)
        losses = losses or Losses()
        with (
            self._ambient.aside(),
            python.again(),
            self._ambient.again(graded=graded),
            _without_hooks() if graded else contextlib.nullcontext(),
        ):
            self._ambient.rewind()
            with DrawRecorder() as drawn, Counting() as counting, losses:
                found = leaves_of(self._forward(*args, **kwargs))
            return StudyRun(found, drawn, losses.counts, self._kept(), counting.counts)

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        (_, root), *_ = self._modules
        yield from root.named_buffers(remove_duplicate=False)

    def _kept(self) -> Kept:
        return {
            (name, key): tuple(tensors_in(value))
            for name, inner in self._modules
            for key, value in vars(inner).items()
            if not key.startswith(("_parameters", "_buffers", "_modules"))
        }


def _without_hooks() -> contextlib.AbstractContextManager[Any]:
    """Hide saved tensors from hooks that the program has set, such as a checkpoint's."""
    return torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, lambda kept: kept)


def _shared(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


def _takes_statistics(module: nn.Module) -> bool:
    """Return True for a training BatchNorm unless `replace_norm` has changed it."""
    if not isinstance(module, _BatchNorm) or getattr(
        module, "_torchtrim_keeps_samples_apart", False
    ):
        return False
    return module.training or module.running_mean is None


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Return True if anything but the recorder hooks the parameter's gradient."""
    after: Any = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    homes = (str(getattr(hook, "__module__", "")) for hook in after.values())
    return bool(parameter._backward_hooks) or not all(
        home.startswith(observe.__name__) for home in homes
    )


def _bound(bounds: dict[torch.dtype, float], tensor: torch.Tensor) -> float:
    return bounds.get(tensor.dtype, _NARROW) if tensor.is_floating_point() else 0.0


def _near(one: torch.Tensor, two: torch.Tensor, bound: float) -> bool:
    if not one.is_floating_point():
        return torch.equal(one, two)
    if not one.numel():
        return True
    # Not float64, since copies of all samples may need more memory than a part.
    wide = torch.promote_types(one.dtype, torch.float32)
    return _largest(one.to(wide) - two.to(wide)) <= bound * _largest(two.to(wide))


def _largest(tensor: torch.Tensor) -> float:
    return float(torch.nan_to_num(tensor).abs_().max())
