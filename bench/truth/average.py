"""An average of the weights, a checkpoint by hand and per-step logs."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
torch.set_num_threads(1)
layers = nn.ModuleList(
    nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(5)
)
head = nn.Linear(128, 10)
opt = torch.optim.AdamW([*layers.parameters(), *head.parameters()])
average = torch.optim.swa_utils.AveragedModel(layers)
logs = []

for _ in range(8):
    x = torch.randn(512, 128)
    for layer in layers:
        x = x + checkpoint(layer, x, use_reentrant=False)
    loss = head(x).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    average.update_parameters(layers)
    logs.append(loss.item())
