"""Reinforcement and graphs, as their projects write them. Labelled before anything ran."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from tests.cases.corpus.snippet import Body, snippet
from tests.cases.corpus.sources import (
    COPY,
    ELEMENTWISE,
    EXPAND,
    FILL_PATH,
    HOST_INDEX,
    INDEX_KERNEL,
    NONZERO,
    ON_DEVICE,
    RANDOM,
    READ,
    REDUCTION,
    REPEATS,
    REPEATS_SIGN,
    SAMPLE,
    SCATTER,
    SORT,
    TOPK,
    VALID,
    aten,
    line,
)
from torch import nn
from torch.distributions import Beta, Categorical, Normal, TransformedDistribution, kl_divergence
from torch.distributions.transforms import TanhTransform

_SPARSE_SIZE = aten("sparse/SparseTensor.cpp", 332, "least and greatest index copied to the host")
_SQUASHED = line("torch/distributions/transformed_distribution.py", 174, "the sample is validated")
_BETA = line("torch/distributions/beta.py", 58, "its Dirichlet checks as well")
_KL = line("torch/distributions/kl.py", 250, "numbers assigned by masks alone")
_FEW = aten("TensorCompare.cpp", 1003, "few test elements: all are compared")


def _rand(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, device="cuda")


@snippet(3, READ)
def advantages_reset_where_done() -> Body:
    rewards, values, done = _rand(3), _rand(4), torch.zeros(3, dtype=torch.bool, device="cuda")

    def body() -> object:
        found, last = [], torch.zeros((), device="cuda")
        for step in reversed(range(3)):
            if done[step]:
                last = torch.zeros_like(last)
            last = rewards[step] + 0.99 * values[step + 1] - values[step] + 0.95 * last
            found.append(last)
        return torch.stack(found)

    return body


@snippet(0, ELEMENTWISE, repairs=advantages_reset_where_done)
def advantages_masked_where_done() -> Body:
    rewards, values, going = _rand(3), _rand(4), torch.ones(3, device="cuda")

    def body() -> object:
        found, last = torch.zeros_like(rewards), 0.0
        for step in reversed(range(3)):
            delta = rewards[step] + 0.99 * values[step + 1] * going[step] - values[step]
            last = delta + 0.95 * going[step] * last
            found[step] = last
        return (found - found.mean()) / (found.std() + 1e-8)

    return body


@snippet(3, HOST_INDEX)
def experience_drawn_by_an_array() -> Body:
    states, actions, rewards = _rand(16, 4), _rand(16, 2), _rand(16)

    def body() -> object:
        rows = np.random.default_rng(0).integers(0, 16, size=8)
        return states[rows], actions[rows], rewards[rows]

    return body


@snippet(0, RANDOM, INDEX_KERNEL, repairs=experience_drawn_by_an_array)
def experience_drawn_on_the_device() -> Body:
    states, actions, rewards = _rand(16, 4), _rand(16, 2), _rand(16)

    def body() -> object:
        rows = torch.randint(0, 16, (8,), device=states.device)
        return states[rows], actions[rows], rewards[rows]

    return body


@snippet(2, COPY)
def step_of_an_environment() -> Body:
    policy, state = nn.Linear(4, 2).cuda(), _rand(1, 4)

    def body() -> object:
        action = policy(state).argmax(-1).cpu().numpy()
        seen = np.full((1, 4), float(action[0]), dtype=np.float32)
        return torch.from_numpy(seen).to(state.device)

    return body


@snippet(2, VALID, SAMPLE)
def clipped_policy_loss() -> Body:
    logits, actions, old, gain = _rand(8, 4), torch.arange(8, device="cuda") % 4, _rand(8), _rand(8)

    def body() -> object:
        policy = Categorical(logits=logits)
        ratio = (policy.log_prob(actions) - old).exp()
        loss = -torch.min(gain * ratio, gain * ratio.clamp(0.8, 1.2)).mean()
        return loss - 0.01 * policy.entropy().mean()

    return body


@snippet(1, READ)
def epochs_stopped_by_divergence() -> Body:
    new, old = _rand(8), _rand(8)

    def body() -> object:
        for epoch in range(3):
            ratio = new - old
            if ((ratio.exp() - 1) - ratio).mean() > -1.0:
                return epoch
        return 3

    return body


@snippet(4, VALID, SAMPLE, _SQUASHED)
def squashed_policy() -> Body:
    mean, deviation = _rand(8, 2), _rand(8, 2) + 0.1

    def body() -> object:
        policy = TransformedDistribution(Normal(mean, deviation), [TanhTransform(cache_size=1)])
        action = policy.rsample()
        return action, policy.log_prob(action).sum(-1)

    return body


@snippet(0, RANDOM, ELEMENTWISE, repairs=squashed_policy)
def squashed_policy_by_hand() -> Body:
    mean, deviation = _rand(8, 2), _rand(8, 2) + 0.1

    def body() -> object:
        noise = torch.randn_like(mean)
        raw = mean + deviation * noise
        log = -0.5 * noise**2 - deviation.log() - 0.5 * math.log(2 * math.pi)
        return raw.tanh(), (log - torch.log(1 - raw.tanh() ** 2 + 1e-6)).sum(-1)

    return body


@snippet(5, VALID, _BETA, SAMPLE)
def bounded_policy() -> Body:
    alpha, beta = _rand(8) + 1, _rand(8) + 1

    def body() -> object:
        policy = Beta(alpha, beta)
        action = policy.rsample()
        return action, policy.log_prob(action)

    return body


@snippet(2, VALID, _KL, FILL_PATH)
def divergence_of_policies() -> Body:
    new, old = _rand(8, 4), _rand(8, 4)
    return lambda: kl_divergence(Categorical(logits=old), Categorical(logits=new))


@snippet(0, INDEX_KERNEL, REDUCTION, ELEMENTWISE)
def double_q_target() -> Body:
    online, target, done = _rand(8, 4), _rand(8, 4), torch.zeros(8, device="cuda")

    def body() -> object:
        best = online.argmax(1, keepdim=True)
        wanted = 1.0 + 0.99 * target.gather(1, best).squeeze(1) * (1 - done)
        return F.smooth_l1_loss(online.max(1).values, wanted)

    return body


@snippet(0, SCATTER, ELEMENTWISE)
def messages_normalized_by_degree() -> Body:
    x, edges = _rand(6, 4), torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]], device="cuda")

    def body() -> object:
        degree = torch.zeros(x.size(0), device=x.device)
        degree.scatter_add_(0, edges[1], torch.ones(edges.size(1), device=x.device))
        scale = degree.pow(-0.5)
        scale.masked_fill_(scale == float("inf"), 0)
        messages = x[edges[0]] * (scale[edges[0]] * scale[edges[1]])[:, None]
        return torch.zeros_like(x).index_add_(0, edges[1], messages)

    return body


@snippet(1, READ)
def nodes_counted_by_the_largest() -> Body:
    edges = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]], device="cuda")

    def body() -> object:
        nodes = int(edges.max()) + 1
        return torch.zeros(nodes, device=edges.device).index_fill_(0, edges[0], 1.0)

    return body


@snippet(2, READ, INDEX_KERNEL)
def graphs_made_dense() -> Body:
    x, batch = _rand(6, 4), torch.tensor([0, 0, 1, 1, 1, 2], device="cuda")

    def body() -> object:
        graphs = int(batch.max()) + 1
        counts = torch.zeros(graphs, dtype=torch.long, device=x.device)
        counts.scatter_add_(0, batch, torch.ones_like(batch))
        start = F.pad(counts.cumsum(0), (1, 0))
        most = int(counts.max())
        place = torch.arange(6, device=x.device) - start[batch] + batch * most
        dense = torch.zeros(graphs * most, 4, device=x.device)
        dense[place] = x
        return dense.view(graphs, most, 4)

    return body


@snippet(2, NONZERO, EXPAND)
def graph_of_a_radius() -> Body:
    places = _rand(6, 3)

    def body() -> object:
        edges = (torch.cdist(places, places) < 0.8).nonzero().t()
        return edges[:, edges[0] != edges[1]]

    return body


@snippet(0, TOPK, ELEMENTWISE, repairs=graph_of_a_radius)
def graph_of_the_nearest() -> Body:
    places = _rand(6, 3)

    def body() -> object:
        distance = torch.cdist(places, places).fill_diagonal_(float("inf"))
        return distance.topk(2, largest=False).indices

    return body


@snippet(0, SCATTER, INDEX_KERNEL)
def attention_over_edges() -> Body:
    logits, target = _rand(8), torch.arange(8, device="cuda") % 3

    def body() -> object:
        most = torch.full((3,), -1e9, device="cuda")
        most = most.scatter_reduce(0, target, logits, reduce="amax")
        share = (logits - most[target]).exp()
        return share / torch.zeros(3, device="cuda").index_add(0, target, share)[target]

    return body


@snippet(1, SORT, EXPAND, NONZERO)
def edges_without_doubles() -> Body:
    edges = torch.tensor([[0, 1, 0, 2], [1, 2, 1, 0]], device="cuda")

    def body() -> object:
        key, order = (edges[0] * 3 + edges[1]).sort()
        new = torch.ones_like(key, dtype=torch.bool)
        new[1:] = key[1:] != key[:-1]
        return edges[:, order][:, new]

    return body


@snippet(2, _SPARSE_SIZE, COPY)
def adjacency_of_unknown_size() -> Body:
    edges, weights = torch.tensor([[0, 1, 2], [1, 2, 0]], device="cuda"), _rand(3)
    return lambda: torch.sparse_coo_tensor(edges, weights)


@snippet(0, ON_DEVICE, repairs=adjacency_of_unknown_size)
def adjacency_of_known_size() -> Body:
    edges, weights = torch.tensor([[0, 1, 2], [1, 2, 0]], device="cuda"), _rand(3)
    return lambda: torch.sparse_coo_tensor(edges, weights, (3, 3))


@snippet(2, REPEATS, REPEATS_SIGN)
def graph_of_each_node() -> Body:
    counts = torch.tensor([2, 3, 1], device="cuda")
    return lambda: torch.repeat_interleave(torch.arange(3, device="cuda"), counts)


@snippet(0, RANDOM, _FEW)
def negatives_compared_with_edges() -> Body:
    edges = torch.tensor([1, 5, 6, 2], device="cuda")
    return lambda: torch.isin(torch.randint(0, 9, (8,), device="cuda"), edges)


@snippet(1, RANDOM, EXPAND, NONZERO)
def edges_dropped() -> Body:
    edges = torch.arange(16, device="cuda").view(2, 8)
    return lambda: edges[:, torch.rand(edges.size(1), device=edges.device) >= 0.2]
