"""An MLP with Adam."""

import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
net = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6)])
opt = torch.optim.Adam(net.parameters())


def batch():
    return torch.randn(512, 256)


def loss_of(x):
    return net(x).square().mean()


for _ in range(8):
    opt.zero_grad()
    loss = loss_of(batch())
    loss.backward()
    opt.step()
