"""A GPT over two micro-batches, evaluated every second step."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)


class Block(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.drop = (
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
            nn.Dropout(0.1),
        )

    def forward(self, x):
        q, k, v = (
            y.unflatten(-1, (4, -1)).transpose(1, 2) for y in self.qkv(self.one(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(self.two(x)))))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(512, 64), nn.Embedding(128, 64)
        self.blocks, self.norm = nn.Sequential(*[Block() for _ in range(4)]), nn.LayerNorm(64)
        self.head = nn.Linear(64, 512, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(
            self.norm(self.blocks(self.embed(ids) + self.place.weight[: ids.shape[1]]))
        )


net = Gpt()
opt = torch.optim.SGD(net.parameters(), 0.1)


def batch():
    return torch.randint(512, (8, 97))


def loss_of(ids):
    return F.cross_entropy(net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


for step in range(8):
    opt.zero_grad()
    for _ in range(2):
        (loss_of(batch()) / 2).backward()
    opt.step()
    if step % 2:
        net.eval()
        with torch.no_grad():
            held = [loss_of(batch()).item() for _ in range(4)]
        net.train()
