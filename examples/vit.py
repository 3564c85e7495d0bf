"""A small Vision Transformer that names the favoured colour of a mosaic.

    python vit.py --steps 300 [--amp]

With --amp the forward pass runs under bfloat16 autocast.
"""

import argparse

import torch
from torch import nn

COLOURS = torch.tensor(
    [
        [1.0, -1.0, -1.0],
        [-1.0, 1.0, -1.0],
        [-1.0, -1.0, 1.0],
        [1.0, 1.0, -1.0],
        [1.0, -1.0, 1.0],
        [-1.0, 1.0, 1.0],
    ]
)


def make_mosaics(count, rng, size=64, tile=8):
    """Mosaics of noisy coloured tiles; one colour, the label, is favoured."""
    labels = torch.randint(len(COLOURS), (count,), generator=rng)
    tiles = torch.randint(len(COLOURS), (count, size // tile, size // tile), generator=rng)
    favoured = torch.rand(tiles.shape, generator=rng) < 0.15
    tiles = torch.where(favoured, labels.view(-1, 1, 1), tiles)
    pixels = tiles.repeat_interleave(tile, 1).repeat_interleave(tile, 2)
    images = COLOURS[pixels].permute(0, 3, 1, 2)
    return images + 0.5 * torch.randn(images.shape, generator=rng), labels


class EncoderBlock(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x):
        y = self.norm1(x)
        y, _ = self.attention(y, y, y, need_weights=False)
        x = x + self.dropout(y)
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    def __init__(self, size=64, patch=8, width=96, depth=6, heads=4, dropout=0.1):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2 + 1, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(EncoderBlock(width, heads, dropout) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(COLOURS))

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)
        x = self.blocks(self.dropout(x + self.position))
        return self.head(self.norm(x[:, 0]))


def parse_args():
    parser = argparse.ArgumentParser(description="Train a Vision Transformer on mosaics.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--amp", action="store_true", help="bfloat16 autocast")
    return parser.parse_args()


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    rng = torch.Generator().manual_seed(args.seed)
    model = VisionTransformer().to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)

    model.train()
    for step in range(1, args.steps + 1):
        images, labels = make_mosaics(args.batch_size, rng)
        images, labels = images.to(device), labels.to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=args.amp):
            loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 1 or step % args.log_every == 0:
            print(f"step {step:5d}  loss {loss.item():.4f}", flush=True)
    print(f"done: loss {loss.item():.4f} after {args.steps} steps")


if __name__ == "__main__":
    main()
