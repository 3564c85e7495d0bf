"""Steps of libraries, for `bench.recall`: all that one has of a kind, with its defaults, on random inputs.

    pip install --no-deps torchmetrics lightning-utilities kornia kornia-rs pytorch-metric-learning diffusers

Nothing is chosen by what `lint` finds: every function, class or scheduler that takes one of the inputs
is run, and what takes none of them is left out. One rule of `lint` was made on what was missed here at first
sight: functions that are called through a module of the project.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

Step = Callable[[], object]


def _on_device(*given: Tensor) -> tuple[Tensor, ...]:
    return tuple(one.to("cuda") for one in given)


def _metric_inputs() -> list[tuple[tuple[Tensor, ...], dict[str, Any]]]:
    """Predictions and targets: of regressions, of two classes and more, of labels, of images and sounds."""
    torch.manual_seed(0)
    some = torch.rand(32)
    labels = torch.randint(0, 4, (32,))
    images = torch.rand(2, 3, 48, 48)
    return [
        ((some, torch.rand(32)), {}),
        ((some, torch.randint(0, 2, (32,))), {}),
        ((some, torch.randint(0, 2, (32,))), {"task": "binary"}),
        ((torch.rand(32, 4).softmax(1), labels), {"task": "multiclass", "num_classes": 4}),
        ((torch.rand(32, 4).softmax(1), labels), {"num_classes": 4}),
        ((torch.rand(32, 4), torch.randint(0, 2, (32, 4))), {"num_labels": 4}),
        ((labels, torch.randint(0, 4, (32,))), {}),
        ((images, images * 0.9), {}),
        ((torch.rand(2, 800), torch.rand(2, 800)), {}),
    ]


def torchmetrics() -> Iterator[tuple[str, Step]]:
    """Each function of `torchmetrics.functional`."""
    functional = import_module("torchmetrics.functional")
    for name in sorted(functional.__all__):
        for number, (given, words) in enumerate(_metric_inputs()):
            yield f"{name} {number}", _calling(getattr(functional, name), given, words)


def kornia() -> Iterator[tuple[str, Step]]:
    """Each augmentation of `kornia.augmentation` that needs no arguments, on images."""
    module = import_module("kornia.augmentation")
    images = torch.rand(2, 3, 32, 32)
    for name, kind in _classes(module):
        if name.startswith("Random") or name in (
            "ColorJitter",
            "ColorJiggle",
            "CenterCrop",
            "Normalize",
        ):
            yield name, _made(kind, (images,))


def pytorch_metric_learning() -> Iterator[tuple[str, Step]]:
    """Each loss and miner, with embeddings and labels."""
    torch.manual_seed(0)
    given = torch.randn(16, 8), torch.randint(0, 4, (16,))
    for module in ("losses", "miners"):
        for name, kind in _classes(import_module(f"pytorch_metric_learning.{module}")):
            yield name, _made(kind, given)
            yield f"{name} of classes", _made(kind, given, num_classes=4, embedding_size=8)


def diffusers() -> Iterator[tuple[str, Step]]:
    """Each scheduler, four steps of it."""
    for name, kind in _classes(import_module("diffusers.schedulers")):
        if name.endswith("Scheduler"):
            yield name, _scheduled(kind)


def _scheduled(kind: Any) -> Step:
    noise = torch.randn(1, 4, 8, 8)
    made: list[Any] = []

    def step() -> None:
        if not made:
            made.append(kind())
        (scheduler,) = made
        (sample,) = _on_device(noise)
        scheduler.set_timesteps(4, device=sample.device)
        for time in scheduler.timesteps:
            given = scheduler.scale_model_input(sample, time)
            sample = scheduler.step(given * 0.1, time, sample).prev_sample
        scheduler.add_noise(sample, sample, scheduler.timesteps[:1])

    return step


def _classes(module: Any) -> Iterator[tuple[str, Any]]:
    found = inspect.getmembers(module, inspect.isclass)
    return ((name, kind) for name, kind in sorted(found) if not name.startswith("_"))


def _calling(function: Any, given: tuple[Tensor, ...], words: dict[str, Any]) -> Step:
    return lambda: function(*_on_device(*given), **words)


def _made(kind: Any, given: tuple[Tensor, ...], **words: Any) -> Step:
    """An object made once, and called."""
    made: list[Any] = []

    def step() -> None:
        if not made:
            one = kind(**words)
            made.append(one.to("cuda") if hasattr(one, "to") else one)
        made[0](*_on_device(*given))

    return step


LIBRARIES: dict[str, Callable[[], Iterator[tuple[str, Step]]]] = {
    one.__name__: one for one in (torchmetrics, kornia, pytorch_metric_learning, diffusers)
}
