"""Applies an exported plan in place of the plan that it was made from."""

from __future__ import annotations

import importlib.util
from types import ModuleType

from torch import nn

from torchtrim.errors import ApplyFailed
from torchtrim.executor.registry import Handle


def apply_exported(path: str, root: nn.Module, name: str, *, check: bool) -> Handle:
    """What the `apply` of the module of that file returns. Raises `ApplyFailed`."""
    module = _module_of(path)
    try:
        handle: Handle = module.apply(root, name, check=check)
    except module.ApplyFailed as error:
        raise ApplyFailed(str(error)) from error
    return handle


def _module_of(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("exported_plan", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
