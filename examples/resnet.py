"""A ResNet of basic blocks that tells the direction of a striped texture.

    python resnet.py --steps 300

The textures differ in stripe width, phase, colour and noise; the class is the direction alone.
"""

import argparse
import math

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

DIRECTIONS = 8


class Stripes(Dataset):
    """Coloured sine gratings under noise, each with the number of its direction."""

    def __init__(self, length, size=64, seed=0):
        self.length, self.seed = length, seed
        axis = torch.linspace(-1, 1, size)
        self.y, self.x = torch.meshgrid(axis, axis, indexing="ij")

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        rng = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        label = int(torch.randint(DIRECTIONS, (), generator=rng))
        waves, phase, tilt = torch.rand(3, generator=rng).tolist()
        angle = math.pi * (label + 0.4 * (tilt - 0.5)) / DIRECTIONS
        along = self.x * math.cos(angle) + self.y * math.sin(angle)
        grating = torch.sin(math.pi * (3 + 7 * waves) * along + 2 * math.pi * phase)
        colour = torch.randn(3, 1, 1, generator=rng)
        return colour * grating + 0.5 * torch.randn(3, *grating.shape, generator=rng), label


class BasicBlock(nn.Module):
    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return self.relu(out)


def stage(inputs, outputs, blocks, stride):
    first = BasicBlock(inputs, outputs, stride)
    return nn.Sequential(first, *(BasicBlock(outputs, outputs) for _ in range(blocks - 1)))


class ResNet(nn.Module):
    def __init__(self, width=16, blocks=3):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        )
        self.stage1 = stage(width, width, blocks, stride=1)
        self.stage2 = stage(width, 2 * width, blocks, stride=2)
        self.stage3 = stage(2 * width, 4 * width, blocks, stride=2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(4 * width, DIRECTIONS)

    def forward(self, x):
        x = self.stage3(self.stage2(self.stage1(self.stem(x))))
        return self.head(self.pool(x).flatten(1))


def parse_args():
    parser = argparse.ArgumentParser(description="Train a ResNet on striped textures.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--num-workers", type=int, default=0)
    return parser.parse_args()


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    dataset = Stripes(args.steps * args.batch_size, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size, num_workers=args.num_workers)
    model = ResNet().to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)

    model.train()
    for step, (images, labels) in enumerate(loader, start=1):
        images, labels = images.to(device), labels.to(device)
        scores = model(images)
        loss = criterion(scores, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 1 or step % args.log_every == 0:
            accuracy = (scores.argmax(1) == labels).float().mean()
            print(f"step {step:5d}  loss {loss.item():.4f}  accuracy {accuracy.item():.2f}")
    print(f"done: loss {loss.item():.4f} after {args.steps} steps")


if __name__ == "__main__":
    main()
