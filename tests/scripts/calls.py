"""Runs a model without training it: `plain`, `branches` (on values), `trains`, `trainmode`, `two` models."""

import sys

import torch
from torch import nn

KIND = sys.argv[1]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers, nn.MaxPool2d(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        made = self.body(x) if KIND != "branches" or x.sum() > 0 else self.body(-x)
        return self.head(made.mean((2, 3)))


def main():
    torch.manual_seed(0)
    net, after = Net().train(KIND == "trainmode"), nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    if KIND != "trainmode":
        net.eval()
    for _ in range(6):
        images = torch.randn(8, 3, 64, 64)
        with torch.set_grad_enabled(KIND == "trains"):
            out = net(images)
            if KIND == "two":
                out = after(out)
        if KIND == "trains":
            out.sum().backward()


main()
