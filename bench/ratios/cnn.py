import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def block(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            block(3, 24),
            block(24, 24),
            nn.MaxPool2d(2),
            block(24, 48),
            block(48, 48),
            nn.AdaptiveAvgPool2d(1),
        )
        self.head = nn.Linear(48, 10)

    def forward(self, x):
        return self.head(self.body(x).flatten(1))


data = TensorDataset(torch.randn(256, 3, 48, 48), torch.randint(0, 10, (256,)))
loader = DataLoader(data, batch_size=32, shuffle=True)
net = Net().to(dev)
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
running, correct = 0.0, 0
for epoch in range(1):
    for x, y in loader:
        x, y = x.to(dev), y.to(dev)
        pred = net(x)
        loss = nn.functional.cross_entropy(pred, y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        running += loss.item()
        correct += (pred.argmax(1) == y).sum().item()
    print(epoch, running, correct)
