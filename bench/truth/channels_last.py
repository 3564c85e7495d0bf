"""Depthwise convolutions in channels last."""

import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
net = nn.Sequential(
    *[
        nn.Sequential(
            nn.Conv2d(32, 32, 3, padding=1, groups=32),
            nn.Conv2d(32, 32, 1),
            nn.BatchNorm2d(32),
            nn.SiLU(),
        )
        for _ in range(3)
    ]
).to(memory_format=torch.channels_last)
opt = torch.optim.AdamW(net.parameters())


def batch():
    return torch.randn(8, 32, 32, 32).to(memory_format=torch.channels_last)


def loss_of(x):
    return net(x).square().mean()


for _ in range(8):
    opt.zero_grad()
    loss = loss_of(batch())
    loss.backward()
    opt.step()
