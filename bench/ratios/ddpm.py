import copy

import torch
from torch import nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Noise(nn.Module):
    def __init__(self, wide: int = 48) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, wide), nn.SiLU(), nn.Linear(wide, wide))
        self.first = nn.Conv2d(3, wide, 3, padding=1)
        self.middle = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(8, wide), nn.SiLU(), nn.Conv2d(wide, wide, 3, padding=1))
            for _ in range(5)
        )
        self.last = nn.Conv2d(wide, 3, 3, padding=1)

    def forward(self, x, t):
        h = self.first(x) + self.time(t[:, None])[:, :, None, None]
        for block in self.middle:
            h = h + block(h)
        return self.last(h)


model = Noise().to(device)
average = copy.deepcopy(model).requires_grad_(False)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
for _ in range(8):
    x = torch.randn(32, 3, 32, 32, device=device)
    t = torch.rand(32, device=device)
    noise = torch.randn_like(x)
    keep = torch.cos(t)[:, None, None, None]
    mixed = keep * x + (1 - keep**2).clamp(min=0).sqrt() * noise
    loss = (model(mixed, t) - noise).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    with torch.no_grad():
        for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
            slow.lerp_(fast, 0.01)
print(loss.item())
