"""Two replicas whose gradients are averaged by hooks, a router of experts, a vocabulary in two shards."""

import torch
from torch import nn

RANKS, WIDTH, VOCABULARY = 2, 8, 12


class VocabularyParallel(nn.Module):
    """Embeddings of which each rank has half of the rows; the sum of all is the result."""

    def __init__(self):
        super().__init__()
        rows = VOCABULARY // RANKS
        self.shards = nn.ParameterList(torch.randn(rows, WIDTH) for _ in range(RANKS))

    def forward(self, tokens):
        total = 0
        for rank, shard in enumerate(self.shards):
            begin = rank * len(shard)
            outside = (tokens < begin) | (tokens >= begin + len(shard))
            rows = shard[(tokens - begin).masked_fill(outside, 0)]
            total = total + rows.masked_fill(outside.unsqueeze(-1), 0.0)
        return total


class Experts(nn.Module):
    """Two experts, mixed by a router that has seen each half of the sequence."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        halves = []
        for half in x.chunk(RANKS, 1):
            shares = self.router(half).softmax(-1)
            parts = [expert(half) for expert in self.experts]
            halves.append(sum(shares[..., n, None] * part for n, part in enumerate(parts)))
        x = x + self.drop(torch.cat(halves, 1))
        return nn.functional.rrelu(x, training=self.training)


class Model(nn.Module):
    """Embeddings, experts, a head behind a spectral norm."""

    def __init__(self):
        super().__init__()
        self.embed = VocabularyParallel()
        self.experts = Experts()
        self.head = nn.utils.spectral_norm(nn.Linear(WIDTH, VOCABULARY))

    def forward(self, tokens):
        return self.head(self.experts(self.embed(tokens)))


class Synchronized(nn.Module):
    """Averages the gradients of the replicas, by hooks on where they are accumulated, after its forward."""

    def __init__(self, module, others):
        super().__init__()
        self.module = module
        self.ready = False
        self.nodes = []
        for own, *same in zip(module.parameters(), *(o.parameters() for o in others), strict=True):
            node = own.expand_as(own).grad_fn.next_functions[0][0]
            self.nodes.append(node)
            node.register_hook(lambda *_, own=own, same=same: self.average(own, same))

    def average(self, own, same):
        """The mean of a parameter's gradients, of all replicas that have one."""
        if self.ready:
            grads = [one.grad for one in (own, *same) if one.grad is not None]
            own.grad = torch.stack(grads).mean(0)
            for one in same:
                one.grad = own.grad.clone()

    def forward(self, tokens):
        self.ready = True
        return self.module(tokens)


def batch_of(processor, prompts):
    """One row of tokens for each prompt."""
    rows = [processor(prompt) for prompt in prompts]
    return torch.stack(rows)


def processor(prompt):
    """The tokens of a prompt."""
    return torch.tensor([(prompt * n + 1) % VOCABULARY for n in range(1, 7)])


def loss_of(model, tokens):
    """The mean loss of the next tokens."""
    shards = model(tokens[:, :-1]).flatten(0, 1).chunk(RANKS, -1)
    return nn.functional.cross_entropy(torch.cat(shards, -1), tokens[:, 1:].flatten())


def main():
    """Train."""
    torch.manual_seed(0)
    first, second = Model(), Model()
    second.load_state_dict(first.state_dict())
    wrapped = Synchronized(first, [second])
    optimizers = [torch.optim.Adam(one.parameters(), lr=0.01) for one in (first, second)]
    for parameter in first.parameters():
        parameter.requires_grad = True
    history = []

    def train(prompts):
        loss_of(second, batch_of(processor, prompts[2:])).backward()
        loss_of(wrapped, batch_of(processor, prompts[:2])).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def evaluate(prompts):
        first.eval()
        with torch.no_grad():
            history.append(float(loss_of(first, batch_of(processor, prompts))))
        first.train()

    for step in range(8):
        for act in (train, evaluate):
            act([step + number for number in range(1, 5)])


if __name__ == "__main__":
    main()
