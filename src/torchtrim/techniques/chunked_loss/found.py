"""Finds logits that only a cross entropy reads, in a profile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torchtrim.records.operator_names import base_name
from torchtrim.records.profile import Operator, Profile, TensorUse
from torchtrim.records.remembered import remembered
from torchtrim.step.index import recorded_index
from torchtrim.step.step import Span, Step
from torchtrim.techniques.chunked_loss.rows import rows_for

_PRODUCTS = ("aten::mm", "aten::addmm")
_SOFTMAX = "aten::_log_softmax"
_LOSSES = ("aten::nll_loss_forward", "aten::nll_loss2d_forward")
_OF_SMOOTHING = ("aten::sum", "aten::mul")
_COPIES = ("aten::_to_copy", "aten::clone")
_BACKWARD = ("backward", "recompute")


class FoundHead(NamedTuple):
    """Logits of a module: `product` makes them, `copies` are tasks that shift or cast them.

    `loss` is the task that takes the loss of `log_softmax`; `readers` are all tasks of forward that make or
    read any of these. `shape` is that of what goes into the loss: rows and classes, `width` that of hidden.
    `number` is how many rows there are. `each`: each has a gradient of its own.
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
        """How many rows are taken at a time."""
        return rows_for(self.number, self.classes)

    @property
    def span(self) -> Span:
        """The task that makes the logits."""
        return Span(self.product, self.product + 1)


def heads_of(step: Step) -> tuple[FoundHead, ...]:
    """All heads of a step, in the order in which their losses are taken."""
    return _heads_of(step.profile) if step.profile is not None else ()


@remembered
def _heads_of(profile: Profile) -> tuple[FoundHead, ...]:
    finder = _HeadFinder(profile)
    found = (finder.head(index) for index in range(len(profile.operators)))
    return tuple(one for one in found if one is not None)


class _HeadFinder:
    """Finds the head before a log_softmax."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._operators = profile.operators
        self._users = recorded_index(profile).users

    def head(self, softmax: int) -> FoundHead | None:
        """The head whose logits this operator takes, if it is a log_softmax of such."""
        op = self._operators[softmax]
        if base_name(op.name) != _SOFTMAX or op.phase in _BACKWARD:
            return None
        product, family, copies = self._back(op.inputs[0].storage)
        if product < 0:
            return None
        logs = op.outputs[0].storage
        readers = sorted({i for one in (*family, logs) for i in self._forward_users(one)})
        losses = [i for i in readers if base_name(self._operators[i].name) in _LOSSES]
        if len(losses) != 1 or not all(self._is_known(i, family, logs) for i in readers):
            return None
        return self._made(product, softmax, losses[0], tuple(readers), tuple(copies))

    def _forward_users(self, storage: int) -> list[int]:
        users = self._users.get(storage, ())
        return [index for index in users if self._operators[index].phase not in _BACKWARD]

    def _back(self, storage: int) -> tuple[int, list[int], list[int]]:
        """The product that logits come from, -1 for none; they with what they are copies of; the copies."""
        family, copies = [storage], list[int]()
        while True:
            maker = self._profile.storages[family[-1]].birth
            if maker < 0 or self._operators[maker].phase in _BACKWARD:
                return -1, family, copies
            name = base_name(self._operators[maker].name)
            if name in _PRODUCTS:
                return maker, family, copies
            if name not in _COPIES or len(self._operators[maker].inputs) != 1:
                return -1, family, copies
            copies.append(maker)
            family.append(self._operators[maker].inputs[0].storage)

    def _is_known(self, index: int, family: list[int], logs: int) -> bool:
        """Whether a reader of logits or their log_softmax is of the loss, or only moves them about."""
        op, every = self._operators[index], {*family, logs}
        name = base_name(op.name)
        if op.mutates:
            return False
        if all(use.storage in every for use in op.outputs):
            return True
        of_logs = logs in {use.storage for use in op.inputs}
        return of_logs and name in (*_LOSSES, *_OF_SMOOTHING)

    def _made(
        self,
        product: int,
        softmax: int,
        loss: int,
        readers: tuple[int, ...],
        copies: tuple[int, ...],
    ) -> FoundHead | None:
        op, lost = self._operators[product], self._operators[loss]
        hidden, weight = op.inputs[-2:]
        module = op.module
        if module < 0 or not self._is_weight(weight) or len(lost.inputs) < 2:
            return None
        count = 1
        for size in lost.inputs[1].shape:
            count *= size
        record = self._profile.modules[module]
        return FoundHead(
            where=record.path,
            product=product,
            loss=loss,
            readers=readers,
            hidden=hidden,
            number=count,
            classes=op.outputs[0].shape[1],
            width=hidden.shape[1],
            biased=len(op.inputs) > len(("hidden", "weight")),
            each=bool(lost.outputs[0].shape),
            copied=copies,
        )

    def _is_weight(self, use: TensorUse) -> bool:
        """Whether it is a parameter, or autocast's copy of one."""
        storage = self._profile.storages[use.storage]
        if storage.kind == "parameter" or storage.birth < 0:
            return storage.kind == "parameter"
        maker = self._operators[storage.birth]
        copied = base_name(maker.name) == _COPIES[0] and len(maker.inputs) == 1
        return copied and self._profile.storages[maker.inputs[0].storage].kind == "parameter"


def gradient_of(profile: Profile, head: FoundHead) -> tuple[int, Operator | None]:
    """The task of backward that begins with the loss's gradient, -1 for none; the operator that made that."""
    for index, op in enumerate(profile.operators):
        if op.phase == "backward" and op.forward == head.loss:
            birth = profile.storages[op.inputs[0].storage].birth
            return index, profile.operators[birth] if birth >= 0 else None
    return -1, None


def family_tasks(profile: Profile, head: FoundHead) -> Iterator[int]:
    """The tasks that do not run any more: those of forward but the loss, and all of their backward."""
    forward = set(head.readers)
    yield from sorted(forward - {head.loss})
    for index, op in enumerate(profile.operators):
        if op.phase == "backward" and op.forward in forward:
            yield index
