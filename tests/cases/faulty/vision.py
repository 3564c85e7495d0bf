"""Classifies random pictures: convolutions, norms, dropout, a gate, an average of the weights."""

import copy

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """A convolution whose result is scaled by a gate."""

    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.BatchNorm2d(width)
        self.drop = nn.Dropout(0.2)
        self.scale = 0.5

    def forward(self, x, gate=None):
        y = F.relu(self.norm(self.conv(x)))
        y = self.drop(y)
        if gate is not None:
            y = y * gate
        return x + self.scale * y


class Net(nn.Module):
    """Three blocks between a stem and a head; remembers the sizes of its batches."""

    def __init__(self, width=8, classes=4):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, classes)
        self.register_buffer("mean", torch.full((1, 3, 1, 1), 0.1))
        self.seen = []

    def forward(self, x):
        x = self.stem(x - self.mean)
        gate = torch.sigmoid(x.mean((2, 3), keepdim=True))
        for block in self.blocks:
            x = block(x, gate=gate)
        small, where = F.max_pool2d(x, 2, return_indices=True)
        x = x + F.max_unpool2d(small, where, 2)
        self.seen.append(x.shape[0])
        return self.head(F.silu(x).mean((2, 3)))


def groups(model):
    """Weights decay, biases and norms do not."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": matrices, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}]


@torch.no_grad()
def follow(average, model):
    """Move the average a little towards the model."""
    for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
        slow.lerp_(fast, 0.1)
    for slow, fast in zip(average.buffers(), model.buffers(), strict=True):
        slow.copy_(fast)


def main():
    """Train."""
    torch.manual_seed(0)
    model = Net()
    average = copy.deepcopy(model).requires_grad_(False)
    average.eval()
    optimizer = torch.optim.SGD(groups(model), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    data = torch.Generator().manual_seed(1)
    for _ in range(8):
        pictures = torch.rand(4, 3, 8, 8, generator=data)
        labels = torch.randint(4, (4,), generator=data)
        model.train()
        loss = F.cross_entropy(model(pictures), labels, label_smoothing=0.1)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        follow(average, model)
        with torch.no_grad():
            average(pictures)


if __name__ == "__main__":
    main()
