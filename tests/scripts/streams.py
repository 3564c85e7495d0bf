"""Streams that grow, and one that does not: `streams.py KIND`, 80 frames of it."""

import functools
import sys

import torch
from torch import nn

from torchtrim.stream import bound_caches, window

KIND = sys.argv[1]
REMEMBER = ("all", "declared", "short", "broken")


class Tracker(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.memory = {}
        self.seen = torch.zeros(0, 16)
        self.frame = 0

    def forward(self, image):
        near = range(max(self.frame - 5, 0), self.frame) if KIND in REMEMBER else ()
        past = [self.memory[one] for one in near]
        out = torch.tanh(self.layer(torch.stack([image, *past]).sum(0)))
        if KIND in REMEMBER:
            self.memory[self.frame] = out.detach()
        if KIND == "all":
            self.seen = torch.cat([self.seen, out.detach()[:1]])
        self.frame += 1
        if KIND == "broken" and self.frame == 30:
            raise RuntimeError("the camera was unplugged")
        return out


@functools.cache
def table(frame):
    return torch.full((32,), float(frame))


def main():
    tracker, log, newest, total = Tracker(), [], [], torch.zeros(())
    if KIND in ("declared", "short"):
        bound_caches(tracker, {"memory": window(5 if KIND == "declared" else 1)})
    for frame in range(14 if KIND == "flat" else 80):
        torch.manual_seed(frame)
        with torch.set_grad_enabled(KIND == "all"):
            out = tracker(torch.randn(16, 16))
        newest = [*newest[-4:], out.detach()]
        if KIND == "all":
            log.append({"frame": frame, "mask": out.detach().clone()})
            table(frame)
            total = total + out.square().sum()


if KIND == "none":
    print("nothing is called")
else:
    main()
