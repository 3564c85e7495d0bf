"""Random steps and random edits of them: any that the records allow, and chains that train as networks do."""

from __future__ import annotations

import random
from itertools import pairwise

from torchtrim.step.edits import Block, Drop, Edit, Insert, Need, Rise
from torchtrim.step.rerun import rerun
from torchtrim.step.step import Hold, Span, Step, Task, Tensor


def random_step(rng: random.Random, most_tasks: int = 20) -> Step:
    """A step of which nothing is sure but that its numbers are in range."""
    count = rng.randrange(1, most_tasks)
    tensors = []
    for _ in range(rng.randrange(1, 2 * most_tasks)):
        birth = rng.randrange(-1, count)
        holds = []
        for _ in range(rng.randrange(1, 4)):
            until = rng.randrange(birth + 1, count + 1)
            packed = rng.choice((-1, rng.randrange(max(birth, 0), count)))
            holds.append(Hold(until, packed, packed, until - 1 if packed >= 0 else -1))
        kind = rng.choice(("activation", "temporary", "parameter", "input"))
        pool = rng.choice(("device", "device", "device", "host"))
        tensors.append(Tensor(rng.randrange(0, 1000), kind, pool, birth, tuple(holds)))
    tasks = [_task(rng, i, tensors) for i in range(count)]
    return Step(tuple(tasks), tuple(tensors))


def _task(rng: random.Random, index: int, tensors: list[Tensor]) -> Task:
    makes = tuple(n for n, t in enumerate(tensors) if t.birth == index)
    reads = tuple(n for n, t in enumerate(tensors) if t.birth < index < t.death)
    made = sum(tensors[n].bytes for n in makes if tensors[n].pool == "device")
    transient = made + rng.choice((0, 0, rng.randrange(500)))
    return Task("aten::x", "forward", -1, reads, makes, (), transient, rng.random())


def random_edits(rng: random.Random, step: Step, most: int) -> list[Edit]:
    """Edits of any kind, of which no two say how far memory rises during the same task."""
    edits = [random_edit(rng, step) for _ in range(rng.randrange(1, most))]
    tasks = list(range(len(step.tasks)))
    rng.shuffle(tasks)
    return [
        edit._replace(rises=tuple(Rise(i, rng.randrange(1500)) for i in tasks[n :: 3 * most]))
        for n, edit in enumerate(edits)
    ]


def random_edit(rng: random.Random, step: Step) -> Edit:
    """An edit of any kind but that of how far memory rises."""
    count = len(step.tasks)
    drops = []
    for number, tensor in enumerate(step.tensors):
        drops += [Drop(number, place) for place in range(len(tensor.holds)) if rng.random() < 0.2]
    numbers = range(len(step.tensors))
    needs = [Need(number, rng.randrange(count + 2)) for number in numbers if rng.random() < 0.1]
    blocks, inserts = [], []
    for _ in range(rng.randrange(3)):
        first = rng.randrange(count)
        pool = rng.choice(("device", "host"))
        blocks.append(Block(rng.randrange(1000), first, rng.randrange(first, count + 2), pool))
    for _ in range(rng.randrange(3)):
        at = rng.randrange(count)
        makes = sum(b.bytes for b in blocks if b.first == at and b.pool == "device")
        inserts.append(Insert(at, rng.random(), rng.randrange(2000), makes))
    return Edit(tuple(drops), tuple(needs), tuple(blocks), tuple(inserts))


def random_training(rng: random.Random, layers: int) -> tuple[Step, list[Edit]]:
    """A chain of blocks with a backward, and the edits of running blocks again."""
    return _Chain(rng, layers).step()


class _Chain:
    def __init__(self, rng: random.Random, layers: int) -> None:
        self.rng = rng
        self.layers = layers
        self.tasks: list[Task] = []
        self.births: list[tuple[int, int]] = []
        self.saves: list[list[int]] = []
        self.reads: list[list[int]] = []

    def _made(self, size: int) -> int:
        self.births.append((size, len(self.tasks)))
        self.reads.append([])
        self.saves.append([])
        return len(self.births) - 1

    def step(self) -> tuple[Step, list[Edit]]:
        """Forward block by block, then backward from the end, one task for each of forward."""
        rng, spans, forward = self.rng, [], []
        value = self._made(rng.randrange(1, 50))
        self.births[value] = (self.births[value][0], -1)
        for _ in range(self.layers):
            first = len(self.tasks)
            for _ in range(rng.randrange(1, 4)):
                forward.append((len(self.tasks), value))
                value = self._forward(value)
            spans.append(Span(first, len(self.tasks)))
        for of, read in reversed(forward):
            self._backward(of, read)
        step = Step(tuple(self.tasks), self._tensors())
        wanted = [*spans, *(Span(a.first, b.last) for a, b in pairwise(spans))]
        found = [edit for span in wanted if (edit := rerun(step, [span])) is not None]
        return step, found

    def _forward(self, value: int) -> int:
        index = len(self.tasks)
        self.reads[value].append(index)
        size = self.rng.randrange(1, 100)
        made = self._made(size)
        self.saves[self.rng.choice((value, made))].append(index)
        seconds = self.rng.choice((0.001, 0.002, 0.01)) * self.rng.random()
        rise = size + self.rng.choice((0, self.rng.randrange(60)))
        self.tasks.append(Task("aten::f", "forward", -1, (value,), (made,), (), rise, seconds))
        return made

    def _backward(self, of: int, read: int) -> None:
        rise = self.births[read][0]
        self.tasks.append(Task("aten::b", "backward", of, (read,), (), (), rise, 0.001))

    def _tensors(self) -> tuple[Tensor, ...]:
        where = {task.of: index for index, task in enumerate(self.tasks) if task.of >= 0}
        found = []
        for number, (size, birth) in enumerate(self.births):
            rest = max([birth + 1, *(index + 1 for index in self.reads[number])])
            saved = [
                Hold(where[of] + 1, of, max(of - 1, birth), where[of]) for of in self.saves[number]
            ]
            kind = "input" if birth < 0 else "activation"
            found.append(Tensor(size, kind, "device", birth, (Hold(rest), *saved)))
        return tuple(found)
