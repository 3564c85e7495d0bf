"""Finds logits that only a cross entropy reads, or a `gather` of one class of each row's log-softmax."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from torchtrim.records.operator_names import base_name
from torchtrim.records.profile import Operator, Profile, TensorUse
from torchtrim.records.remembered import remembered
from torchtrim.step.index import recorded_index
from torchtrim.step.step import Span, Step

_ROWS, _ELEMENTS = 256, 2**20  # Arbitrary: 256 rows keep a GPU busy; 2**20 logits take 4 MiB.


def rows_for(count: int, classes: int) -> int:
    """Return the rows per chunk: enough for fast matrix products, few enough for a small buffer."""
    return max(1, min(count, max(_ROWS, _ELEMENTS // max(classes, 1))))


_PRODUCTS = ("aten::mm", "aten::addmm")
_SOFTMAX = "aten::_log_softmax"
_LOSSES = ("aten::nll_loss_forward", "aten::nll_loss2d_forward")
_GATHER = "aten::gather"
_OF_SMOOTHING = ("aten::sum", "aten::mul")
_COPIES = ("aten::_to_copy", "aten::clone")
_BACKWARD = ("backward", "recompute")


class FoundHead(NamedTuple):
    """Logits of a module. `product`: task that computes them. `copies`: tasks that shift or cast them.

    `loss`: task of the loss after `log_softmax`. `readers`: all forward tasks that create or read any of
    these. `shape`: rows and classes of the loss input. `width`: width of hidden. `number`: number of rows.
    `each`: True if each row has its own gradient.
    """

    where: str
    product: int
    loss: int
    readers: tuple[int, ...]
    hidden: TensorUse
    number: int
    classes: int
    width: int
    biased: bool
    each: bool
    copied: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Rows per chunk."""
        return rows_for(self.number, self.classes)

    @property
    def span(self) -> Span:
        """Span of the task that computes the logits."""
        return Span(self.product, self.product + 1)


def heads_of(step: Step) -> tuple[FoundHead, ...]:
    """Return all heads of a step, in the order of their losses."""
    return _heads_of(step.profile) if step.profile is not None else ()


@remembered
def _heads_of(profile: Profile) -> tuple[FoundHead, ...]:
    finder = _HeadFinder(profile)
    found = (finder.head(index) for index in range(len(profile.operators)))
    return tuple(one for one in found if one is not None)


class _HeadFinder:
    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._operators = profile.operators
        self._users = recorded_index(profile).users

    def head(self, softmax: int) -> FoundHead | None:
        op = self._operators[softmax]
        if base_name(op.name) != _SOFTMAX or op.phase in _BACKWARD:
            return None
        product, family, copies = self._back(op.inputs[0].storage)
        if product < 0:
            return None
        logs = op.outputs[0].storage
        readers = sorted({i for one in (*family, logs) for i in self._forward_users(one)})
        losses = [i for i in readers if self._is_loss(i, logs)]
        if len(losses) != 1 or not all(self._is_known(i, losses[0], family, logs) for i in readers):
            return None
        return self._made(product, losses[0], tuple(readers), tuple(copies))

    def _forward_users(self, storage: int) -> list[int]:
        users = self._users.get(storage, ())
        return [index for index in users if self._operators[index].phase not in _BACKWARD]

    def _back(self, storage: int) -> tuple[int, list[int], list[int]]:
        """Return the product of logits (-1 if unknown), the family of its copies, and their tasks."""
        family, copies = [storage], list[int]()
        while True:
            maker = self._profile.storages[family[-1]].birth
            if maker < 0 or (op := self._operators[maker]).phase in _BACKWARD:
                return -1, family, copies
            if base_name(op.name) in _PRODUCTS:
                return maker, family, copies
            is_copy = base_name(op.name) in _COPIES and len(op.inputs) == 1
            if not is_copy and not self._adds_bias(op):
                return -1, family, copies
            copies.append(maker)
            family.append(op.inputs[0].storage)

    def _adds_bias(self, op: Operator) -> bool:
        """Return True for the bias of a Linear whose input is not contiguous, which torch adds afterwards."""
        if base_name(op.name) != "aten::add" or len(op.inputs) != 2:
            return False
        bias, made = op.inputs[1], op.outputs[0]
        is_parameter = self._profile.storages[bias.storage].kind == "parameter"
        return is_parameter and bias.shape == made.shape[-1:]

    def _is_loss(self, index: int, logs: int) -> bool:
        """Return True for a loss of classes, or a gather of one log probability of each row."""
        op = self._operators[index]
        if base_name(op.name) != _GATHER:
            return base_name(op.name) in _LOSSES
        read, chosen = op.inputs[0], op.inputs[-1]
        return read.storage == logs and chosen.shape == (*read.shape[:-1], 1)

    def _is_known(self, index: int, loss: int, family: list[int], logs: int) -> bool:
        """Return True if a reader of the logits or `logs` is part of the loss, or only moves elements."""
        op = self._operators[index]
        of_logs = logs in {use.storage for use in op.inputs}
        of_class = base_name(self._operators[loss].name) in _LOSSES
        in_loss = of_logs and of_class and base_name(op.name) in _OF_SMOOTHING
        moves = all(use.storage in (*family, logs) for use in op.outputs)
        return not op.mutates and (index == loss or in_loss or moves)

    def _made(
        self, product: int, loss: int, readers: tuple[int, ...], copies: tuple[int, ...]
    ) -> FoundHead | None:
        op, lost = self._operators[product], self._operators[loss]
        hidden, weight = op.inputs[-2:]
        if op.module < 0 or not self._is_weight(weight) or len(lost.inputs) < 2:
            return None
        return FoundHead(
            where=self._profile.modules[op.module].path,
            product=product,
            loss=loss,
            readers=readers,
            hidden=hidden,
            number=prod(lost.inputs[1].shape),
            classes=op.outputs[0].shape[1],
            width=hidden.shape[1],
            biased=len(op.inputs) > 2 or any(self._adds_bias(self._operators[i]) for i in copies),
            each=bool(lost.outputs[0].shape),
            copied=copies,
        )

    def _is_weight(self, use: TensorUse) -> bool:
        storage = self._profile.storages[use.storage]
        if storage.kind == "parameter" or storage.birth < 0:
            return storage.kind == "parameter"
        maker = self._operators[storage.birth]
        copied = base_name(maker.name) == _COPIES[0] and len(maker.inputs) == 1
        return copied and self._profile.storages[maker.inputs[0].storage].kind == "parameter"


def gradient_of(profile: Profile, head: FoundHead) -> tuple[int, Operator | None]:
    """Return the backward task that receives the loss's gradient, or -1, and the operator that created it."""
    for index, op in enumerate(profile.operators):
        if op.phase == "backward" and op.forward == head.loss:
            birth = profile.storages[op.inputs[0].storage].birth
            return index, profile.operators[birth] if birth >= 0 else None
    return -1, None


def family_tasks(profile: Profile, head: FoundHead) -> Iterator[int]:
    """Yield the tasks that no longer run: forward except the loss, and all of backward."""
    forward = set(head.readers)
    yield from sorted(forward - {head.loss})
    for index, op in enumerate(profile.operators):
        if op.phase == "backward" and op.forward in forward:
            yield index
