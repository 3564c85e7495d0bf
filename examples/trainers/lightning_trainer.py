"""A small convolutional network on generated images, trained by Lightning's Trainer in 80% of its memory."""

import argparse

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchtrim.integrations import TorchtrimCallback


class Classifier(L.LightningModule):
    """Four convolutions and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after in ((3, 16), (16, 32), (32, 32), (32, 32)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))

    def training_step(
        self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int
    ) -> torch.Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.net(images), labels)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> None:
        images, labels = batch
        self.log("accuracy", (self.net(images).argmax(1) == labels).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory", default="80%")
    parser.add_argument("--plain", action="store_true", help="train without torchtrim, to compare")
    options = parser.parse_args()
    L.seed_everything(0)
    images = torch.randn(128, 3, 32, 32)
    data = TensorDataset(images, (images.mean((1, 2, 3)) * 50).long() % 10)
    module = Classifier()
    trainer = L.Trainer(
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[] if options.plain else [TorchtrimCallback(memory=options.memory)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, DataLoader(data, 16, shuffle=True), DataLoader(data, 32))
    print("accuracy", trainer.callback_metrics["accuracy"].item())
    print("weights", sum(one.double().sum().item() for one in module.parameters()))


if __name__ == "__main__":
    main()
