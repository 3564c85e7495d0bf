"""Trains on several processes, as torchrun starts them: DDP, which reports from the first."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, world = dist.get_rank(), int(os.environ["WORLD_SIZE"])
layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(64, 8)))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(4):
    x, y = torch.randn(8, 64), torch.randint(8, (8,))
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach() / world
    dist.all_reduce(total)
dist.destroy_process_group()
