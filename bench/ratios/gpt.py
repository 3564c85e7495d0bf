import torch
from torch import nn

torch.manual_seed(0)
dev = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.n1 = nn.LayerNorm(d)
        self.n2 = nn.LayerNorm(d)
        self.qkv = nn.Linear(d, 3 * d)
        self.o = nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.n2(x))


class GPT(nn.Module):
    def __init__(self, v=256, d=128, n=4):
        super().__init__()
        self.e = nn.Embedding(v, d)
        self.p = nn.Embedding(128, d)
        self.blocks = nn.ModuleList(Block(d, 4) for _ in range(n))
        self.n = nn.LayerNorm(d)
        self.head = nn.Linear(d, v)

    def forward(self, x, y):
        h = self.e(x) + self.p(torch.arange(x.shape[1], device=x.device))
        for b in self.blocks:
            h = b(h)
        return nn.functional.cross_entropy(self.head(self.n(h)).flatten(0, 1), y.flatten())


model = GPT().to(dev)
opt = torch.optim.AdamW(model.parameters(), lr=3e-4)
for it in range(8):
    x = torch.randint(0, 256, (8, 129)).to(dev)
    loss = model(x[:, :-1], x[:, 1:])
    opt.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    if it % 4 == 0:
        print(it, loss.item())
