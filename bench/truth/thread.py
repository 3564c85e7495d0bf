"""A loop in a worker thread."""

import threading

import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
net = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6)])
opt = torch.optim.Adam(net.parameters())


def train():
    for _ in range(8):
        opt.zero_grad()
        net(torch.randn(512, 256)).square().mean().backward()
        opt.step()


worker = threading.Thread(target=train)
worker.start()
worker.join()
