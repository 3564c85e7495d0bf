import torch
from torch import nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


def waves(x, count=8):
    return torch.cat([f(2**n * x) for n in range(count) for f in (torch.sin, torch.cos)], -1)


class Field(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = [48, 128, 128, 128, 128]
        self.layers = nn.ModuleList(map(nn.Linear, sizes[:-1], sizes[1:]))
        self.density, self.colour = nn.Linear(128, 1), nn.Linear(128, 3)

    def forward(self, x):
        x = waves(x)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.density(x).relu(), self.colour(x).sigmoid()


def render(field, origin, way, samples=32):
    depth = torch.linspace(1, 3, samples, device=origin.device)
    density, colour = field(origin[:, None] + way[:, None] * depth[:, None])
    opaque = 1 - torch.exp(-density.squeeze(-1) * (2 / samples))
    through = torch.cumprod(1 - opaque + 1e-6, 1).roll(1, 1)
    through = torch.cat([torch.ones_like(through[:, :1]), through[:, 1:]], 1)
    return ((opaque * through)[..., None] * colour).sum(1)


field = Field().to(device)
optimizer = torch.optim.Adam(field.parameters(), lr=5e-4)
for step in range(8):
    origin, way, wanted = (torch.rand(1024, 3, device=device) for _ in range(3))
    loss = (render(field, origin, way) - wanted).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] = 5e-4 * 0.1 ** (step / 8)
print(-10 * torch.log10(loss).item())
