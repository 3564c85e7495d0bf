"""An LSTM over embeddings."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lstm = (
            nn.Embedding(1000, 64),
            nn.LSTM(64, 128, 2, batch_first=True, dropout=0.1),
        )
        self.head = nn.Linear(128, 1000)

    def forward(self, ids):
        return self.head(self.lstm(self.embed(ids))[0])


net = Net()
opt = torch.optim.Adam(net.parameters())


def batch():
    return torch.randint(1000, (16, 33))


def loss_of(ids):
    return F.cross_entropy(net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


for _ in range(8):
    opt.zero_grad()
    loss = loss_of(batch())
    loss.backward()
    opt.step()
