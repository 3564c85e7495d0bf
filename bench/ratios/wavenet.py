import torch
from torch import nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Layer(nn.Module):
    def __init__(self, wide: int, reach: int) -> None:
        super().__init__()
        self.gate, self.value = (nn.Conv1d(wide, wide, 2, dilation=reach) for _ in range(2))
        self.mix, self.reach = nn.Conv1d(wide, wide, 1), reach

    def forward(self, x):
        past = nn.functional.pad(x, (self.reach, 0))
        made = self.mix(torch.tanh(self.value(past)) * torch.sigmoid(self.gate(past)))
        return x + made, made


class WaveNet(nn.Module):
    def __init__(self, wide: int = 32) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(1, wide, 1), nn.Conv1d(wide, 256, 1)
        self.layers = nn.ModuleList(Layer(wide, 2 ** (n % 6)) for n in range(12))

    def forward(self, x):
        x, skips = self.first(x), 0
        for layer in self.layers:
            x, made = layer(x)
            skips = skips + made
        return self.last(torch.relu(skips))


model = WaveNet().to(device)
optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
best = float("inf")
for _ in range(8):
    sound = torch.rand(8, 1, 2048, device=device) * 2 - 1
    targets = ((sound[:, 0, 1:] + 1) * 127.5).long()
    loss = nn.functional.cross_entropy(model(sound)[:, :, :-1], targets)
    model.zero_grad()
    loss.backward()
    optimizer.step()
    if loss.item() < best:
        best = loss.item()
print(best)
