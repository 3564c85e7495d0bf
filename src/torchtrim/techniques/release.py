"""Release: in a call without gradients, let go of each result when no operator looks at it again.

Python holds what it gives a function until that returns, so eager keeps the input of every block that is
running. The network runs by its graph instead (`executor.network`). Gradients of parameters, which such
a call does not need, are put aside (`aside`), and put back when it is reverted.
"""

from __future__ import annotations

from torchtrim.executor.network.technique import ByGraph


class Release(ByGraph):
    """`where` names modules. Option `gradients`: put the gradients of their parameters aside."""

    name = "release"
    takes = ("gradients",)


TECHNIQUE = Release()
