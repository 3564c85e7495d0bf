"""Predicts the next token: tied embeddings, causal attention, accumulation, a loss in chunks."""

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, WIDTH, LENGTH, MICRO, PAD = 17, 8, 6, 2, 0


class Block(nn.Module):
    """Causal attention and a network, each behind a norm."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.drop = nn.Dropout(0.1)

    def attend(self, x, keep):
        """Attention over what came before."""
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / WIDTH**0.5
        future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, -1e4)
        scores = scores.masked_fill(~keep.unsqueeze(1), -1e4)
        return self.out(self.drop(scores.softmax(-1)) @ v)

    def forward(self, x, keep):
        x = x + self.attend(x, keep)
        return x + self.drop(self.mlp(x))


class Model(nn.Module):
    """Embeddings, rotations by position, blocks, and the embeddings again as the head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        frequencies = torch.arange(LENGTH)[:, None] * 0.37 ** torch.arange(WIDTH)
        self.register_buffer("turns", frequencies.sin())
        self.cache = {}

    def forward(self, tokens):
        keep = tokens != PAD
        x = self.embed(tokens) + self.turns
        for number, block in enumerate(self.blocks):
            x = block(x, keep)
            self.cache[number] = x.detach()
        return x


def loss_of(model, hidden, tokens):
    """The sum of the losses of all tokens but padding, a chunk of rows at a time."""
    rows, labels = hidden[:, :-1].reshape(-1, WIDTH), tokens[:, 1:].reshape(-1)
    size, total = 4, hidden.new_zeros(())
    for start in range(0, len(rows), size):
        scores = model.head(rows[start : start + size])
        wanted = labels[start : start + size]
        total = total + F.cross_entropy(scores, wanted, ignore_index=PAD, reduction="sum")
    return total


def main():
    """Train."""
    torch.manual_seed(0)
    model = Model()
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    data = torch.Generator().manual_seed(1)
    for _ in range(8):
        batches = [torch.randint(1, VOCABULARY, (3, LENGTH), generator=data) for _ in range(MICRO)]
        batches[0][:, 4:] = PAD
        count = sum(int((batch[:, 1:] != PAD).sum()) for batch in batches)
        for batch in batches:
            hidden = model(batch)
            loss = loss_of(model, hidden, batch) / count
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()


if __name__ == "__main__":
    main()
