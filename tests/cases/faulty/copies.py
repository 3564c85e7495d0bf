"""Copies batches ahead as a side stream would, and hides tokens, by masks of one dimension and of two."""

import torch
from torch import nn

SIZE = 4


class Stream:
    """Copies that are made when somebody waits for them, which is as late as a stream may be."""

    def __init__(self):
        self.waiting = []

    def copy(self, to, source):
        """Return at once."""
        self.waiting.append((to, source))

    def wait(self):
        """Make them."""
        for to, source in self.waiting:
            to.copy_(source)
        self.waiting.clear()


class Net(nn.Module):
    """Learns a token for what is hidden."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.full((SIZE,), 0.3))
        self.net = nn.Sequential(nn.Linear(SIZE, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x, mask):
        x = x * 1.0
        x[mask] = self.token
        return self.net(x)


def main():
    """Train, with the gradients scaled by their norm, which is read on the host."""
    torch.manual_seed(0)
    model, stream = Net(), Stream()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(1)
    pinned, batch = torch.zeros(SIZE, SIZE, SIZE), torch.zeros(SIZE, SIZE, SIZE)
    host = torch.ones(())
    for number in range(8):
        pinned.normal_(generator=data)
        stream.copy(batch, pinned)
        stream.wait()
        mask = torch.rand((SIZE,) * (1 + number % 2), generator=data) < 0.5
        loss = model(batch, mask).square().mean()
        loss.backward()
        norm = sum(p.grad.square().sum() for p in model.parameters()).sqrt()
        stream.copy(host, norm)
        stream.wait()  # for the norm
        scale = 1 / (1 + host.item())
        for parameter in model.parameters():
            parameter.grad.mul_(scale)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
