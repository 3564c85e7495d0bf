"""Reads shuffled samples with augmentation, a shard of them, through a loader."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

SAMPLES, WORLD = 24, 2


class Noisy(Dataset):
    """Samples that are turned and shifted at random."""

    def __init__(self):
        self.rows = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(3))

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        row = self.rows[index]
        if random.random() < 0.5:
            row = row.flip(0)
        return row + 0.1 * torch.randn(6), index % 3


class Shards(Sampler):
    """The samples of one rank, in another order each epoch."""

    def __init__(self, rank):
        self.rank, self.epoch = rank, 0

    def __len__(self):
        return SAMPLES // WORLD

    def __iter__(self):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch))
        return iter(order[self.rank :: WORLD].tolist())


class Net(nn.Module):
    """A small classifier that normalizes its input with what it was told."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.register_buffer("scale", torch.tensor(0.9))

    def forward(self, x):
        return self.net(x * self.scale)


def main():
    """Train."""
    torch.manual_seed(0)
    random.seed(0)
    model = Net()
    sampler = Shards(0)
    loader = DataLoader(Noisy(), batch_size=6, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(5):
        sampler.epoch = epoch
        for rows, labels in loader:
            loss = nn.functional.cross_entropy(model(rows), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
