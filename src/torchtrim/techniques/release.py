"""Release: in a call without gradients, each result is freed after its last reader.

Python holds the arguments of a function until it returns, so eager mode keeps the input of every running
block. Here the network runs from its graph instead (`executor.network`). Gradients of parameters, which such
a call does not need, are stashed in a temporary file and restored on revert.
"""

from __future__ import annotations

from torchtrim.executor.network.technique import ByGraph


class Release(ByGraph):
    """`where` names modules. Option `gradients`: stash the gradients of their parameters."""

    name = "release"
    does = "free each result after its last reader"
    takes = ("gradients",)


TECHNIQUE = Release()
