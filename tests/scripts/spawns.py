"""Ranks that the script spawns by itself, in one way or another, at an address of its own."""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn.parallel import DistributedDataParallel


def work(rank: int, world: int) -> None:
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12355"
    dist.init_process_group("gloo", rank=rank, world_size=world)
    train()


def train() -> None:
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(30):
        model(torch.randn(8, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    time.sleep(0.3)  # as in ranks.py
    dist.destroy_process_group()


def launched() -> None:
    dist.init_process_group("gloo")
    train()


if __name__ == "__main__":
    how = sys.argv[1] if len(sys.argv) > 1 else "spawn"
    if how == "spawn":
        mp.spawn(work, args=(2,), nprocs=2)
    elif how == "start":
        started = mp.start_processes(work, args=(2,), nprocs=2, join=False)
        while not started.join():
            pass
    else:
        config = LaunchConfig(1, 1, 2, rdzv_backend="static", rdzv_endpoint="localhost:12356")
        config.rdzv_configs = {"rank": 0}
        elastic_launch(config, launched)()
