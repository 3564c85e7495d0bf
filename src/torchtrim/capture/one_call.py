"""Records one call of a function, on a GPU where there is one, on an emulated one where there is none."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from torchtrim.capture.allocator import allocator_for
from torchtrim.capture.build import Setting
from torchtrim.capture.modules import Modules
from torchtrim.capture.recording import Recording
from torchtrim.capture.watch import Watcher
from torchtrim.dispatch.places import Places
from torchtrim.emulator.device import current, emulate
from torchtrim.records.profile import Profile

Device = Literal["cpu", "emulated", "cuda"]
_ONE_AT_A_TIME = threading.RLock()


def record_call(
    function: Callable[[], Any],
    *,
    warmup: int = 0,
    device: Device | None = None,
    project: str | Path | None = None,
) -> Profile:
    """The profile of one call, after `warmup` calls that are not recorded.

    `project` is the folder whose source is the user's own, by default the current one. One call is
    recorded at a time: another thread's waits its turn.
    """
    chosen = device or ("cuda" if torch.cuda.is_available() and current() is None else "emulated")
    setting = Setting(
        chosen, getattr(function, "__qualname__", "function"), str(project or Path.cwd())
    )
    with _ONE_AT_A_TIME, _emulating(chosen):
        for _ in range(warmup):
            function()
        recording = _Recorded(Modules(), setting)
        recording.begin(())
        try:
            with Watcher(recording, trains=False) as watcher:
                function()
        except BaseException:
            recording.abandon()
            raise
        return recording.end(watcher.optimizers)


class _Recorded(Recording):
    """A recording that takes each root as it appears."""

    def __init__(self, modules: Modules, setting: Setting) -> None:
        super().__init__(modules, Places(setting.project), setting, allocator_for(setting.device))
        self._roots = modules

    def root_appears(self, root: nn.Module) -> None:
        self._roots.add_root(root)


def _emulating(device: str) -> contextlib.AbstractContextManager[Any]:
    return emulate() if device == "emulated" and current() is None else contextlib.nullcontext()
