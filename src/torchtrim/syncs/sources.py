"""Short ways to name a line of PyTorch's source."""

from __future__ import annotations

from torchtrim.syncs.base import Evidence

REPOSITORY = "pytorch/pytorch"
REF = "v2.12.1"
_NATIVE = "aten/src/ATen/native/"


def pytorch(path: str, line: int, note: str) -> Evidence:
    """A line of PyTorch, read at `REF`."""
    return Evidence(repository=REPOSITORY, ref=REF, path=path, line=line, note=note)


def installed(path: str, line: int, note: str) -> Evidence:
    """A line of PyTorch's Python, read in the release 2.13."""
    return Evidence(repository=REPOSITORY, ref="v2.13.0", path=path, line=line, note=note)


def since_2_15(line: int, note: str) -> Evidence:
    """A line of what indexing became in torch 2.15, whose header says it."""
    path = "aten/src/ATen/TensorIndexing.h"
    return Evidence(repository=REPOSITORY, ref="v2.15.0", path=path, line=line, note=note)


def native(path: str, line: int, note: str) -> Evidence:
    """A line of an operator's implementation, by its path in ATen's folder of them."""
    return pytorch(_NATIVE + path, line, note)
