"""Batches from numpy, which torch did not allocate."""

import numpy as np
import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)


draws = np.random.default_rng(0)
net = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(5)])
opt = torch.optim.Adam(net.parameters())


def batch():
    return torch.from_numpy(draws.normal(size=(512, 256)).astype("float32"))


def loss_of(x):
    return net(x).square().mean()


for _ in range(8):
    opt.zero_grad()
    loss = loss_of(batch())
    loss.backward()
    opt.step()
