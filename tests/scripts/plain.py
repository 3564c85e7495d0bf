"""An ordinary loop: argparse, a guard, a loader with workers, a scheduler, clipping, relative files."""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--amp", action="store_true")
    parser.add_argument("--context")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--read")
    args = parser.parse_args()
    if args.read:
        print(Path(args.read).read_text())
    torch.manual_seed(1)
    model = nn.Sequential(
        *(
            layer
            for _ in range(6)
            for layer in (nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1))
        ),
        nn.Linear(32, 4),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    data = TensorDataset(torch.randn(256, 32), torch.randint(0, 4, (256,)))
    loader = DataLoader(
        data, 64, shuffle=True, num_workers=args.workers, multiprocessing_context=args.context
    )
    for epoch in range(args.epochs):
        for number, (x, y) in enumerate(loader):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.amp):
                loss = nn.functional.cross_entropy(model(x), y) / args.accumulate
            loss.backward()
            if (number + 1) % args.accumulate == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
        model.eval()
        with torch.no_grad():
            model(torch.randn(4, 32))
        model.train()
        print("epoch", epoch)


if __name__ == "__main__":
    main()
