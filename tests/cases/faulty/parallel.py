"""What two ranks would do, in one process: a layer in two shards, micro-batches, averaged gradients."""

import torch
from torch import nn

RANKS, MICRO, WIDTH = 2, 2, 8


class RowParallel(nn.Module):
    """Each rank multiplies its half of the columns; the sum of all is the result."""

    def __init__(self):
        super().__init__()
        self.shards = nn.ParameterList(torch.randn(WIDTH, WIDTH // RANKS) / 3 for _ in range(RANKS))
        self.bias = nn.Parameter(torch.full((WIDTH,), 0.1))

    def forward(self, x):
        parts = [
            part @ shard.T for part, shard in zip(x.chunk(RANKS, -1), self.shards, strict=True)
        ]
        return sum(parts) + self.bias


class Stage(nn.Module):
    """A norm that all ranks have, and the layer in shards."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = RowParallel()

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class Pipeline(nn.Module):
    """Two stages, one after the other."""

    def __init__(self):
        super().__init__()
        self.first = Stage()
        self.second = Stage()

    def forward(self, x):
        x = self.first(x)
        return self.second(x)


def shard_of(batch, rank):
    """The samples of a rank."""
    return batch[rank::RANKS]


def main():
    """Train."""
    torch.manual_seed(0)
    model = Pipeline()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(1)
    for _ in range(8):
        batch = torch.randn(8, WIDTH, generator=data)
        for rank in range(RANKS):
            for micro in shard_of(batch, rank).chunk(MICRO):
                loss = model(micro).square().mean()
                loss = loss / MICRO
                loss.backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= RANKS
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
