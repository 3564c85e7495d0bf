"""Steps of libraries, for `bench.recall`: all that one has of a kind, with its defaults, on random inputs.

    pip install --no-deps torchmetrics lightning-utilities kornia kornia-rs pytorch-metric-learning diffusers
    pip install --no-deps captum monai pytorch-optimizer vector-quantize-pytorch einops einx loguru
    pip install --no-deps torch-einops-utils

Nothing is chosen by what `lint` finds: every function, class or scheduler that takes one of the inputs
is run, and what takes none of them is left out. One rule of `lint` was made on what was missed in the first
four at first sight: functions that are called through a module of the project. The last four, `UNSEEN`, were
named before their first run.
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


def captum() -> Iterator[tuple[str, Step]]:
    """Each attribution method, of a small network or a layer of it."""
    for name, kind in _classes(import_module("captum.attr")):
        if hasattr(kind, "attribute"):
            yield name, _attributed(kind)


def _attributed(kind: Any) -> Step:
    inputs, others = torch.randn(4, 4), torch.randn(4, 4)
    words = {
        "target": 0,
        "neuron_selector": 0,
        "n_samples": 5,
        "n_steps": 5,
        "sliding_window_shapes": (2,),
    }
    made: list[Any] = []

    def step() -> None:
        if not made:
            model = _network().to("cuda")
            made.append(kind(model, **_taken(kind, {"layer": model[0]})))
        given, base = _on_device(inputs, others)
        taken = _taken(made[0].attribute, {**words, "baselines": base})
        made[0].attribute(given, **taken)

    return step


def _network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))


def monai() -> Iterator[tuple[str, Step]]:
    """Each loss, and each metric with its aggregate, of masks, of images and of scores."""
    torch.manual_seed(0)
    masks = torch.nn.functional.one_hot(torch.randint(0, 3, (2, 2, 16, 16))).movedim(-1, 1).float()
    images = torch.rand(2, 2, 1, 16, 16)
    scores = torch.rand(16, 1), torch.randint(0, 2, (16, 1))
    inputs = ((masks[:, :, 0], masks[:, :, 1]), (images[0], images[1]), scores)
    for module in ("losses", "metrics"):
        for name, kind in _classes(import_module(f"monai.{module}")):
            for number, given in enumerate(inputs):
                yield f"{name} {number}", _made(kind, given)


def pytorch_optimizer() -> Iterator[tuple[str, Step]]:
    """Each optimizer, one step of a small network."""
    module = import_module("pytorch_optimizer")
    for name in module.get_supported_optimizers():
        yield name, _optimized(module.load_optimizer(name))


def _optimized(kind: Any) -> Step:
    inputs = torch.randn(4, 4)
    made: list[Any] = []

    def step() -> None:
        if not made:
            model = _network().to("cuda")
            made.extend((model, kind(model.parameters()), *_on_device(inputs)))
        model, optimizer, given = made

        def loss() -> Tensor:  # called by the optimizer, so it must not wait itself
            optimizer.zero_grad()
            value: Tensor = model(given).square().mean()
            value.backward(create_graph=True)
            return value

        loss()
        optimizer.step(loss)

    return step


def vector_quantize_pytorch() -> Iterator[tuple[str, Step]]:
    """Each quantizer, forward and backward in training."""
    vectors = torch.randn(2, 32, 16)
    words = {"dim": 16, "codebook_size": 32, "num_quantizers": 2, "groups": 2, "levels": [4, 4, 4]}
    for name, kind in _classes(import_module("vector_quantize_pytorch")):
        yield name, _quantized(kind, vectors, words)


def _quantized(kind: Any, vectors: Tensor, words: dict[str, Any]) -> Step:
    made: list[Any] = []

    def step() -> None:
        if not made:
            made.append(kind(**_taken(kind, words)).to("cuda"))
        (given,) = _on_device(vectors)
        result = made[0](given.requires_grad_())
        floats = [one for one in result if isinstance(one, Tensor) and one.requires_grad]
        sum((one.sum() for one in floats), given.sum()).backward()

    return step


def _taken(function: Any, words: dict[str, Any]) -> dict[str, Any]:
    """The words that a function has parameters for; of other keywords, which it passes on, the size."""
    named = inspect.signature(function).parameters.values()
    passed = {"codebook_size"} if any(one.kind is one.VAR_KEYWORD for one in named) else set()
    return {
        name: one for name, one in words.items() if name in passed | {one.name for one in named}
    }


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
        if hasattr(made[0], "aggregate"):
            made[0].aggregate()

    return step


LIBRARIES: dict[str, Callable[[], Iterator[tuple[str, Step]]]] = {
    one.__name__: one
    for one in (
        torchmetrics,
        kornia,
        pytorch_metric_learning,
        diffusers,
        captum,
        monai,
        pytorch_optimizer,
        vector_quantize_pytorch,
    )
}
UNSEEN = tuple(LIBRARIES)[4:]
