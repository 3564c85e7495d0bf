"""Remembers the line that constructed each module, for reports."""

from __future__ import annotations

import copy
import functools
import sys
from types import CodeType, FrameType
from typing import Any
from weakref import ref

from torch import nn
from torch.compiler import is_dynamo_compiling

from torchtrim.dispatch.frames import uncompiled
from torchtrim.dispatch.patches import Patches
from torchtrim.dispatch.places import CallSite, Places

_COPIER: CodeType = vars(copy)["_reconstruct"].__code__


class Constructions:
    """The call sites, outside torch, that constructed the modules made between `watch` and its undoing.

    A copy has the site of its original, if that is known, else of the copying. Modules are not kept alive.
    """

    def __init__(self, places: Places) -> None:
        self._places = places
        self._sites: dict[int, tuple[ref[nn.Module], CallSite]] = {}

    def watch(self, patches: Patches) -> None:
        """Patch the construction of modules until the patches are undone."""
        for name in ("__init__", "__setstate__"):
            patches.replace(nn.Module, name, self._noting(getattr(nn.Module, name)))

    def site(self, module: nn.Module) -> CallSite | None:
        """Return the call site that constructed a module, None if it is not known."""
        kept, site = self._sites.get(id(module), (None, None))
        return site if kept is not None and kept() is module else None

    def _noting(self, original: Any) -> Any:
        @functools.wraps(original)
        def noting(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            original(module, *args, **kwargs)
            if not is_dynamo_compiling():
                self._note(module, sys._getframe(1))

        return noting

    @uncompiled
    def _note(self, module: nn.Module, frame: FrameType) -> None:
        site = self._of_original(frame) or self._outside(module, frame)
        if site is not None:
            number = id(module)
            kept = ref(module, lambda gone: self._forget(number, gone))
            self._sites[number] = kept, site

    def _forget(self, number: int, gone: ref[nn.Module]) -> None:
        if self._sites.get(number, (None,))[0] is gone:
            del self._sites[number]

    def _of_original(self, frame: FrameType | None) -> CallSite | None:
        """Return the site of the module that `copy.deepcopy` copies."""
        while frame is not None and frame.f_code.co_name == "__setstate__":
            frame = frame.f_back
        if frame is None or frame.f_code is not _COPIER:
            return None
        original = frame.f_locals.get("x")
        return self.site(original) if isinstance(original, nn.Module) else None

    def _outside(self, module: nn.Module, frame: FrameType | None) -> CallSite | None:
        """Return the innermost call site outside torch and outside the module's own constructors.

        A constructor calls those of its bases, so further out they come earlier in the order of classes. One
        that does not is of another module that contains this one.
        """
        inits = [
            getattr(vars(kind).get("__init__"), "__code__", None) for kind in type(module).__mro__
        ]
        while frame is not None and frame.f_code in inits:
            inits = inits[: inits.index(frame.f_code)]
            frame = frame.f_back
        return self._places.find(frame)[0]
