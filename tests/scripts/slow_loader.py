"""Trains on samples that come slowly; `--module` reads them in a worker, and a module changes each."""

import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

IN_MODULE = "--module" in sys.argv
CHANGED = nn.Threshold(-1.0, 0.0)


class Slow(Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, index):
        time.sleep(0.015)
        row = torch.full((4,), index / 4000)
        return CHANGED(row) if IN_MODULE else row, index % 2


def main():
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(Slow(), batch_size=8, shuffle=True, num_workers=int(IN_MODULE))
    for rows, labels in loader:
        loss = nn.functional.cross_entropy(model(rows), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
