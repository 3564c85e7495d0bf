import torch
from torch import nn

torch.manual_seed(0)
dev = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(
    *[m for _ in range(6) for m in (nn.Linear(512, 512), nn.ReLU())], nn.Linear(512, 10)
).to(dev)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
total = 0.0
for _ in range(8):
    x = torch.randn(1024, 512, device=dev)
    y = torch.randint(0, 10, (1024,), device=dev)
    loss = nn.functional.cross_entropy(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    total += loss.item()
print(total)
