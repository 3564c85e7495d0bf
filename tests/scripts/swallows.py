"""A loop that catches everything, tries again, and prints with tqdm."""

import torch
from torch import nn
from tqdm import tqdm

model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in tqdm(range(10_000)):
    try:
        optimizer.zero_grad()
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    except:  # noqa: E722
        print("swallowed")
