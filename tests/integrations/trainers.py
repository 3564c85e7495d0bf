"""Stand-ins for transformers, Lightning and accelerate: what the integrations use of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

STEPS, ACCUMULATED = 5, 2
Batch = dict[str, torch.Tensor]


def network() -> nn.Sequential:
    """Layers with much to recompute, dropout and BatchNorm."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(32, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(32, 4))


def batches() -> Iterator[list[Batch]]:
    """The micro-batches of each step."""
    random = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        yield [
            {"x": torch.randn(256, 32, generator=random), "labels": torch.arange(256) % 4}
            for _ in range(ACCUMULATED)
        ]


def loss_of(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), labels)


class Accelerator:
    """`steps`: called before each step of the loop; `scaler` as accelerate's."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self._optimizers = [SimpleNamespace(optimizer=one) for one in optimizers]
        self.scaler = None
        self.num_processes = 1
        self.ended = 0

    def backward(self, loss: torch.Tensor) -> None:
        (loss / ACCUMULATED).backward()

    def clip_grad_norm_(self, parameters: Any, most: float) -> torch.Tensor:
        return nn.utils.clip_grad_norm_(parameters, most)

    def end_training(self) -> None:
        self.ended += 1


class TransformersTrainer:
    """A loop as `transformers.Trainer` has it: accumulation, clipping, a schedule, evaluation, metrics."""

    def __init__(
        self, *callbacks: Any, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    ) -> None:
        self.model = network()
        self.args = SimpleNamespace(world_size=1, n_gpu=1, max_grad_norm=1.0, torch_compile=False)
        self.callback_handler = SimpleNamespace(callbacks=[*callbacks])
        self.state = SimpleNamespace(global_step=0)
        self.optimizer = SimpleNamespace(optimizer=optimizer(self.model.parameters(), lr=1e-2))
        self.accelerator = Accelerator(self.optimizer.optimizer)
        self.metrics: dict[str, list[float]] = {"loss": []}
        self.tokens = 0
        self.seen: list[Callable[[], None]] = []

    def tell(self, event: str) -> None:
        for one in self.callback_handler.callbacks:
            getattr(one, event)(self.args, self.state, None, model=self.model)

    def training_step(self, model: nn.Module, inputs: Batch, count: int = 0) -> torch.Tensor:
        model.train()
        loss = loss_of(model, inputs["x"], inputs.pop("labels"))
        self.metrics["loss"].append(loss.item())
        self.tokens += 1
        self.accelerator.backward(loss)
        return loss.detach()

    def train(self) -> list[float]:
        torch.manual_seed(2)
        raw = self.optimizer.optimizer
        schedule = torch.optim.lr_scheduler.LinearLR(raw, 1.0, 0.1, STEPS)
        self.tell("on_train_begin")
        for micro_batches in batches():
            self.tell("on_step_begin")
            for inputs in micro_batches:
                self.training_step(self.model, inputs, count=512)
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
            self.tell("on_pre_optimizer_step")
            raw.step()
            schedule.step()
            self.model.zero_grad()
            self.state.global_step += 1
            self.tell("on_step_end")
            self.model.eval()
            with torch.no_grad():
                self.metrics["loss"].append(self.model(torch.ones(8, 32)).sum().item())
        self.tell("on_train_end")
        return weights(self.model)


class LightningModule(nn.Module):
    automatic_optimization = True

    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.logged: list[float] = []

    def log(self, name: str, value: torch.Tensor) -> None:
        self.logged.append(value.item())

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, torch.Tensor]:
        loss = loss_of(self.net, **batch)
        self.log("loss", loss)
        return {"loss": loss}

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: float, gradient_clip_algorithm: str
    ) -> None:
        assert gradient_clip_algorithm == "norm"
        nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)


class LightningTrainer:
    """A loop as Lightning's: the closure zeroes gradients between forward and backward."""

    world_size = 1
    accumulate_grad_batches = ACCUMULATED
    gradient_clip_val, gradient_clip_algorithm = 1.0, "norm"

    def __init__(self, *callbacks: Any) -> None:
        self.callbacks = callbacks
        self.module = LightningModule()
        self.optimizers = [torch.optim.AdamW(self.module.parameters(), lr=1e-2)]
        self.precision_plugin = SimpleNamespace(train_step_context=torch.enable_grad)
        self.global_step = 0

    def tell(self, event: str, *more: Any) -> None:
        for one in self.callbacks:
            getattr(one, event)(self, self.module, *more)

    def fit(self) -> list[float]:
        torch.manual_seed(2)
        self.tell("setup")
        self.tell("on_train_start")
        for micro_batches in batches():
            for number, batch in enumerate(micro_batches):
                self.tell("on_train_batch_start", batch, number)
                loss = self.module.training_step(batch, number)["loss"]
                if not number:
                    self.optimizers[0].zero_grad()
                (loss / ACCUMULATED).backward()
                if number == ACCUMULATED - 1:
                    self.module.configure_gradient_clipping(self.optimizers[0], 1.0, "norm")
                    self.optimizers[0].step()
                    self.global_step += 1
                self.tell("on_train_batch_end", None, batch, number)
        self.tell("on_train_end")
        return weights(self.module)


def weights(model: nn.Module) -> list[float]:
    """All parameters and buffers, as numbers that are equal only if every bit is."""
    return [
        value for one in model.state_dict().values() for value in one.double().flatten().tolist()
    ]
