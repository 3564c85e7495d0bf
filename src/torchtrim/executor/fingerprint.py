"""Which model and which script a plan was made for."""

from __future__ import annotations

import hashlib
from pathlib import Path

from torch import nn
from torch.nn.parameter import is_lazy


def fingerprint_of(root: nn.Module) -> str:
    """Hash of every module's path and type and every parameter's and buffer's shape and type."""
    digest = hashlib.sha256()
    for path, module in root.named_modules():
        digest.update(f"{path}:{type(module).__name__}\n".encode())
    for path, tensor in (*root.named_parameters(), *root.named_buffers()):
        shape = "lazy" if is_lazy(tensor) else tuple(tensor.shape)
        digest.update(f"{path}:{shape}:{tensor.dtype}\n".encode())
    return digest.hexdigest()[:16]


def sha256_of(script: Path) -> str:
    """Hash of the script's bytes."""
    return hashlib.sha256(script.read_bytes()).hexdigest()
