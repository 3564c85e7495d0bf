"""Writes to views, slices and masks in forward."""

import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(128, 128)

    def forward(self, x):
        y = self.linear(x)
        room = y.new_zeros(y.shape[0], 2, 128)
        room[:, 0] = y
        room[:, 1].add_(x)
        room.view(-1)[::7].mul_(0.5)
        z = room.sum(1)
        z[z > 1] = 1
        return z.clone().relu_()


net = nn.Sequential(*[Layer() for _ in range(5)])
opt = torch.optim.SGD(net.parameters(), 0.1)


def batch():
    return torch.randn(512, 128)


def loss_of(x):
    return net(x).square().mean()


for _ in range(8):
    opt.zero_grad()
    loss = loss_of(batch())
    loss.backward()
    opt.step()
