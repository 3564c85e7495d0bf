"""Sparse gradients of embeddings, in two optimizers."""

import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
table = nn.EmbeddingBag(20000, 32, mode="sum", sparse=True)
net = nn.Sequential(
    nn.Linear(32, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 1)
)
opt, other = torch.optim.Adam(net.parameters()), torch.optim.SparseAdam(table.parameters())

for _ in range(8):
    opt.zero_grad()
    other.zero_grad()
    loss = net(table(torch.randint(20000, (1024, 10)))).square().mean()
    loss.backward()
    opt.step()
    other.step()
