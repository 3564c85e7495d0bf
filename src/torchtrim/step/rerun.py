"""The edit that reruns spans of forward in backward instead of keeping their saved tensors.

The first unpacking of any tensor that a span saved reruns the span. Its saved tensors are then held until
backward has used them, and its inputs until backward has left the span. torch.utils.checkpoint without
reentrance, the base of `techniques.recompute.rerun`, does the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from torchtrim.records.operator_names import base_name
from torchtrim.records.profile import STATE
from torchtrim.step.edits import Block, Drop, Edit, Insert, Need, joined
from torchtrim.step.index import index_of
from torchtrim.step.step import DEVICE, Hold, Span, Step


def rerun(
    step: Step,
    spans: Sequence[Span],
    kept: frozenset[str] = frozenset(),
    *,
    early_stop: bool = False,
) -> Edit | None:
    """Return the edit that reruns each span on its own, or None if autograd saved nothing in them.

    `kept`: operators, such as `aten::mm`, whose results are kept and not recomputed: selective checkpointing.
    A span whose graph never runs backward, as in an evaluation with gradients enabled, is not rerun, and its
    saved tensors are dropped. `early_stop`: stop after the last saved tensor, as torch.utils.checkpoint does.
    """
    every = (_of_span(step, span, kept, early_stop) for span in spans)
    edits = [edit for edit in every if edit is not None]
    return joined(edits) if edits else None


def _of_span(step: Step, span: Span, kept: frozenset[str], early_stop: bool) -> Edit | None:
    stays = {i for i in range(*span) if kept and base_name(step.tasks[i].name) in kept}
    results = {number for i in stays for number in step.made_by[i]}
    saved = [
        (Drop(tensor, place), step.tensors[tensor].holds[place])
        for task in range(*span)
        for tensor, place in step.saved[task]
        if tensor not in results
    ]
    if not saved:
        return None
    passes = _passes(step, saved)
    if not passes:
        return _unused(step, span, saved)
    last = span.last
    if early_stop:
        last = max(max(hold.packed for _, hold in saved) + 1, span.first)
    born = {number for task in range(span.first, last) for number in step.made_by[task]}
    again = [i for i in range(span.first, last) if i not in stays]
    own, overhead = sum(step.tasks[i].seconds for i in again), step.overhead
    seconds = own + len(again) * overhead.task + overhead.span
    again_saved = [one for one in _saved_again(step, saved) if one[0].tensor in born]
    blocks, inserts = [], []
    for number, ((begins, ends), leaves) in passes.items():
        made: defaultdict[int, int] = defaultdict(int)  # the end of each rerun tensor
        for drop, _ in saved:
            if drop.tensor in born:  # a tensor never unpacked lasts until backward leaves the span
                made[drop.tensor] = max(made[drop.tensor], leaves.get(drop, ends))
        for drop, hold in again_saved:
            if index_of(step).passes[hold.saver] == number:
                made[drop.tensor] = max(made[drop.tensor], hold.until)
        blocks += [Block(step.tensors[one].bytes, begins, until) for one, until in made.items()]
        makes = sum(step.tensors[number].bytes for number in made)
        inserts.append(Insert(begins, seconds, _rise(step, again, made), makes))
    (begins, ends), _ = passes[max(passes)]
    return Edit(
        drops=tuple(drop for drop, _ in (*saved, *again_saved)),
        needs=(
            *(Need(number, ends) for number in _inputs(step, span)),
            *(Need(number, begins) for number in results),
        ),
        blocks=(*blocks, Block(_kept_bytes(step, again), span.first, ends)),
        inserts=tuple(inserts),
        claims=(span,),
    )


def _saved_again(step: Step, saved: Iterable[tuple[Drop, Hold]]) -> Iterator[tuple[Drop, Hold]]:
    """Yield where backward, itself differentiated, saves one of these tensors: it has that of the rerun."""
    for drop, first in saved:
        differentiated = {*step.backward.get(first.saver, ())}
        for place, hold in enumerate(step.tensors[drop.tensor].holds):
            if hold.saver in differentiated:
                yield Drop(drop.tensor, place), hold


def _passes(
    step: Step, saved: Iterable[tuple[Drop, Hold]]
) -> dict[int, tuple[Span, dict[Drop, int]]]:
    """Return the tasks of each backward through the saved tensors, and those that it leaves each before.

    A retained graph has several, and each reruns the span: they share no tensors.
    """
    numbers = index_of(step).passes
    found: defaultdict[int, dict[Drop, Span]] = defaultdict(dict)
    for drop, hold in saved:
        for task in (hold.asked, *step.backward.get(hold.saver, ())) if hold.asked >= 0 else ():
            first, last = found[numbers[task]].get(drop, (task, 0))
            until = max(last, min(task + 1, hold.until))
            found[numbers[task]][drop] = Span(min(first, task), until)
    return {
        number: (
            Span(min(one.first for one in of.values()), max(one.last for one in of.values())),
            {drop: one.last for drop, one in of.items()},
        )
        for number, of in sorted(found.items())
    }


def _unused(step: Step, span: Span, saved: Sequence[tuple[Drop, Hold]]) -> Edit:
    """Return the edit for a span that backward never reaches: its inputs live as long as its graph."""
    ends = max(hold.until for _, hold in saved)
    return Edit(
        drops=tuple(drop for drop, _ in saved),
        needs=tuple(Need(number, ends) for number in _inputs(step, span)),
        blocks=(Block(_kept_bytes(step, range(*span)), span.first, ends),),
        inserts=(Insert(span.first, step.overhead.span, 0),),
        claims=(span,),
    )


def _inputs(step: Step, span: Span) -> list[int]:
    """Return tensors from before the span that the rerun keeps alive: those that it reads or receives, and
    those that it replaces and may read again."""
    tasks = step.tasks[span.first : span.last]
    reads = (number for task in tasks for number in task.reads)
    replaced = [number for number, death in step.replaced if span.first < death <= span.last]
    if replaced and not _rereads(step, span):
        replaced = []
    return [
        number
        for number in dict.fromkeys((*reads, *step.given.get(span, ()), *replaced))
        if step.tensors[number].birth < span.first
        and step.tensors[number].kind not in STATE
        and step.tensors[number].pool == DEVICE
    ]


def _rereads(step: Step, span: Span) -> bool:
    """Return True if the code of a span may read what its modules' last calls left in attributes."""
    calls = [
        call for call in step.calls if span.first <= call.span.first and call.span.last <= span.last
    ]
    return not calls or any(step.modules[call.module].rereads for call in calls)


def _kept_bytes(step: Step, span: Iterable[int]) -> int:
    read = {number for i in span for number in step.tasks[i].reads}
    buffers = sum(step.tensors[n].bytes for n in read if step.tensors[n].kind == "buffer")
    return step.overhead.random_state + buffers


def _rise(step: Step, again: Iterable[int], kept: dict[int, int]) -> int:
    """Return the highest rise of memory during the rerun; tensors in `kept` stay.

    The rerun begins by stashing the generator's state, and restores it at its end.
    """
    rise = level = step.overhead.random_state
    ends: defaultdict[int, int] = defaultdict(int)
    for i in again:
        level -= ends.pop(i, 0)
        rise = max(rise, level + step.tasks[i].transient)
        for number in step.made_by[i]:
            tensor = step.tensors[number]
            if tensor.pool == DEVICE:
                level += tensor.bytes
                if number not in kept:
                    unsaved = (hold.until for hold in tensor.holds if hold.saver < 0)
                    ends[max((i + 1, *unsaved))] += tensor.bytes
    return max(rise, level)
