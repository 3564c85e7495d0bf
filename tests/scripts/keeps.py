"""A loop that keeps what it is told to keep, and nothing else."""

import copy
import sys

import torch
from torch import nn

KEEPS = sys.argv[1]


def step(model, optimizer, data, labels):
    loss = nn.functional.cross_entropy(model(data), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 500)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data, labels = torch.randn(256, 64), torch.randint(500, (256,))
    average = copy.deepcopy(model)
    reference = copy.deepcopy(model).requires_grad_(False) if KEEPS == "reference" else None
    if KEEPS != "average":
        average = None
    for _ in range(20):
        if KEEPS == "logits":
            logits = model(data)
            nn.functional.cross_entropy(logits, labels).backward()
        elif KEEPS == "gradients":
            loss = nn.functional.cross_entropy(model(data), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            continue
        elif KEEPS in ("batch", "fresh batch"):
            batch = torch.randn(2048, 64), torch.randint(500, (2048,))
            step(model, optimizer, *batch)
            before = batch if KEEPS == "batch" else None  # noqa: F841
            continue
        elif KEEPS == "graph":
            loss = nn.functional.cross_entropy(model(data), labels)
            loss.backward(retain_graph=True)
        elif KEEPS == "evaluation":
            wrong = nn.functional.cross_entropy(
                model(torch.cat((data, data))), torch.cat((labels, labels))
            )
            step(model, optimizer, data, labels)
            wrong = float(wrong)
            continue
        else:
            if reference is not None:
                with torch.no_grad():
                    reference(data[:4])
            step(model, optimizer, data, labels)
        optimizer.step()
        optimizer.zero_grad()
        if average is not None:
            with torch.no_grad():
                for mean, value in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(value, 0.01)


main()
