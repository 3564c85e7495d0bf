import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
tower = nn.Sequential(
    nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(64, 64, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, 64),
).to(device)  # fmt: skip
optimizer = torch.optim.Adadelta(tower.parameters(), lr=1.0)
right = 0
for step in range(8):
    anchor, near, far = (torch.rand(32, 1, 40, 40, device=device) for _ in range(3))
    one, two, three = tower(anchor), tower(near), tower(far)
    loss = F.triplet_margin_loss(one, two, three)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    right += ((one - two).norm(dim=1) < (one - three).norm(dim=1)).sum().item()
    if step % 4 == 0:
        print(f"{step}: {loss.item():.4f}, {right} right")
