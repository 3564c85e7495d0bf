"""Builds profiles for tests without running anything.

    step = Step()
    weight = step.alive("parameter", 400, name="net.fc.weight")
    batch = step.alive("input", 100)
    with step.module("net.fc", "Linear"):
        out = step.op("aten::addmm", weight, batch, makes=200, line=7)
    step.op("aten::mm", out, phase="backward", forward=out.index)
    step.free(out)
    profile = step.profile()

Storages live until they are freed, or past the end of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from msgspec.structs import replace

from torchtrim.analysis.timeline import timeline
from torchtrim.records.profile import (
    Call,
    Collective,
    Kind,
    LoaderWait,
    Module,
    Operator,
    OptimizerStep,
    Phase,
    Place,
    Profile,
    Replica,
    SavedTensor,
    Storage,
    Sync,
    TensorUse,
    Update,
    check,
)

SCRIPT = "train.py"


@dataclass(frozen=True)
class Made:
    """An operator of the step and the storages that it made."""

    index: int
    storages: tuple[int, ...]

    @property
    def out(self) -> int:
        """The first storage that it made."""
        return self.storages[0]


Tensor = int | Made | TensorUse


@dataclass
class Running:
    """A module's forward that is being recorded: add the storages that go in and come out."""

    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)


class Step:
    """One step. `device` is the profile's; storages live on `"cpu"` or else on `"cuda:0"`."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.operators: list[Operator] = []
        self.storages: list[Storage] = []
        self.modules: list[Module] = []
        self.calls: list[Call] = []
        self.places: list[Place] = []
        self.waits: list[LoaderWait] = []
        self.syncs: list[Sync] = []
        self.saved: list[SavedTensor] = []
        self.collectives: list[Collective] = []
        self.replicas: list[Replica] = []
        self.optimizer_steps: list[OptimizerStep] = []
        self._running: list[int] = []
        self._clock = 0.0

    def alive(
        self, kind: Kind, size: int, *, name: str = "", device: str = "", pool: str = "device"
    ) -> int:
        """A storage from before the step."""
        return self._storage(size, kind, -1, name, device, pool)

    def op(
        self,
        name: str,
        *reads: Tensor,
        makes: int | tuple[int, ...] = (),
        kind: Kind = "activation",
        phase: Phase = "forward",
        mutates: tuple[Tensor, ...] = (),
        forward: int = -1,
        transient: int | None = None,
        seconds: float = 0.001,
        line: int = 0,
        path: str = SCRIPT,
        named: str = "",
        device: str = "",
        pool: str = "device",
        spread: float = 0.0,
        random: bool = False,
    ) -> Made:
        """An operator. `makes` are the bytes of new storages; `line` 0 is no place."""
        index = len(self.operators)
        sizes = (makes,) if isinstance(makes, int) else makes
        made = tuple(self._storage(size, kind, index, named, device, pool) for size in sizes)
        operator = Operator(
            name=name if "." in name else f"{name}.default",
            phase=phase,
            module=self._running[-1] if self._running else -1,
            place=self._place(path, line),
            caller=-1,
            label=-1,
            forward=forward,
            inputs=tuple(_use(tensor) for tensor in reads),
            outputs=tuple(use(storage) for storage in made),
            mutates=tuple(_use(tensor).storage for tensor in mutates),
            start=self._clock,
            seconds=seconds,
            transient_bytes=sum(sizes) if transient is None else transient,
            spread=spread,
            random=random,
        )
        self.operators.append(operator)
        self._clock += seconds
        return Made(index, made)

    def backward(self, name: str, of: Made, *reads: Tensor, makes: int = 0) -> Made:
        """An operator of backward that computes the gradient of a forward operator."""
        made = (makes,) if makes else ()
        return self.op(
            name, *reads, makes=made, kind="temporary", phase="backward", forward=of.index
        )

    def free(self, *tensors: Tensor) -> None:
        """The storages die before the operator that comes next."""
        for tensor in tensors:
            indices = tensor.storages if isinstance(tensor, Made) else (_use(tensor).storage,)
            for i in indices:
                self.storages[i] = replace(self.storages[i], death=len(self.operators))

    def save(self, tensor: Tensor, saver: Made, asker: Made | None = None) -> None:
        """Autograd saves a tensor for the gradient of `saver`; `asker` is the first to use it."""
        saved = _use(tensor)
        packed = saver.index if saved.storage in saver.storages else saver.index - 1
        asked = -1 if asker is None else asker.index
        self.saved.append(
            SavedTensor(
                saved.storage,
                saved.dtype,
                saved.shape,
                saved.strides,
                0,
                packed,
                asked,
                int(asked >= 0),
                saver.index,
            )
        )

    @contextmanager
    def module(self, path: str, type: str = "Module", *, graded: bool = True) -> Iterator[Running]:
        """A module's forward; operators inside are its own. The first use of a path declares it."""
        running = Running()
        first, depth = len(self.operators), len(self._running)
        self._running.append(self.declare(path, type))
        yield running
        module = self._running.pop()
        last, came, went = len(self.operators), tuple(running.inputs), tuple(running.outputs)
        self.calls.append(Call(module, first, last, depth, came, went, graded))

    def declare(self, path: str, type: str = "Module") -> int:
        """A module's number; its parent is the one whose path its own continues."""
        for number, known in enumerate(self.modules):
            if known.path == path:
                return number
        above = [i for i, m in enumerate(self.modules) if path.startswith(f"{m.path}.")]
        parent = max(above, key=lambda i: len(self.modules[i].path), default=-1)
        self.modules.append(Module(path, type, parent, False, False, 0))
        return len(self.modules) - 1

    def wait(self, seconds: float, workers: int = 0) -> None:
        """A wait for the data loader."""
        self.waits.append(LoaderWait(0.0, seconds, workers))

    def exchange(
        self,
        size: int,
        seconds: float,
        *,
        phase: Phase = "backward",
        line: int = 0,
        group: str = "0",
    ) -> None:
        """An all-reduce that is under way for so long; the rank goes on."""
        made = self.op("c10d::allreduce_", phase=phase, seconds=0.0, line=line)
        self.collectives.append(
            Collective("allreduce", made.index, group, 2, size, self._clock, seconds)
        )

    def idle(self, seconds: float) -> None:
        """Nothing runs for so long."""
        self._clock += seconds

    def replica(self, gradient_bytes: int, *, find_unused: bool = False, unused: int = 0) -> None:
        """The module declared last is in `DistributedDataParallel`."""
        self.replicas.append(
            Replica(0, 25 * 2**20, gradient_bytes, unused, find_unused, False, False)
        )

    def sync(
        self,
        row: str,
        of: Made | None = None,
        *,
        seconds: float | None = None,
        phase: Phase = "forward",
        line: int = 0,
    ) -> None:
        """A wait: of an operator, whose phase and place it has, or of a call at a line."""
        if of is not None:
            op = self.operators[of.index]
            self.syncs.append(Sync(row, of.index, op.phase, op.place, op.caller, seconds))
        else:
            self.syncs.append(Sync(row, -1, phase, self._place(SCRIPT, line), -1, seconds))

    def profile(
        self, *, seconds: float | None = None, project: str = "", rank: int = 0, clock: float = 0.0
    ) -> Profile:
        """The profile, checked. The step took as long as its operators and waits, if not said."""
        count = len(self.operators)
        storages = [_until(storage, count) for storage in self.storages]
        spent = self._clock + sum(wait.seconds for wait in self.waits)
        profile = Profile(
            torchtrim="0",
            torch="0",
            device=self.device,
            script=SCRIPT,
            project=project,
            step_seconds=spent if seconds is None else seconds,
            peak_bytes=0,
            tracked_peak_bytes=0,
            reserved_bytes=None,
            rss_bytes=None,
            operators=self.operators,
            storages=storages,
            modules=self.modules,
            calls=self.calls,
            places=self.places,
            labels=[],
            waits=self.waits,
            syncs=self.syncs,
            saved=self.saved,
            saved_known=bool(self.saved),
            optimizer_steps=self.optimizer_steps,
            rank=rank,
            world=2 if self.collectives else 1,
            clock=clock,
            collectives=self.collectives,
            replicas=self.replicas,
        )
        assert check(profile) is None
        peak = max(timeline(profile).high, default=0)
        return replace(profile, peak_bytes=peak, tracked_peak_bytes=peak)

    def _storage(self, size: int, kind: Kind, birth: int, name: str, device: str, pool: str) -> int:
        where = device or ("cpu" if self.device == "cpu" else "cuda:0")
        self.storages.append(Storage(size, kind, birth, _ALIVE, where, name, pool))
        return len(self.storages) - 1

    def _place(self, path: str, line: int) -> int:
        if not line:
            return -1
        place = Place(path, line, "main")
        if place not in self.places:
            self.places.append(place)
        return self.places.index(place)


_ALIVE = 2**31


def use(storage: int, dtype: str = "float32", shape: tuple[int, ...] = (4,)) -> TensorUse:
    """A tensor of a storage, as an operator sees it."""
    return TensorUse(storage, dtype, shape, (1,) * len(shape))


def training_step(blocks: int = 4, size: int = 1000, device: str = "cpu") -> Profile:
    """A chain of blocks, each of which saves `3 * size` bytes inside and gives `size`, then a loss.

    A block has a parameter of `size` bytes. Operators take a millisecond each. Memory is highest at
    the first operators of backward.
    """
    step = Step(device)
    weights = [step.alive("parameter", size, name=f"net.{i}.weight") for i in range(blocks)]
    batch = step.alive("input", size)
    inputs, insides, outputs = [batch], list[Made](), list[Made]()
    with step.module("net", "Net"):
        for number, weight in enumerate(weights):
            with step.module(f"net.{number}", "Block") as block:
                inside = step.op("aten::addmm", weight, inputs[-1], makes=3 * size, line=10)
                output = step.op("aten::mm", inside, weight, makes=size, line=11)
                block.inputs.append(inputs[-1])
                block.outputs.append(output.out)
            insides.append(inside)
            outputs.append(output)
            inputs.append(output.out)
    loss = step.op("aten::mse_loss", inputs[-1], makes=8, kind="temporary", line=20)
    flow = step.backward("aten::mse_loss_backward", loss, inputs[-1], makes=size)
    gradients = []
    for i in reversed(range(blocks)):
        through = step.backward("aten::mm", outputs[i], insides[i], flow)
        step.save(insides[i], outputs[i], through)
        step.save(weights[i], outputs[i], through)
        step.free(insides[i], outputs[i])
        name = f"net.{i}.weight"
        gradients.append(_gradient(step, insides[i], inputs[i], size, name))
        step.save(inputs[i], insides[i], gradients[-1])
    step.free(flow, loss)
    for weight, gradient in zip(reversed(weights), gradients, strict=True):
        step.op("aten::add_", weight, gradient, mutates=(weight,), phase="optimizer")
    return step.profile()


def exchanging_step(exchanges: list[tuple[int, float]], rank: int = 0) -> Profile:
    """A second for each of four gradients of 4 MiB in `DistributedDataParallel`, then exchanges: of so many
    bytes, for so many seconds."""
    step = Step()
    step.declare("DDP")
    step.replica(4 * 2**22)
    updates = []
    for number in range(4):
        parameter = step.alive("parameter", 2**22, name=f"DDP.{number}")
        step.op("aten::mm", seconds=1.0, phase="backward")
        updates.append(Update(parameter, parameter, (), 0, len(step.operators), 1))
    for size, seconds in exchanges:
        step.exchange(size, seconds)
    last = step.op("aten::add_", phase="optimizer").index
    step.optimizer_steps.append(
        OptimizerStep("SGD", "torch.optim.sgd.SGD", last, last + 1, tuple(updates), False)
    )
    return step.profile(seconds=10.0, rank=rank)


def _gradient(step: Step, of: Made, saved: int, size: int, name: str) -> Made:
    return step.op(
        "aten::mm",
        saved,
        makes=size,
        kind="gradient",
        phase="backward",
        forward=of.index,
        named=name,
    )


def _use(tensor: Tensor) -> TensorUse:
    if isinstance(tensor, TensorUse):
        return tensor
    return use(tensor.out if isinstance(tensor, Made) else tensor)


def _until(life: Storage, count: int) -> Storage:
    return replace(life, death=min(life.death, count))
