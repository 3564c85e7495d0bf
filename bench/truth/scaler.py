"""An MLP under autocast with a GradScaler."""

import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)
net = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(6)])
opt = torch.optim.SGD(net.parameters(), 0.1)
scaler = torch.amp.GradScaler("cpu")

for _ in range(8):
    opt.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = net(torch.randn(512, 256)).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
