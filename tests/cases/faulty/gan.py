"""Two networks against each other, with an optimizer each."""

import torch
from torch import nn
from torch.nn import functional as F


class Generator(nn.Module):
    """Noise to samples."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, noise):
        return self.net(noise)


class Critic(nn.Module):
    """Samples to scores."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(4, 8)
        self.score = nn.Linear(8, 1)

    def forward(self, x):
        return self.score(F.leaky_relu(self.hidden(x), 0.2))


def penalty_of(critic, real):
    """How far the critic's slope is from one."""
    real = real.clone().requires_grad_()
    (slope,) = torch.autograd.grad(critic(real).sum(), real, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


def main():
    """Train."""
    torch.manual_seed(0)
    maker, critic = Generator(), Critic()
    of_maker = torch.optim.Adam(maker.parameters(), lr=0.01)
    of_critic = torch.optim.Adam(critic.parameters(), lr=0.02, betas=(0.5, 0.9))
    data = torch.Generator().manual_seed(1)
    for _ in range(8):
        real = torch.randn(5, 4, generator=data)
        fake = maker(torch.randn(5, 3, generator=data))
        loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
        loss = loss + penalty_of(critic, real)
        loss.backward()
        of_critic.step()
        of_critic.zero_grad()
        F.softplus(-critic(fake)).mean().backward()
        of_maker.step()
        of_maker.zero_grad()
        of_critic.zero_grad()


if __name__ == "__main__":
    main()
