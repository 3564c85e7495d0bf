"""Convolutions with BatchNorm."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)


def block(a, b):
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())


net = nn.Sequential(
    block(3, 16), block(16, 32), nn.MaxPool2d(2), block(32, 32), nn.Flatten(), nn.Linear(8192, 10)
)
opt = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)


def batch():
    return torch.randn(16, 3, 32, 32), torch.randint(10, (16,))


def loss_of(given):
    return F.cross_entropy(net(given[0]), given[1])


for _ in range(8):
    opt.zero_grad()
    loss = loss_of(batch())
    loss.backward()
    opt.step()
