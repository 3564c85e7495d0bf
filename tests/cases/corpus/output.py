"""Printing, logging, saving."""

from __future__ import annotations

import io

import torch
from tests.cases.corpus.snippet import Body, snippet
from tests.cases.corpus.sources import (
    BINS_HIGH,
    BINS_LOW,
    COPY,
    ELEMENTWISE,
    READ,
    REDUCTION,
    SELECTED,
    SHAPE,
    line,
    thread,
)
from torch import nn

_FORMAT = line("torch/_tensor.py", 1150, "item(), then formatted")
_WIDTH = line("torch/_tensor_str.py", 142, "each integer formatted for its width")
_CEIL = line("torch/_tensor_str.py", 177, "a value compared with its ceiling")
_SCIENTIFIC = line("torch/_tensor_str.py", 182, "two comparisons of the extremes")
_STYLE = line("torch/_tensor_str.py", 202, "the third comparison, for the width")
_STYLE_AGAIN = line("torch/_tensor_str.py", 216, "and once more, for the text")
_ITEM = line("torch/_tensor_str.py", 239, "item() for the text")
_LIST = line("torch/_tensor_str.py", 283, "tolist() for the text")


@snippet(1, _FORMAT, READ)
def formatted_loss() -> Body:
    loss = torch.rand((), device="cuda")
    return lambda: f"loss {loss:.3f}"


@snippet(
    8,
    line("torch/_tensor_str.py", 154, "masked_select of what is finite and not 0"),
    SELECTED,
    _CEIL,
    _SCIENTIFIC,
    _STYLE,
    _FORMAT,
    _STYLE_AGAIN,
    _ITEM,
)
def printed_float() -> Body:
    loss = torch.full((), 1.5, device="cuda")
    return lambda: repr(loss)


@snippet(4, _WIDTH, _FORMAT, _LIST, COPY)
def printed_integers() -> Body:
    labels = torch.arange(3, device="cuda")
    return lambda: repr(labels)


@snippet(1, COPY, repairs=printed_integers)
def printed_copy() -> Body:
    labels = torch.arange(3, device="cuda")
    return lambda: repr(labels.cpu())


@snippet(0, SHAPE)
def printed_shape() -> Body:
    x = torch.rand(3, device="cuda")
    return lambda: f"{tuple(x.shape)} {x.dtype} {x.device} {x.numel()} {x.requires_grad}"


@snippet(1, READ)
def accuracy_read() -> Body:
    logits, target = torch.rand(8, 3, device="cuda"), torch.zeros(8, device="cuda").long()
    return lambda: (logits.argmax(1) == target).float().mean().item()


@snippet(0, ELEMENTWISE, REDUCTION, repairs=accuracy_read)
def accuracy_kept() -> Body:
    logits, target = torch.rand(8, 3, device="cuda"), torch.zeros(8, device="cuda").long()
    return lambda: (logits.argmax(1) == target).float().mean()


@snippet(2, BINS_LOW, BINS_HIGH)
def confusion() -> Body:
    predicted, target = torch.randint(0, 3, (2, 16), device="cuda")
    return lambda: torch.bincount(target * 3 + predicted, minlength=9).reshape(3, 3)


@snippet(3, COPY, READ)
def metrics_read_one_by_one() -> Body:
    metrics = {name: torch.rand((), device="cuda") for name in ("loss", "error", "norm")}
    return lambda: {name: value.item() for name, value in metrics.items()}


@snippet(1, COPY, repairs=metrics_read_one_by_one)
def metrics_read_together() -> Body:
    metrics = {name: torch.rand((), device="cuda") for name in ("loss", "error", "norm")}
    return lambda: dict(zip(metrics, torch.stack(list(metrics.values())).tolist(), strict=True))


@snippet(2, line("torch/serialization.py", 1311, "storage.cpu(), each once"), COPY)
def saved_module() -> Body:
    module = nn.Linear(8, 8).cuda()
    return lambda: torch.save(module.state_dict(), io.BytesIO())


@snippet(1, line("torch/serialization.py", 1311, "storage.cpu(), each once"), COPY)
def saved_views() -> Body:
    x = torch.rand(8, device="cuda")
    return lambda: torch.save([x[:4], x[4:], x], io.BytesIO())


@snippet(
    1,
    COPY,
    thread("Lightning-AI/pytorch-lightning", 17334, "each logged value moved to the device"),
)
def logged_number_moved() -> Body:
    return lambda: torch.tensor(0.5).to(torch.device("cuda"))


@snippet(0, SHAPE, repairs=logged_number_moved)
def logged_number_kept() -> Body:
    return lambda: torch.tensor(0.5) + 1
