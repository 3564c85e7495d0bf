# ruff: noqa: F401, F821
"""A small language model that trains; at `#:` a late change is put in."""

import collections
import copy
import hashlib
import io
import itertools
import json
import math
import os
import random
import warnings

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

warnings.simplefilter("ignore")
torch.manual_seed(0)
random.seed(0)
np.random.seed(0)
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
LATE, STEPS, WORDS, WIDTH = 4, 8, 40, 32
STEP = 0
SEEN, PRINTED, STATE = [], [], {"count": 0}
#: top


class Stateful(nn.Module):
    """A block with state of every kind, and the layers that late changes name."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.act = nn.ReLU()
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("var", torch.ones(WIDTH))
        self.calls, self.shift, self.seen, self.average = 0, 0.0, [], torch.zeros(WIDTH)
        self.torch_generator = torch.Generator().manual_seed(1)
        self.generator, self.numpy_generator = random.Random(1), np.random.default_rng(1)


#: shape


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*[Block() for _ in range(4)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids):
        return self.head(self.norm(self.blocks(self.embed(ids))))


def batch_of(number, size=8, length=12):
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, WORDS, (size, length + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def loss_of(logits, y):
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def say(*values):
    PRINTED.extend(float(value) for value in values)
    print(json.dumps([float(value) for value in values]), flush=True)


net = Net()
#: optimizer
#: setup
#: loop
for STEP in range(STEPS):
    x, y = batch_of(STEP)
    late = STEP >= LATE
    #: before
    opt.zero_grad()
    logits = net(x)
    loss = loss_of(logits, y)
    #: loss
    loss.backward()
    #: grads
    opt.step()
    #: after
    say(loss.detach())
#: end
held = [v for v in net.state_dict().values() if isinstance(v, torch.Tensor)]
left = opt.state_dict()["state"]
state = [v for one in left.values() for v in one.values() if isinstance(v, torch.Tensor)]
blocks = [m for m in net.modules() if isinstance(m, Stateful)]
counted = [(len(b.seen), b.calls) for b in blocks]
drawn = [
    (
        b.generator.random(),
        float(b.numpy_generator.random()),
        float(b.torch_generator.get_state().double().sum()),
    )
    for b in blocks
]
final = [torch.rand(()).item(), random.random(), float(np.random.rand())]
keys = [(str(k), sorted(map(str, v))) for k, v in left.items()]
tensors = [t.detach().to_dense().contiguous() for t in held + state + [b.average for b in blocks]]
bits = [hashlib.sha256(t.reshape(-1).view(torch.uint8).numpy()).hexdigest() for t in tensors]
sums = [t.double().sum().item() for t in tensors]
exact = [counted, drawn, final, len(SEEN), STATE["count"], keys]
print(json.dumps({"exact": exact, "bits": bits, "sums": sums}))
