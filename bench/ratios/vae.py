import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 32, 4, 2, 1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, 2, 1),
            nn.ReLU(),
            nn.Flatten(),
        )
        self.mean, self.spread = nn.Linear(64 * 49, 16), nn.Linear(64 * 49, 16)
        self.back = nn.Linear(16, 64 * 49)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(32, 1, 4, 2, 1)
        )

    def forward(self, x):
        hidden = self.encoder(x)
        mean, spread = self.mean(hidden), self.spread(hidden)
        code = mean + torch.randn_like(mean) * torch.exp(0.5 * spread)
        return self.decoder(self.back(code).view(-1, 64, 7, 7)), mean, spread


torch.manual_seed(1)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = VAE().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(torch.rand(2048, 1, 28, 28)), batch_size=256, shuffle=True)
for epoch in range(1):
    total = 0.0
    for (x,) in loader:
        x = x.to(device)
        optimizer.zero_grad()
        made, mean, spread = model(x)
        likely = F.binary_cross_entropy_with_logits(made, x, reduction="sum")
        loss = likely - 0.5 * torch.sum(1 + spread - mean.pow(2) - spread.exp())
        loss.backward()
        total += loss.item()
        optimizer.step()
    print(f"epoch {epoch}: {total / len(loader.dataset):.3f}")
