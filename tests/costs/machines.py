"""A small machine for tests: it runs programs of a few instructions, and can write down a trace of it.

Nothing here is shared with what is tested. A host thread works, launches kernels on streams, copies and
waits; a stream does one thing after the other. A program is a list of instructions; `run` with `without`
skips the waits of some places, which is the truth that a prediction is compared with.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from recordings import BACKWARD, MAIN, PAGEABLE, Recording

LAUNCH, GAP, CALL, RETURN = 8.0, 1.0, 4.0, 3.0
COPY = 2.0


@dataclass(frozen=True)
class Work:
    """The host thinks."""

    seconds: float


@dataclass(frozen=True)
class Kernel:
    """Launch a kernel on a stream."""

    seconds: float
    stream: int = 7


@dataclass(frozen=True)
class Read:
    """Copy to pageable memory and wait, at a place."""

    place: int
    stream: int = 7


@dataclass(frozen=True)
class Synchronize:
    """Wait for a stream's last kernel, by an event that was recorded then."""

    place: int


@dataclass(frozen=True)
class Order:
    """Whatever is launched next, on `stream`, waits for what `after` was last given."""

    after: int
    stream: int


@dataclass(frozen=True)
class Backward:
    """Another thread runs these; this one stands still until it is done."""

    program: tuple[object, ...]


@dataclass
class Machine:
    """Runs a program. `span` is when host and device are done; `made` the trace."""

    without: Set[int] = frozenset()
    made: Recording = field(default_factory=Recording)
    free: dict[int, float] = field(default_factory=dict)
    wanted: dict[int, float] = field(default_factory=dict)
    last: int = 7
    clock: float = 0.0

    def run(self, program: tuple[object, ...], tid: int = MAIN) -> float:
        """The span."""
        for one in program:
            self._step(one, tid)
        return max([self.clock, *self.free.values()])

    def _step(self, one: object, tid: int) -> None:
        if isinstance(one, Work):
            self.made.op("aten::work", self.clock, one.seconds, tid=tid)
            self.clock += one.seconds
        elif isinstance(one, Kernel):
            self._place(one.stream, one.seconds, "gemm", "cudaLaunchKernel", tid)
        elif isinstance(one, Read):
            self._read(one, tid)
        elif isinstance(one, Synchronize):
            self._synchronize(one, tid)
        elif isinstance(one, Order):
            self.wanted[one.stream] = self.free.get(one.after, 0.0)
            for name in ("cudaEventRecord", "cudaStreamWaitEvent"):
                self.made.call(name, self.clock, 1.0, tid=tid)
                self.clock += 1.0
        elif isinstance(one, Backward):
            self.clock += 30
            begin = self.clock
            self.run(one.program, BACKWARD)
            name = "autograd::engine::evaluate_function: MmBackward0"
            self.made.op(
                name, begin, self.clock - begin, tid=BACKWARD, forward_thread=1, sequence=1
            )
            self.clock += 30

    def _place(
        self, stream: int, seconds: float, name: str, call: str, tid: int, *, waits: bool = False
    ) -> None:
        idle = self.free[stream] + GAP if stream in self.free else 0.0
        start = max(self.clock + LAUNCH, idle, self.wanted.pop(stream, 0.0))
        self.free[stream] = start + seconds
        self.last = stream
        until = self.clock + CALL
        if waits:
            until = max(until, self.free[stream] + RETURN)
        where = {"stream": stream, "tid": tid, "call": call, "name": name}
        self.made.launch(self.clock, until - self.clock, kernel=(start, seconds), **where)
        self.clock = until

    def _read(self, one: Read, tid: int) -> None:
        begin, waits = self.clock, one.place not in self.without
        self._place(one.stream, COPY, PAGEABLE, "cudaMemcpyAsync", tid, waits=waits)
        self.made.op(f"aten::read_{one.place}", begin, self.clock - begin, tid=tid)

    def _synchronize(self, one: Synchronize, tid: int) -> None:
        if one.place in self.without:
            return
        self.made.call("cudaEventRecord", self.clock, 1.0, tid=tid)
        begin = self.clock + 1.0
        self.clock = max(begin + CALL, self.free.get(self.last, 0.0) + RETURN)
        self.made.call("cudaEventSynchronize", begin, self.clock - begin, tid=tid)
        self.made.op(f"aten::read_{one.place}", begin, self.clock - begin, tid=tid)
