"""A small DCGAN that learns to draw blurry rings.

    python gan.py --steps 400

Besides the two losses it reports how far the generated pixels are from the real ones in mean and
spread: a number that falls as the pictures get better.
"""

import argparse

import torch
from torch import nn

SIZE = 64
LATENT = 64


def draw_rings(count, rng):
    """Soft bright rings on black, at random places and of random radius, scaled to [-1, 1]."""
    axis = torch.linspace(-1, 1, SIZE)
    row, col = 0.6 * torch.rand(2, count, 1, 1, generator=rng) - 0.3
    radius = 0.3 + 0.3 * torch.rand(count, 1, 1, generator=rng)
    distance = torch.hypot(axis.view(-1, 1) - row, axis.view(1, -1) - col)
    rings = torch.exp(-(((distance - radius) / 0.1) ** 2))
    return 2 * rings.unsqueeze(1) - 1


def build_generator(width=32):
    def double(inputs, outputs):
        return [
            nn.ConvTranspose2d(inputs, outputs, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
        ]

    return nn.Sequential(
        nn.ConvTranspose2d(LATENT, 4 * width, 4, bias=False),
        nn.BatchNorm2d(4 * width),
        nn.ReLU(),
        *double(4 * width, 4 * width),
        *double(4 * width, 2 * width),
        *double(2 * width, width),
        nn.ConvTranspose2d(width, 1, 4, stride=2, padding=1),
        nn.Tanh(),
    )


def build_discriminator(width=32):
    def halve(inputs, outputs):
        return [
            nn.Conv2d(inputs, outputs, 4, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.LeakyReLU(0.2),
        ]

    return nn.Sequential(
        nn.Conv2d(1, width, 4, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        *halve(width, 2 * width),
        *halve(2 * width, 4 * width),
        *halve(4 * width, 4 * width),
        nn.Conv2d(4 * width, 1, 4),
        nn.Flatten(),
    )


def init_weights(module):
    if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)


@torch.no_grad()
def statistics_gap(real, fake):
    """Mean distance between the per-pixel means and spreads of two batches of images."""
    means = (real.mean(0) - fake.mean(0)).abs().mean()
    spreads = (real.std(0) - fake.std(0)).abs().mean()
    return (means + spreads).item()


def parse_args():
    parser = argparse.ArgumentParser(description="Train a DCGAN on drawings of rings.")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=96)
    parser.add_argument("--lr", type=float, default=1e-3, help="of the generator")
    parser.add_argument("--lr-d", type=float, default=2.5e-4, help="of the discriminator")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=10)
    return parser.parse_args()


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    rng = torch.Generator().manual_seed(args.seed)
    generator = build_generator().apply(init_weights).to(device)
    discriminator = build_discriminator().apply(init_weights).to(device)
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=args.lr, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=args.lr_d, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    ones = torch.ones(args.batch_size, 1, device=device)
    zeros = torch.zeros(args.batch_size, 1, device=device)

    for step in range(1, args.steps + 1):
        real = draw_rings(args.batch_size, rng).to(device)
        fake = generator(torch.randn(args.batch_size, LATENT, 1, 1, device=device))

        optimizer_d.zero_grad()
        loss_d = criterion(discriminator(real), ones)
        loss_d = loss_d + criterion(discriminator(fake.detach()), zeros)
        loss_d.backward()
        optimizer_d.step()

        optimizer_g.zero_grad()
        loss_g = criterion(discriminator(fake), ones)
        loss_g.backward()
        optimizer_g.step()

        if step == 1 or step % args.log_every == 0:
            losses = f"loss {loss_d.item():.4f} (D) {loss_g.item():.4f} (G)"
            print(f"step {step:5d}  {losses}  gap {statistics_gap(real, fake):.4f}", flush=True)
    print(f"done: gap {statistics_gap(real, fake):.4f} after {args.steps} steps")


if __name__ == "__main__":
    main()
