"""A loop of several ranks, as torchrun starts them, with all that can be wrong with one as options."""

import argparse
import contextlib
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Slow(Dataset):
    """Reads slowly."""

    def __init__(self, data: Dataset, seconds: float) -> None:
        self.data, self.seconds = data, seconds

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        time.sleep(self.seconds)
        return self.data[index]


class Net(nn.Module):
    """A chain of blocks, and a head that need not be used."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.first = nn.Linear(32, width)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(blocks))
        )
        self.head = nn.Linear(width, 4)
        self.spare = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor, spare: bool) -> torch.Tensor:
        x = self.blocks(self.first(x))
        return self.head(x) + self.spare(x) if spare else self.head(x)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--find-unused", action="store_true")
    parser.add_argument("--leave-spare", action="store_true")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--no-sync", action="store_true")
    parser.add_argument("--slow-rank", type=int, default=-1)
    parser.add_argument("--slow-loader", type=int, default=-1)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--keeps", type=int, default=-1)
    parser.add_argument("--raises", type=int, default=-1)
    parser.add_argument("--stalls", type=int, default=-1)
    parser.add_argument("--dies", type=int, default=-1)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--seed-of", type=int, default=-1)
    parser.add_argument("--pids")
    parser.add_argument("--at", type=int, default=2)
    return parser.parse_args()


def fault(args: argparse.Namespace, rank: int, step: int) -> None:
    """What is wrong with this rank in this step."""
    if step == args.at and rank == args.raises:
        raise ValueError("this rank has no more data")
    if step == args.at and rank == args.stalls:
        time.sleep(3600)
    if step == args.at and rank == args.dies:
        os.kill(os.getpid(), 9)
    if rank == args.slow_rank:
        time.sleep(args.seconds)


def main() -> None:
    args = arguments()
    dist.init_process_group(args.backend)
    rank, local = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if args.cuda else torch.device("cpu")
    if args.cuda:
        torch.cuda.set_device(local)
    if args.pids:
        Path(args.pids, str(rank)).write_text(str(os.getpid()))
    torch.manual_seed(1)
    model = DistributedDataParallel(
        Net(args.width, args.blocks).to(device),
        device_ids=[local] if args.cuda else None,
        find_unused_parameters=args.find_unused,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    kept = torch.ones(2**20 if rank == args.keeps else 1, device=device)
    if rank == args.seed_of:
        torch.manual_seed(2)
    data: Dataset = TensorDataset(torch.randn(args.rows, 32), torch.randint(0, 4, (args.rows,)))
    if rank == args.slow_loader:
        data = Slow(data, args.seconds / args.batch)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.batch, sampler=sampler)
    step = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            last = (step + 1) % args.accumulate == 0
            fault(args, rank, step)
            within = model.no_sync() if args.no_sync and not last else contextlib.nullcontext()
            with within:
                out = model(x.to(device), not args.leave_spare)
                nn.functional.cross_entropy(out, y.to(device)).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
            step += 1
    print(rank, "done", kept.sum().item())
    # A deadlock of torch 2.13: gloo's threads need the GIL to let go of the last exchange, and who ends DDP
    # joins them while holding it. They are done by then.
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
