"""Character language model: a small causal transformer that learns to write proverbs.

    python charlm.py --steps 1000 --sample 400

The text is data/proverbs.txt; see data/README.md.
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

TEXT = Path(__file__).parent / "data" / "proverbs.txt"


class Block(nn.Module):
    """Causal self-attention, then an MLP, each added to the residual stream."""

    def __init__(self, width, heads, dropout):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def attend(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(mixed.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x):
        x = x + self.dropout(self.attend(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class CharLM(nn.Module):
    def __init__(self, vocab, context, width=128, depth=6, heads=4, dropout=0.1):
        super().__init__()
        self.context = context
        self.token = nn.Embedding(vocab, width)
        self.position = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token(tokens) + self.position(places))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    @torch.no_grad()
    def generate(self, tokens, count):
        self.eval()
        for _ in range(count):
            scores = self(tokens[:, -self.context :])[:, -1]
            tokens = torch.cat([tokens, scores.softmax(-1).multinomial(1)], dim=1)
        return tokens


def random_windows(data, batch_size, context):
    """A batch of text windows, and the same windows one character further on."""
    starts = torch.randint(len(data) - context, (batch_size, 1))
    windows = data[starts + torch.arange(context + 1)]
    return windows[:, :-1], windows[:, 1:]


def parse_args():
    parser = argparse.ArgumentParser(description="Train a character language model.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=32, help="windows per micro-batch")
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per step")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--sample", type=int, default=0, help="characters to write at the end")
    return parser.parse_args()


def main():
    args = parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    text = TEXT.read_text()
    alphabet = sorted(set(text))
    index = {char: i for i, char in enumerate(alphabet)}
    data = torch.tensor([index[char] for char in text])

    model = CharLM(len(alphabet), args.context).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)

    model.train()
    for step in range(1, args.steps + 1):
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for _ in range(args.accumulate):
            inputs, targets = random_windows(data, args.batch_size, args.context)
            inputs, targets = inputs.to(device), targets.to(device)
            scores = model(inputs)
            loss = cross_entropy(scores.flatten(0, 1), targets.flatten()) / args.accumulate
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        if step == 1 or step % args.log_every == 0:
            print(f"step {step:5d}  loss {total.item():.4f}", flush=True)
    print(f"done: loss {total.item():.4f} after {args.steps} steps")

    if args.sample:
        start = data[: args.context // 2].unsqueeze(0).to(device)
        written = model.generate(start, args.sample)[0]
        print("".join(alphabet[i] for i in written.tolist()))


if __name__ == "__main__":
    main()
