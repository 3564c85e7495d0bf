"""Distributions, with their checks and without."""

from __future__ import annotations

import torch
from tests.cases.corpus.snippet import Body, snippet
from tests.cases.corpus.sources import ELEMENTWISE, RANDOM, READ, SAMPLE, SCATTER, STD, VALID, aten
from torch.distributions import (
    Bernoulli,
    Categorical,
    Gamma,
    MultivariateNormal,
    Normal,
    kl_divergence,
)


@snippet(2, VALID, READ)
def normal() -> Body:
    loc, scale = torch.zeros(4, device="cuda"), torch.ones(4, device="cuda")
    return lambda: Normal(loc, scale)


@snippet(0, ELEMENTWISE, repairs=normal)
def normal_unchecked() -> Body:
    loc, scale = torch.zeros(4, device="cuda"), torch.ones(4, device="cuda")
    return lambda: Normal(loc, scale, validate_args=False).log_prob(loc)


@snippet(3, VALID, SAMPLE, READ)
def normal_with_log_prob() -> Body:
    loc, scale = torch.zeros(4, device="cuda"), torch.ones(4, device="cuda")
    return lambda: Normal(loc, scale).log_prob(loc)


@snippet(1, STD, READ)
def sample_of_normal() -> Body:
    chance = Normal(torch.zeros(4, device="cuda"), torch.ones(4, device="cuda"))
    return lambda: chance.sample()


@snippet(0, RANDOM, repairs=sample_of_normal)
def rsample_of_normal() -> Body:
    chance = Normal(torch.zeros(4, device="cuda"), torch.ones(4, device="cuda"))
    return lambda: chance.rsample()


@snippet(1, STD, READ)
def normal_of_tensors() -> Body:
    mean, std = torch.zeros(4, device="cuda"), torch.ones(4, device="cuda")
    return lambda: torch.normal(mean, std)


@snippet(0, RANDOM, repairs=normal_of_tensors)
def normal_of_one_deviation() -> Body:
    mean = torch.zeros(4, device="cuda")
    return lambda: (torch.normal(mean, 2.0), mean + 2.0 * torch.randn_like(mean))


@snippet(1, VALID, READ)
def categorical() -> Body:
    logits = torch.randn(4, 5, device="cuda")
    return lambda: Categorical(logits=logits)


@snippet(0, aten("Distributions.cpp", 599, "checked by a kernel"))
def sample_of_categorical() -> Body:
    chance = Categorical(logits=torch.randn(4, 5, device="cuda"))
    return lambda: chance.sample()


@snippet(1, SAMPLE, READ)
def log_prob_of_categorical() -> Body:
    chance = Categorical(logits=torch.randn(4, 5, device="cuda"))
    action = torch.zeros(4, dtype=torch.long, device="cuda")
    return lambda: chance.log_prob(action)


@snippet(0, SCATTER, repairs=log_prob_of_categorical)
def log_prob_gathered() -> Body:
    logits = torch.randn(4, 5, device="cuda")
    action = torch.zeros(4, dtype=torch.long, device="cuda")
    return lambda: logits.log_softmax(1).gather(1, action[:, None])


@snippet(1, VALID, READ)
def bernoulli() -> Body:
    probabilities = torch.rand(4, device="cuda")
    return lambda: Bernoulli(probabilities).sample()


@snippet(2, VALID, READ)
def multivariate_normal() -> Body:
    loc, root = torch.zeros(3, device="cuda"), torch.eye(3, device="cuda")
    return lambda: MultivariateNormal(loc, scale_tril=root)


@snippet(2, VALID, READ)
def gamma() -> Body:
    shape, rate = torch.ones(4, device="cuda"), torch.ones(4, device="cuda")
    return lambda: Gamma(shape, rate).rsample()


@snippet(0, ELEMENTWISE)
def divergence_of_normals() -> Body:
    left = Normal(torch.zeros(4, device="cuda"), torch.ones(4, device="cuda"))
    right = Normal(torch.ones(4, device="cuda"), torch.ones(4, device="cuda"))
    return lambda: (kl_divergence(left, right), left.entropy())
