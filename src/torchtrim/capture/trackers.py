"""Models that are never called themselves, only their parts: found by a part that runs."""

from __future__ import annotations

import gc

from torch import nn


def trackers_of(part: nn.Module) -> list[nn.Module]:
    """Video predictors that hold this module, such as those of the `sam2` package."""
    return [
        thing
        for thing in gc.get_objects()
        if issubclass(type(thing), nn.Module)
        and hasattr(type(thing), "propagate_in_video")
        and thing is not part
        and any(module is part for module in thing.modules())
    ]
