import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def block(wide_in: int, wide: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(wide_in, wide, 3, padding=1), nn.BatchNorm2d(wide), nn.ReLU())


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2, self.middle = block(3, 16), block(16, 32), block(32, 64)
        self.up2, self.up1 = block(96, 32), block(48, 16)
        self.head = nn.Conv2d(16, 4, 1)
        self.pool, self.grow = nn.MaxPool2d(2), nn.Upsample(scale_factor=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = self.down1(x)
        two = self.down2(self.pool(one))
        low = self.grow(self.middle(self.pool(two)))
        two = self.grow(self.up2(torch.cat([low, two], 1)))
        return self.head(self.up1(torch.cat([two, one], 1)))


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
images, masks = torch.rand(64, 3, 128, 128), torch.randint(0, 4, (64, 128, 128))
loader = DataLoader(TensorDataset(images, masks), batch_size=8, shuffle=True)
model = UNet().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(1):
    for image, mask in loader:
        loss = nn.functional.cross_entropy(model(image.to(device)), mask.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
