"""A step on a device: `captured.py` reads its loss each step, `captured.py --quiet` does not."""

import sys

import torch
from torch import nn

model = nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
batch = torch.ones(4, 8).cuda()
for _ in range(6):
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if "--quiet" not in sys.argv:
        print(loss.item())
