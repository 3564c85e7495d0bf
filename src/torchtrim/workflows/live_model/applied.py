"""What holds a plan on a live model: figures, proof, and the way back."""

from __future__ import annotations

from types import TracebackType

from torchtrim.errors import Unsupported
from torchtrim.executor.apply import Applied
from torchtrim.executor.network.picture import graph_record
from torchtrim.records.report import Figures
from torchtrim.report.assemble import figures_of
from torchtrim.report.network_graph import NetworkPicture
from torchtrim.workflows.live_model.network import Optimized
from torchtrim.workflows.optimize.fitting import Fit


class Fitted:
    """A live model that was fitted into a budget. As a context manager it is reverted at the end."""

    def __init__(self, fit: Fit, applied: Applied) -> None:
        self.original: Figures | None = figures_of(fit.original)
        self.planned = figures_of(fit.planned) if fit.planned else None
        self.plan = fit.plan
        self.certificate = fit.certificate
        self._applied = applied

    def revert(self) -> None:
        """Make the model what it was."""
        self._applied.revert()

    def __enter__(self) -> Fitted:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.revert()


class FittedMemory(Fitted):
    """A live model whose calls, or whose training, go by a plan of their memory.

    `before` and `after`: bytes by what they are for. `notes` say what could not be planned, and why, and
    where a call saves nothing or takes longer. `original`, `planned`, `certificate` and `slowdown`, the time
    of a call as a factor of the original's, are None where it was not verified; training has no `slowdown`.
    """

    def __init__(self, optimized: Optimized) -> None:
        if optimized.fit is not None:
            super().__init__(optimized.fit, optimized.applied)
        else:
            self.original = self.planned = self.certificate = None
            self._applied = optimized.applied
        self.plan = optimized.plan
        self.before = optimized.before
        self.after = optimized.after
        self.notes = optimized.notes
        self.slowdown = optimized.slowdown
        self._program = optimized.program

    def graph(self) -> NetworkPicture:
        """The network's picture: who shares memory with whom. Raises `Unsupported` where there is none."""
        if self._program is None and not self.notes:
            raise Unsupported(
                "in training no operator's results share memory by a plan: autograd gives it back. Draw "
                "the network with mode='inference', or the step's memory with torchtrim.record."
            )
        if self._program is None:
            raise Unsupported(f"there is no graph of the whole to draw: {'; '.join(self.notes)}.")
        return NetworkPicture(graph_record(self.plan.script, self._program))
