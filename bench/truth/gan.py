"""Two networks that take turns, with a gradient penalty."""

import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)


def mlp(a, b):
    return nn.Sequential(
        nn.Linear(a, 256),
        nn.LeakyReLU(0.2),
        nn.Linear(256, 256),
        nn.LeakyReLU(0.2),
        nn.Linear(256, b),
    )


maker, judge = mlp(32, 128), mlp(128, 1)
opt, other = torch.optim.Adam(maker.parameters()), torch.optim.Adam(judge.parameters())


for _ in range(8):
    real, fake = torch.randn(512, 128), maker(torch.randn(512, 32))
    mixed = (0.5 * real + 0.5 * fake.detach()).requires_grad_()
    (slope,) = torch.autograd.grad(judge(mixed).sum(), mixed, create_graph=True)
    loss = (
        judge(fake.detach()).mean()
        - judge(real).mean()
        + 10 * (slope.norm(2, 1) - 1).square().mean()
    )
    other.zero_grad()
    loss.backward()
    other.step()
    opt.zero_grad()
    (-judge(fake).mean()).backward()
    opt.step()
