"""The searches of Lightning and Accelerate for a batch that fits, as they are, on peaks that were measured.

Lightning's `Tuner.scale_batch_size` runs with its defaults in a real `Trainer`, over a module whose training
step only asks whether the size fits; so does `accelerate.find_executable_batch_size`. One probe is one size
that was tried: Lightning runs three steps at each.
"""

from __future__ import annotations

import importlib
import logging
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch

Fits = Callable[[int], bool]
_SAMPLES = 100_000


class OutOfMemory(RuntimeError):
    """As CUDA's reads, by which both tell it."""

    def __init__(self) -> None:
        super().__init__("CUDA out of memory. Tried to allocate 20.00 MiB")


def accelerate(fits: Fits) -> dict[str, Any]:
    """From 128 down, to nine tenths each time."""
    find = importlib.import_module("accelerate.utils").find_executable_batch_size
    tried: list[int] = []

    def train(batch_size: int) -> int:
        tried.append(batch_size)
        if not fits(batch_size):
            raise OutOfMemory
        return batch_size

    return {"answer": find(train)(), "probes": len(tried), "tried": tried}


def lightning(mode: str) -> Callable[[Fits], dict[str, Any]]:
    """From 2 on, doubled until it does not fit, then in `binsearch` halved in between."""
    return lambda fits: _lightning(mode, fits)


def _lightning(mode: str, fits: Fits) -> dict[str, Any]:
    library = importlib.import_module("lightning.pytorch")
    tuner = importlib.import_module("lightning.pytorch.tuner")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    tried: list[int] = []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = library.Trainer(
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            max_epochs=1,
            default_root_dir=folder,
        )
        answer = tuner.Tuner(trainer).scale_batch_size(_module(library, fits, tried), mode=mode)
    return {"answer": answer, "probes": len(tried), "tried": tried}


def _module(library: Any, fits: Fits, tried: list[int]) -> Any:
    """A module with a `batch_size`, as Lightning wants it."""

    class Asks(library.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 2
            self.weight = torch.nn.Parameter(torch.ones(()))

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(range(_SAMPLES), batch_size=self.batch_size)

        def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
            if number == 0:
                tried.append(len(batch))
            if not fits(len(batch)):
                raise OutOfMemory
            return self.weight * 0

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    return Asks()


SEARCHES: dict[str, Callable[[Fits], dict[str, Any]]] = {
    "lightning power": lightning("power"),
    "lightning binsearch": lightning("binsearch"),
    "accelerate": accelerate,
}
