"""A small network on generated images in a loop with accelerate, trained in 80% of its memory."""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from torchtrim.integrations import TorchtrimHook


def network() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 32), (32, 32)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def loss_of(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(images), labels)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory", default="80%")
    parser.add_argument("--plain", action="store_true", help="train without torchtrim, to compare")
    options = parser.parse_args()
    torch.manual_seed(0)
    images = torch.randn(128, 3, 32, 32)
    data = TensorDataset(images, (images.mean((1, 2, 3)) * 50).long() % 10)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(data, 16, shuffle=True)
    )
    loss = loss_of if options.plain else TorchtrimHook(accelerator, options.memory)(loss_of)
    for epoch in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                value = loss(model, *batch)
                accelerator.backward(value)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        print(f"epoch {epoch}: loss {value.item():.4f}")
    accelerator.end_training()
    print("weights", sum(one.double().sum().item() for one in model.parameters()))


if __name__ == "__main__":
    main()
