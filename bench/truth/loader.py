"""A DataLoader with a worker: of two, one may be ahead."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, number):
        generator = torch.Generator().manual_seed(number)
        return torch.randn(3, 16, 16, generator=generator), number % 10


net = nn.Sequential(
    nn.Flatten(), nn.Linear(768, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
)
opt = torch.optim.Adam(net.parameters())


if __name__ == "__main__":
    for x, y in torch.utils.data.DataLoader(Data(), 64, shuffle=True, num_workers=1):
        opt.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        opt.step()
