"""Ways in which a script can fail; the first argument says which."""

import os
import signal
import sys
import threading
import time

import torch
from torch import nn

kind = sys.argv[1]
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), 0.1)


def step(size: int = 16) -> None:
    optimizer.zero_grad()
    model(torch.randn(size, 64)).square().mean().backward()
    optimizer.step()


if kind == "crash":
    step()
    raise ValueError("the sixth seal")
if kind == "crash-in-step":
    model(torch.randn(16, 65))
if kind == "exit":
    sys.exit(3)
if kind == "early":
    sys.exit(0)
if kind == "no-optimizer":
    for _ in range(3):
        model(torch.randn(16, 64)).sum().backward()
if kind == "stdin":
    input("name? ")
if kind == "memory":
    y = model(torch.randn(4096, 64))
    z = y.new_empty(2**50)
if kind == "thread":
    thread = threading.Thread(target=step)
    thread.start()
    thread.join()
if kind == "hang":
    step()
    time.sleep(10_000)
if kind == "killed":
    step()
    os.kill(os.getpid(), signal.SIGKILL)
if kind == "one":
    step()
if kind == "two":
    step()
    step()
if kind in ("leaves", "leaves-early"):
    step()
    step()
    print("leaves", flush=True)
    os._exit(0 if kind == "leaves" else 5)
if kind == "three":
    for _ in range(3):
        step()
