"""Learns from one batch whether a module may run in parts of it: what mixes samples, what draws random
numbers, how its results come together. As many samples as two parts have are run together, with others in
place of half of them, and in two halves; nothing of that stays."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from torchtrim import capture as observe
from torchtrim.capture.recording import tensors_in
from torchtrim.errors import ApplyFailed
from torchtrim.executor.block_state import BlockState
from torchtrim.executor.ordinals import Counting
from torchtrim.techniques.micro_batch.draws import SHARED, Drawn, Draws, can_be_split
from torchtrim.techniques.micro_batch.inputs import Ambient, Given
from torchtrim.techniques.micro_batch.losses import Losses
from torchtrim.techniques.micro_batch.rows import Along, Rows, apart, order_of, split_dim
from torchtrim.techniques.micro_batch.tree import leaves_of

SUM, SAME = -1, -2
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_NEAR = {torch.float64: 1e-6, torch.float32: 1e-3}
_NEAR_SUM = {torch.float64: 1e-10, torch.float32: 2e-5}
_NARROW = 5e-2

Forward = Callable[..., Any]
Kept = dict[tuple[str, str], tuple[torch.Tensor, ...]]


class Facts(NamedTuple):
    """`outputs`: of each tensor that comes out the dimension along which samples are, `SUM` for a number
    that adds up over them, `SAME` for what they share. `graded`: it depends on parameters. `draws`: as
    `Draws` wants them. `losses`: whether each mean is one of the batch's samples. `orders`: of what comes
    out, as in `Along`. `scales`: where all means divide by the same, numbers may be divided at the end.
    `second`: samples are along the second dimension of what goes in. `times`: of what comes out how often
    all samples come, one time after the other. `operators`: how many run for them at once, by name."""

    outputs: tuple[int, ...]
    graded: tuple[bool, ...]
    draws: tuple[Along, ...]
    losses: tuple[bool, ...]
    orders: tuple[tuple[int, ...], ...]
    times: tuple[int, ...]
    operators: Counter[str]
    scales: bool = False
    second: bool = False


class Run(NamedTuple):
    """A run of the module: its leaves, what was drawn, by what means divide, what modules hold, how many
    operators run."""

    leaves: list[Any]
    drawn: Drawn
    counts: list[torch.Tensor]
    kept: Kept
    operators: Counter[str]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The leaves that are tensors."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]


class Study:
    """One module, given one batch. Raises `ApplyFailed` where it may not run in parts."""

    def __init__(
        self,
        where: str,
        module: nn.Module,
        forward: Forward,
        given: Given,
        parts: int,
        state: BlockState,
    ) -> None:
        self._where = where
        self._state = state
        self._forward = forward
        self._given = given
        self._modules = [(name, inner) for name, inner in module.named_modules()]
        self._half = min(-(-given.size // parts), given.size // 2)
        self._tensors = [given.leaves[n].detach() for n in given.tensors]
        self._ambient = Ambient(self._tensors)

    def facts(self) -> Facts:
        """What is to be known of running it in parts."""
        self._check_modules()
        whole = self._watched()
        self._check_apart(whole)
        halves = [self._guarded(rows) for rows in self._halves]
        self._check_kept(whole, halves)
        draws = self._draws(whole, halves[0])
        losses = self._losses(whole, halves)
        outputs, graded = self._outputs(whole, halves[0]), self._graded(whole)
        orders = tuple(map(order_of, whole.tensors))
        second = self._given.times > 1
        times = (1,) * len(outputs)
        found = Facts(outputs, graded, draws, losses, orders, times, whole.operators, second=second)
        found = found._replace(times=self._equal_times(found, whole))
        return found._replace(scales=self._scales(found, whole))

    def _refused(self, reason: str) -> ApplyFailed:
        return ApplyFailed(f"`{self._where}` cannot run in parts of the batch: {reason}")

    def _name(self, name: str) -> str:
        return f"`{self._where}.{name}`" if name else f"`{self._where}`"

    def _check_modules(self) -> None:
        for name, inner in self._modules:
            if _takes_statistics(inner):
                raise self._refused(
                    f"{self._name(name)} is a {type(inner).__name__} in training mode, which takes its "
                    "statistics over all samples. `--allow semantic=replace_norm` has the plan replace it by "
                    "GroupNorm; or freeze it with .eval()."
                )
            if (
                inner._forward_hooks
                or inner._forward_pre_hooks
                or inner._backward_hooks
                or inner._backward_pre_hooks
            ):
                raise self._refused(
                    f"{self._name(name)} has hooks, which would be called for each part."
                )
            for key, parameter in inner.named_parameters(recurse=False):
                if has_gradient_hooks(parameter):
                    raise self._refused(
                        f"{self._name(name)} has a hook on the gradient of its {key}, which would see each "
                        "part's. Take one of the two out; optimizer_in_backward is such a hook."
                    )

    def _watched(self) -> Run:
        """The samples together, seeing what the module leaves behind."""
        before = {key: value.clone() for key, value in self._buffers()}
        versions = [t._version for t in self._tensors]
        run = self._run(self._rows(0, 2 * self._half))
        for key, value in self._buffers():
            if not torch.equal(value, before[key]):
                for other, now in self._buffers():
                    now.copy_(before[other])
                raise self._refused(
                    f"its buffer {key} changes in forward, and would change with each part."
                )
        if versions != [t._version for t in self._tensors]:
            raise self._refused("it changes its input in place, and would do so twice.")
        return run

    def _check_kept(self, whole: Run, halves: Sequence[Run]) -> None:
        """What modules hold after forward must be the same for any samples, as a mask is."""
        held = self._kept()
        for at, tensors in whole.kept.items():
            others = [run.kept.get(at, ()) for run in halves]
            if _same(held.get(at, ()), tensors):
                continue
            if not all(_shared(tensors, other) for other in others):
                raise self._refused(
                    f"{self._name(at[0])} keeps tensors of its forward in `self.{at[1]}`, which would be of "
                    "one part. Return them instead."
                )

    def _check_apart(self, whole: Run) -> None:
        """Samples of the first half must not change when the second half is of other samples."""
        other = self._run(self._mixed())
        if self._differ(whole, other):
            place = self._mixing()
            raise self._refused(
                f"{place} mixes samples: what it gives for some changes with what the others are. Losses "
                "that compare samples, and statistics over the batch, need all of them at once."
            )

    def _differ(self, whole: Run, other: Run) -> bool:
        return any(
            one.shape == two.shape and not _near(first, second, 1e-5)
            for one, two in zip(whole.tensors, other.tensors, strict=True)
            for first, second in [self._first_half(one, two)]
        )

    def _first_half(
        self, one: torch.Tensor, two: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of the first half, where the first dimension is the batch's, or the second."""
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
        """The first module whose result of the first half is another."""
        firsts = [self._noted(leaves) for leaves in (self._rows(0, 2 * self._half), self._mixed())]
        for (name, one), (_, two) in zip(*firsts, strict=False):
            if one.shape == two.shape and not _near(one, two, 1e-5):
                return self._name(name)
        return f"`{self._where}`"

    def _noted(self, leaves: Sequence[Any]) -> list[tuple[str, torch.Tensor]]:
        """What each module without children gives for the first half."""
        noted: list[tuple[str, torch.Tensor]] = []

        def note(name: str, output: Any) -> None:
            for tensor in tensors_in(output):
                if tensor.dim():
                    noted.append((name, self._first_half(tensor, tensor)[0].clone()))

        hooks = [
            inner.register_forward_hook(lambda _m, _a, output, name=name: note(name, output))
            for name, inner in self._modules
            if name
        ]
        try:
            self._run(leaves)
        finally:
            for hook in hooks:
                hook.remove()
        return noted

    def _draws(self, whole: Run, half: Run) -> tuple[Along, ...]:
        found = []
        if whole.drawn.names != half.drawn.names:
            raise self._refused("what it draws at random depends on how many samples there are.")
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
                found.append(Along(dim, order))
        return tuple(found)

    def _losses(self, whole: Run, halves: Sequence[Run]) -> tuple[bool, ...]:
        counts = [run.counts for run in (whole, *halves)]
        if len({len(one) for one in counts}) != 1:
            raise self._refused("how many means it takes depends on how many samples there are.")
        return tuple(
            bool(torch.isclose(all_, one + two, rtol=1e-6))
            for all_, one, two in zip(*counts, strict=True)
        )

    def _outputs(self, whole: Run, half: Run) -> tuple[int, ...]:
        if len(whole.leaves) != len(half.leaves):
            raise self._refused("what it returns depends on how many samples there are.")
        found = []
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
            found.append(dim if dim >= 0 else SAME if torch.equal(all_, part) else SUM)
            if found[-1] == SUM and all_.dim():
                raise self._refused(
                    f"it returns a tensor of {tuple(all_.shape)} that sums samples up."
                )
        return tuple(found)

    def _check_plain(self, all_: Any, part: Any) -> None:
        if not isinstance(all_, _PLAIN):
            raise self._refused(
                f"it returns a {type(all_).__name__}, which cannot be put together of parts. Where that is "
                "a cache, call it with use_cache=False."
            )
        if all_ != part:
            raise self._refused(f"it returns {all_!r}, a number that depends on the samples.")

    def _graded(self, whole: Run) -> tuple[bool, ...]:
        """Which results have gradients."""
        rows = Rows(0, self._half, 2 * self._half)
        tensors = [t.detach() for t in self._tensors]
        for number, tensor in zip(self._given.tensors, tensors, strict=True):
            tensor.requires_grad_(self._given.leaves[number].requires_grad)
        leaves = self._given.part(rows._replace(whole=self._given.size), tensors)
        run = self._run(leaves, graded=True)
        self._check_no_gradients_kept(run)
        made = run.tensors
        assert len(made) == len(whole.tensors)
        if whole.drawn.names:
            self._check_backward([t for t in made if t.requires_grad])
        return tuple(t.requires_grad for t in made)

    def _check_no_gradients_kept(self, run: Run) -> None:
        held = self._kept()
        for at, tensors in run.kept.items():
            if any(t.requires_grad for t in tensors) and not _same(held.get(at, ()), tensors):
                raise self._refused(
                    f"{self._name(at[0])} keeps a tensor with gradients in `self.{at[1]}`, which would have "
                    "none. Return it instead."
                )

    def _check_backward(self, made: list[torch.Tensor]) -> None:
        """Backward must draw nothing once more, as a checkpoint of the program's own does."""
        parameters = [p for _, inner in self._modules for p in inner.parameters(recurse=False)]
        trained = [p for p in parameters if p.requires_grad]
        if not trained or not made:
            return
        zeros = [torch.zeros_like(t) for t in made]
        try:
            with self._ambient.aside(), Drawn() as drawn:
                torch.autograd.grad(made, trained, zeros, allow_unused=True)
        except RuntimeError as error:
            raise self._refused(f"its backward fails by itself: {error}") from error
        if drawn.names:
            raise self._refused(
                f"its backward draws random numbers once more ({drawn.names[0]}), as a checkpoint does, and "
                "a part cannot get its own there. Take the checkpoint out, since parts need none."
            )

    def _equal_times(self, facts: Facts, whole: Run) -> tuple[int, ...]:
        """The halves together must be what the samples are together; how often these come in each."""
        found = [1] * len(facts.outputs)
        halves = [self._guarded(rows, facts, whole.counts) for rows in self._halves]
        for number, (dim, all_) in enumerate(zip(facts.outputs, whole.tensors, strict=True)):
            parts = [run.tensors[number] for run in halves]
            if dim == SUM and not _near(parts[0] + parts[1], all_, _bound(_NEAR_SUM, all_)):
                raise self._refused(
                    "it returns a number that is neither a sum over samples nor torch's own mean of them "
                    f"({float(all_):.6g} of all, {float(parts[0] + parts[1]):.6g} of two parts), so what "
                    "each part counts for is not known. Take the loss outside, or with reduction='sum'."
                )
            if dim >= 0:
                found[number] = self._times(parts, all_, dim)
        return tuple(found)

    def _times(self, parts: Sequence[torch.Tensor], all_: torch.Tensor, dim: int) -> int:
        """How often all samples come in a result along a dimension, one time after the other."""
        for times in {1: None, self._given.times: None}:
            if all_.shape[dim] % (times * 2 * self._half) == 0:
                halves = [apart(part, dim, times) for part in parts]
                joined = torch.cat(halves, dim + 1).flatten(dim, dim + 1)
                if _near(joined, all_, _bound(_NEAR, all_)):
                    return times
        raise self._refused(
            "what it gives for a part is not what it gives for those samples among all."
        )

    def _scales(self, facts: Facts, whole: Run) -> bool:
        """Whether the numbers are sums of the parts' sums, all divided by what the first mean divides by."""
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
    def _halves(self) -> list[Rows]:
        return [Rows(f, f + self._half, 2 * self._half) for f in (0, self._half)]

    def _guarded(
        self, rows: Rows, facts: Facts | None = None, totals: Sequence[torch.Tensor] | None = None
    ) -> Run:
        """A run of a part, whose errors are reported."""
        leaves = self._rows(rows.first, rows.last)
        try:
            if facts is None:
                return self._run(leaves)
            with Draws(facts.draws, rows) if facts.draws else contextlib.nullcontext():
                return self._run(leaves, losses=Losses(facts.losses, totals))
        except Exception as error:
            raise self._refused(
                f"its forward on {rows.number} samples fails: {type(error).__name__}: {error}"
            ) from error

    def _rows(self, first: int, last: int) -> list[Any]:
        return self._given.part(Rows(first, last, self._given.size), self._tensors)

    def _mixed(self) -> list[Any]:
        """The first half, and in place of the second the first again, the last sample first."""
        leaves = self._rows(0, self._half)
        for number, dim in self._given.batched.items():
            leaves[number] = torch.cat((leaves[number], leaves[number].flip(dim)), dim)
        self._given.pair(leaves)
        return leaves

    def _run(
        self, leaves: Sequence[Any], *, graded: bool = False, losses: Losses | None = None
    ) -> Run:
        args, kwargs = self._given.arguments(leaves)
        python = self._state.begin(tensors=False)
        losses = losses or Losses()
        with self._ambient.aside(), python.again(), self._ambient.again(graded=graded):
            self._ambient.rewind()
            with Drawn() as drawn, Counting() as counting, losses:
                found = leaves_of(self._forward(*args, **kwargs))
            return Run(found, drawn, losses.counts, self._kept(), counting.counts)

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, inner in self._modules:
            for key, buffer in inner._buffers.items():
                if buffer is not None:
                    yield f"{name}.{key}".lstrip("."), buffer

    def _kept(self) -> Kept:
        """The tensors that modules hold beside parameters and buffers."""
        return {
            (name, key): tuple(tensors_in(value))
            for name, inner in self._modules
            for key, value in vars(inner).items()
            if not key.startswith(("_parameters", "_buffers", "_modules"))
        }


def _same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Whether they are the same objects."""
    return list(map(id, one)) == list(map(id, other))


def _shared(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Whether they have the same values."""
    return len(one) == len(other) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


def _takes_statistics(module: nn.Module) -> bool:
    """Whether it is a BatchNorm in training, and `replace_norm` has not changed it."""
    if not isinstance(module, _BatchNorm) or getattr(module, "keeps_samples_apart", False):
        return False
    return module.training or module.running_mean is None


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Whether somebody other than who records the step hears of its gradient."""
    after: Any = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    theirs = [hook for hook in after.values() if not _records(hook)]
    return bool(parameter._backward_hooks or theirs)


def _records(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(observe.__name__)


def _bound(bounds: dict[torch.dtype, float], tensor: torch.Tensor) -> float:
    return bounds.get(tensor.dtype, _NARROW) if tensor.is_floating_point() else 0.0


def _near(one: torch.Tensor, two: torch.Tensor, bound: float) -> bool:
    """Whether two tensors differ by no more than a share of the largest magnitude."""
    if not one.is_floating_point():
        return torch.equal(one, two)
    if not one.numel():
        return True
    same = torch.nan_to_num(one.double() - two.double()).abs().max()
    return bool(same <= bound * torch.nan_to_num(two.double()).abs().max())
