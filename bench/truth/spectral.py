"""Complex weights in the frequency domain."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16, 12, dtype=torch.cfloat) / 16)
        self.skip = nn.Conv1d(16, 16, 1)

    def forward(self, x):
        spectrum = torch.fft.rfft(x)
        mixed = torch.einsum("bik,iok->bok", spectrum[..., :12], self.weight)
        wide = torch.zeros_like(spectrum)
        wide[..., :12] = mixed
        return F.gelu(torch.fft.irfft(wide, n=x.shape[-1]) + self.skip(x))


net = nn.Sequential(*[Layer() for _ in range(4)])
opt = torch.optim.Adam(net.parameters())


def batch():
    return torch.randn(32, 16, 128)


def loss_of(x):
    return net(x).square().mean()


for _ in range(8):
    opt.zero_grad()
    loss = loss_of(batch())
    loss.backward()
    opt.step()
