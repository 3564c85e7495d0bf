"""Replay: drop single saved tensors, and rerun the operators that created them in backward.

The result of a norm, an activation, a cast or a copy is often large and cheap to compute. If its inputs are
kept for backward anyway, the result can be dropped and recomputed, bit for bit, when backward first reads it.
Recompute does this for whole modules; replay does it for single operators and short chains of them, wherever
they are called, including a root's own `forward`.

`where` names a module and operators of its calls: `Net.mlp:gelu.0` is the first gelu that runs in a call of
`Net.mlp` or its children. `Net.mlp:addmm.0,gelu.0` drops and reruns both.

While such a module runs, a dispatch mode records how the named results are computed, and saved-tensor hooks
store a recipe instead of the tensor. Tensors written in place afterwards are kept. Random operators never
rerun: dropout noise is kept as one bit per element, which is exact. A batch norm reruns with the statistics
of its first run. Under other saved-tensor hooks, such as a checkpoint in the script, everything is kept.
Complex tensors are recomputed as the conjugate of their conjugate, since gradients of products and of `exp`
conjugate them, which takes a copy of each otherwise.

With `unread` the results were saved for a graph that the script drops without a backward, such as that of a
distance of which only the argmin is used, or of a metric. They may be computed from what changes soon after,
as a codebook does. If a later step does run backward through that graph, they rerun if their inputs are
still the same, and otherwise the run stops.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from torchtrim.executor.places import wrong_options
from torchtrim.executor.registry import Handle, Option, Roots, TechniqueUnit
from torchtrim.records.operator_names import base_name
from torchtrim.records.plan import Technique
from torchtrim.step.edits import Block, Drop, Edit, Insert, Need, joined
from torchtrim.step.index import index_of
from torchtrim.step.simulate import deaths
from torchtrim.step.step import DEVICE, Hold, Span, Step
from torchtrim.techniques.replay.conjugates import spared_conjugates
from torchtrim.techniques.replay.groups import GroupCall, groups_of
from torchtrim.techniques.replay.reading import Remake
from torchtrim.techniques.replay.table import BATCH_NORMS, NAMESPACE, norm_share

_UNREAD = "unread"
_STAYS_UNREAD = (
    "a graph that the script dropped is run backward only if its inputs are still the same"
)


class Replay(TechniqueUnit):
    """`where` holds places such as `Net.mlp:gelu.0`."""

    name = "replay"
    does = "rerun single operators in backward instead of keeping their results"
    takes = (_UNREAD,)
    equivalence = "BITWISE"
    assumes = (
        "no hooks on saved tensors",
        "what is computed from again stays the same until backward",
    )
    unseen = ("nothing writes through `.data` between forward and backward",)

    def options(self, step: Step) -> Sequence[Option]:
        """Return each tensor worth dropping, alone and with its inputs."""
        return [
            Option(self.name, where, group.spans, None, ((_UNREAD, True),) if group.unread else ())
            for where, group in groups_of(step).items()
        ]

    def edits(self, step: Step, option: Option) -> Edit | None:
        """Drop the tensors, and recompute them when backward reads them."""
        group = groups_of(step).get(option.where)
        if group is None:
            return None
        edit = joined(edit_of(step, one, unread=group.unread) for one in group.calls)
        return edit if _saves(step, edit) else None

    def settled(self, step: Step, technique: Technique) -> Technique:
        """Add the condition of results that no backward reads."""
        if not technique.options.get(_UNREAD):
            return technique
        return msgspec.structs.replace(technique, assumes=(*technique.assumes, _STAYS_UNREAD))

    def apply(self, roots: Roots, technique: Technique) -> Handle:
        """Watch the named operators. If it raises `ApplyFailed`, the model is unchanged."""
        from torchtrim.techniques.replay.watching import watch

        unread = technique.options.get(_UNREAD, False)
        if type(unread) is not bool or technique.options.keys() - {_UNREAD}:
            raise wrong_options(technique, f"at most one option, `{_UNREAD}`, true or false")
        return watch(roots, technique.where, unread=unread)


TECHNIQUE = Replay()


def _saves(step: Step, edit: Edit) -> bool:
    """Return True if the edit reduces the sum of bytes times lifetime."""
    saved = sum(
        step.tensors[number].bytes * (step.tensors[number].death - end)
        for number, end in deaths(step, [edit]).items()
        if step.tensors[number].pool == DEVICE
    )
    return saved > sum(block.bytes * (block.last - block.first) for block in edit.blocks)


_BATCH_NORMS = frozenset(f"{NAMESPACE}{name}" for name in BATCH_NORMS)
_PACKING, _UNPACKING = 0.10, 0.12
"""Time to pack and unpack noise bits, as shares of drawing them: 0.57, 0.68 and 5.6 ns an element in the
steps of a T5 and a BERT on an Intel Xeon.
"""


class _Recomputation(NamedTuple):
    """A tensor recomputed just before task `at` and held until task `until`.

    `kept`: task until which its inputs must be kept, when autograd releases the recipe.
    """

    made: Remake
    at: int
    until: int
    kept: int


def edit_of(step: Step, group: GroupCall, *, unread: bool = False) -> Edit:
    """Return the edit of one call: drop the members, recompute them at first use, hold them to the last.

    Each backward through a retained graph recomputes them for itself. `unread`: there is no use, and their
    inputs are kept as long as the graph that saved them.
    """
    uses, span = _uses(step, group.members), group.call.span
    again = [one for of in uses for one in _moments(group.members, of)]
    by_moment: defaultdict[int, list[_Recomputation]] = defaultdict(list)
    for one in again:
        by_moment[one.at].append(one)
    noise = {one.made.tensor: one for one in again if one.made.elements}.values()
    conjugates = spared_conjugates(step, [one.made for one in again])
    inserts = (_insert(step, at, several) for at, several in sorted(by_moment.items()))
    return Edit(
        drops=(
            *(Drop(m.tensor, place) for m in group.members for place, _ in m.holds),
            *conjugates.drops,
        ),
        needs=tuple(_needs(step, _dropped(group.members) if unread else again)),
        blocks=(
            *(
                Block(step.tensors[one.made.tensor].bytes, one.at, one.until)
                for one in again
                if one.until > one.at
            ),
            *(Block(one.made.elements // 8, one.made.packed, one.kept) for one in noise),
        ),
        inserts=(
            *inserts,
            *(_packing(step, one.made) for one in noise),
            Insert(span.first, (span.last - span.first) * step.overhead.watched / group.sharing, 0),
        ),
        rises=conjugates.rises,
        claims=tuple(Span(task, task + 1) for task in sorted({*group.tasks, *group.savers})),
    )


def _uses(step: Step, members: tuple[Remake, ...]) -> list[dict[int, Span]]:
    """Return, for each backward, from where to where it reads each member."""
    numbers = index_of(step).passes
    found: defaultdict[int, dict[int, Span]] = defaultdict(dict)
    for made in members:
        for _, hold in made.holds:
            for task, until in _reads(step, hold):
                first, last = found[numbers[task]].get(made.tensor, (task, 0))
                found[numbers[task]][made.tensor] = Span(min(first, task), max(last, until))
    if len(found) > 1:
        return [of for _, of in sorted(found.items())]
    return [{made.tensor: Span(made.asked, made.until) for made in members if made.asked >= 0}]


def _reads(step: Step, hold: Hold) -> Iterator[tuple[int, int]]:
    """Yield the tasks of backward that read what autograd saved, with the task until which each has it.

    A backward that is differentiated saves what it has itself recomputed.
    """
    if hold.asked >= 0 and step.tasks[hold.saver].phase == "backward":
        yield hold.saver, hold.until
    elif hold.asked >= 0:
        for task in (hold.asked, *step.backward.get(hold.saver, ())):
            yield task, min(task + 1, hold.until)


def _moments(members: tuple[Remake, ...], uses: Mapping[int, Span]) -> list[_Recomputation]:
    """Find when each member is recomputed: at its first use by one backward or by another member."""
    moments: dict[int, _Recomputation] = {}
    for made in reversed(members):
        users = [one for one in moments.values() if made.tensor in one.made.inputs]
        own = uses.get(made.tensor)
        asked = [one.at for one in users] + ([own.first] if own is not None else [])
        if asked:
            until = max((own.last if own is not None else -1, *(one.at for one in users)))
            kept = max((made.until, *(one.kept for one in users)))
            moments[made.tensor] = _Recomputation(made, min(asked), until, kept)
    return [moments[made.tensor] for made in members if made.tensor in moments]


def _dropped(members: tuple[Remake, ...]) -> list[_Recomputation]:
    """Return members that nothing asks for, with the task before which their graph is gone."""
    ends = max(made.dropped for made in members)
    return [_Recomputation(made, ends, ends, ends) for made in members]


def _needs(step: Step, again: list[_Recomputation]) -> list[Need]:
    own = {one.made.tensor for one in again}
    until: defaultdict[int, int] = defaultdict(int)
    for one in again:
        for number in one.made.inputs:
            if number not in own and step.tensors[number].pool == DEVICE:
                until[number] = max(until[number], one.kept)
    return [Need(number, until) for number, until in until.items()]


def _runs(step: Step, made: Remake) -> Iterator[tuple[int, float]]:
    tasks = made.tasks
    if made.elements:
        size = step.tensors[made.tensor].bytes
        yield size + made.elements, step.tasks[tasks[1]].seconds * _UNPACKING
        tasks = tasks[2:]
    for task in tasks:
        yield step.tasks[task].transient, step.tasks[task].seconds * _share(step, task)


def _share(step: Step, task: int) -> float:
    """Return the time of a rerun as a share of the first run."""
    if base_name(step.tasks[task].name) not in _BATCH_NORMS:
        return 1.0
    assert step.profile is not None
    return norm_share(step.operators[task], step.profile.device)


def _packing(step: Step, made: Remake) -> Insert:
    """Pack noise into bits in forward, just before the first operator that it is saved for."""
    size = made.elements // 8
    seconds = step.tasks[made.tasks[1]].seconds * _PACKING
    return Insert(made.packed, seconds, made.elements + size, size)


def _insert(step: Step, at: int, several: list[_Recomputation]) -> Insert:
    """Insert the reruns of one moment, in order. Results that are not held end after their last use."""
    here = {one.made.tensor: one for one in several}
    last = {number: one for one in several for number in one.made.inputs if number in here}
    level, rise, seconds = 0, 0, 0.0
    for one in several:
        size = step.tensors[one.made.tensor].bytes
        for number, (transient, duration) in enumerate(_runs(step, one.made)):
            rise = max(rise, level + transient)
            level += size if number == 0 else 0
            seconds += duration + step.overhead.task
        done = (here[n] for n, user in last.items() if user is one and here[n].until <= at)
        level -= sum(step.tensors[each.made.tensor].bytes for each in done)
    makes = sum(step.tensors[n].bytes for n, one in here.items() if one.until > at)
    return Insert(at, seconds + len(several) * step.overhead.recipe, max(rise, level), makes)
