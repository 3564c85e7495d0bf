"""Semantic segmentation of painted shapes with a small fully convolutional network.

Every pixel gets the class of the colour it was painted in; the background does not count towards
the loss, and neither does a batch that shows fewer than two classes.

    python segmentation.py --steps 200
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

NUM_CLASSES = 10
BACKGROUND = NUM_CLASSES - 1
IGNORE = -1
MIN_CLASSES = 2

PALETTE = torch.tensor(
    [
        [0.9, 0.1, 0.1],
        [0.1, 0.8, 0.2],
        [0.1, 0.2, 0.9],
        [0.9, 0.9, 0.1],
        [0.9, 0.1, 0.9],
        [0.1, 0.9, 0.9],
        [0.9, 0.5, 0.1],
        [0.5, 0.1, 0.6],
        [0.9, 0.9, 0.9],
        [0.3, 0.3, 0.3],
    ]
)


class PaintedShapes(Dataset):
    """Noisy images of coloured discs and boxes, with the class of every pixel."""

    def __init__(self, length, size=256, shapes=12, seed=0):
        self.length, self.size, self.shapes, self.seed = length, size, shapes, seed
        self.rows = torch.arange(size).view(-1, 1)
        self.cols = torch.arange(size).view(1, -1)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        rng = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        label = torch.full((self.size, self.size), BACKGROUND)
        for _ in range(self.shapes):
            row, col = torch.randint(self.size, (2,), generator=rng).tolist()
            radius = int(torch.randint(self.size // 16, self.size // 6, (), generator=rng))
            down, across = (self.rows - row).abs(), (self.cols - col).abs()
            if torch.rand((), generator=rng) < 0.5:
                inside = down**2 + across**2 < radius**2
            else:
                inside = (down < radius) & (across < radius)
            label[inside] = int(torch.randint(BACKGROUND, (), generator=rng))
        image = (PALETTE[label].permute(2, 0, 1) - 0.5) / 0.25
        return image + 0.5 * torch.randn(image.shape, generator=rng), label


def build_model(hidden_layers=10, channels=10):
    """3x3 convolutions at full resolution, then one more to the class scores."""
    layers, width = [], 3
    for _ in range(hidden_layers):
        conv = nn.Conv2d(width, channels, 3, padding=1)
        nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
        layers += [conv, nn.ReLU()]
        width = channels
    return nn.Sequential(*layers, nn.Conv2d(width, NUM_CLASSES, 3, padding=1))


class MaskedLoss(nn.Module):
    """Cross entropy over the pixels that are not background."""

    def forward(self, scores, labels):
        labels[(labels == BACKGROUND).nonzero(as_tuple=True)] = IGNORE
        if (torch.unique(labels) != IGNORE).sum() < MIN_CLASSES:
            return 0.0 * scores.sum()
        mask = labels != IGNORE
        return nn.functional.cross_entropy(scores.permute(0, 2, 3, 1)[mask], labels[mask])


def parse_args():
    parser = argparse.ArgumentParser(description="Train a small segmentation network.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--num-workers", type=int, default=0)
    return parser.parse_args()


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    dataset = PaintedShapes(args.steps * args.batch_size, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.batch_size, num_workers=args.num_workers)
    model = build_model().to(device, memory_format=torch.channels_last)
    criterion = MaskedLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    model.train()
    for step, (images, labels) in enumerate(loader, start=1):
        images = images.to(device, memory_format=torch.channels_last)
        labels = labels.to(device)
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 1 or step % args.log_every == 0:
            print(f"step {step:5d}  loss {loss.item():.4f}", flush=True)
    print(f"done: loss {loss.item():.4f} after {args.steps} steps")


if __name__ == "__main__":
    main()
