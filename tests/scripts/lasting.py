"""Trains and says all that it knows after each step; the argument says what else a step does."""

import random
import sys
from os import environ
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

kind = sys.argv[1]
torch.manual_seed(3)
random.seed(3)


class Numbers(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        torch.manual_seed(index)
        return torch.randn(8), index % 3


class Block(nn.Module):
    """From the seventh step on a second run of it gives something else, if it is to break."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        exec(
            "environ['CALLS'] = str(int(environ['CALLS']) + 1)", globals()
        )  # out of its source's sight
        late = kind == "breaks" and steps >= 6
        return x + self.drop(
            torch.tanh(self.norm(self.linear(x * (int(environ["CALLS"]) if late else 1))))
        )


environ["CALLS"] = "0"
losses, steps = [], 0
model = nn.Sequential(Block(), Block(), nn.Linear(8, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
loader = DataLoader(
    Numbers(), batch_size=2, shuffle=True, num_workers=1 if kind == "workers" else 0
)
log = Path("log.txt").open("w")  # noqa: SIM115
for steps, (x, y) in enumerate(loader):
    y.remainder_(2)
    x.add_(random.random())
    loss = nn.functional.cross_entropy(model(x), y)
    if kind == "writes":
        Path("middle.txt").write_text(f"{steps}")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    environ["CALLS"] = "0"
    losses.append(loss.item())
    log.write(f"{loss.item()}\n")
    print(
        steps + 1, loss.item(), len(losses), int(y.sum()), float(model[0].norm.running_mean.sum())
    )
    print(random.random(), float(torch.rand(1)), scheduler.get_last_lr(), flush=True)
    Path(f"after-{steps + 1}.txt").write_text("done")
