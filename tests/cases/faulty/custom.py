"""A function with a backward of its own, a frozen encoder, inputs that take gradients, two results."""

import torch
from torch import nn


class Scaled(torch.autograd.Function):
    """`exp(x) * factor`, which keeps its result for backward."""

    @staticmethod
    def forward(ctx, x, factor):
        result = x.exp()
        ctx.save_for_backward(result, factor)
        return result * factor

    @staticmethod
    def backward(ctx, gradient):
        result, factor = ctx.saved_tensors
        of_x = gradient * result * factor
        of_factor = (gradient * result).sum(0)
        return of_x, of_factor


class Heads(nn.Module):
    """One hidden layer, two results."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(6, 6)
        self.low = nn.Linear(6, 2)
        self.high = nn.Linear(6, 3)

    def forward(self, x):
        x = torch.relu(self.hidden(x))
        return self.low(x), self.high(x)


class Net(nn.Module):
    """A frozen encoder, the function, and both results added up."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(6, 6).requires_grad_(False)
        self.adapter = nn.Linear(6, 6)
        self.factor = nn.Parameter(torch.full((6,), 0.5))
        self.heads = Heads()
        self.states = {}

    def forward(self, x):
        x = self.encoder(x)
        x = x + self.adapter(x)
        x = Scaled.apply(torch.tanh(x), self.factor)
        self.states["last"] = x.detach()
        low, high = self.heads(x)
        return low.square().mean() + high.abs().mean()


def main():
    """Train, and move the inputs against their gradient."""
    torch.manual_seed(0)
    model = Net()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=0.01)
    scale = 128.0
    inputs = torch.randn(5, 6, requires_grad=True)
    for _ in range(8):
        loss = model(inputs)
        (loss * scale).backward()
        for parameter in trained:
            if parameter.grad is not None:
                parameter.grad /= scale
        nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        with torch.no_grad():
            if inputs.grad is not None:
                inputs -= 0.1 * inputs.grad / scale
        optimizer.zero_grad()
        inputs.grad = None


if __name__ == "__main__":
    main()
