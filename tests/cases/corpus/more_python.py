"""Tensors where Python expects its own, as projects have it. Labelled before anything ran."""

from __future__ import annotations

import copy
import logging
import math
import pickle

import numpy as np
import torch
from tests.cases.corpus.snippet import Body, snippet
from tests.cases.corpus.sources import (
    ATTENTION,
    COPY,
    ELEMENTWISE,
    EMPTY,
    EXPAND,
    INDEX,
    NONZERO,
    ON_DEVICE,
    QUEUED,
    RANGE,
    READ,
    REDUCTION,
    SHAPE,
    TENSOR,
    UNBIND,
    UNIQUE,
    line,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

_BOOLS = line("torch/csrc/utils/tensor_new.cpp", 858, "a mask made with the options of the tensor")
_STORAGE = line("torch/storage.py", 264, "a copy that is not late")
_WRITTEN = line("torch/csrc/serialization.cpp", 259, "device_tensor.to(kCPU)")
_CAUSAL = line("torch/nn/modules/transformer.py", 1245, "compares the mask with a causal one")
_CLOSE = line("torch/testing/_comparison.py", 1116, "if all elements match")


def _rand(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, device="cuda")


@snippet(1, INDEX, READ)
def name_at_a_place() -> Body:
    names, place = ["cat", "dog", "cow"], torch.tensor(1, device="cuda")
    return lambda: names[place]


@snippet(1, READ)
def loss_formatted_by_percent() -> Body:
    loss = _rand(8).mean()
    return lambda: "loss %.3f" % loss  # noqa: UP031


@snippet(3, READ)
def any_of_the_losses_large() -> Body:
    losses = [_rand(8).mean() for _ in range(3)]
    return lambda: any(loss > 2 for loss in losses)


@snippet(2, READ, UNBIND)
def losses_sorted_by_python() -> Body:
    losses = torch.linspace(0, 1, 3, device="cuda")
    return lambda: sorted(losses)


@snippet(0, SHAPE)
def parameter_found_in_its_list() -> Body:
    parameters = list(nn.Linear(4, 4).cuda().parameters())
    return lambda: parameters[0] in parameters


@snippet(3, READ)
def tensor_not_found_in_a_list() -> Body:
    losses, other = [_rand(8).mean() for _ in range(3)], torch.full((), 9.0, device="cuda")
    return lambda: other in losses


@snippet(0, SHAPE)
def row_at_a_host_scalar() -> Body:
    x, place = _rand(8, 3), torch.tensor(2)
    return lambda: x[place]


@snippet(2, _BOOLS, TENSOR, EXPAND, NONZERO)
def rows_by_an_array_of_bools() -> Body:
    x, keep = _rand(4, 3), np.array([True, False, True, True])
    return lambda: x[keep]


@snippet(2, _BOOLS, TENSOR, EXPAND, NONZERO)
def rows_by_a_list_of_bools() -> Body:
    x, keep = _rand(4, 3), [True, False, True, True]
    return lambda: x[keep]


@snippet(0, EMPTY)
def empty_lists_as_tensors() -> Body:
    x = _rand(4, 3)
    return lambda: (torch.tensor([], device="cuda"), x[[]])


@snippet(1, TENSOR)
def list_as_an_array() -> Body:
    return lambda: torch.asarray([1.0, 2.0], device="cuda")


@snippet(0, QUEUED, repairs=list_as_an_array)
def list_through_pinned_memory() -> Body:
    values = [1.0, 2.0]
    return lambda: torch.tensor(values, pin_memory=True).to("cuda", non_blocking=True)


@torch.jit.script
def _scripted_scale(x: torch.Tensor) -> torch.Tensor:
    if bool(x.sum() > 0):
        x = x / x.sum()
    return x


@torch.jit.script
def _scripted_table(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(int(x.max()) + 1, device=x.device)


@snippet(1, READ)
def scripted_condition() -> Body:
    x = _rand(8)
    return lambda: _scripted_scale(x)


@snippet(1, READ)
def scripted_size() -> Body:
    x = torch.arange(8, device="cuda")
    return lambda: _scripted_table(x)


@snippet(3, EXPAND, NONZERO)
def selection_recomputed() -> Body:
    x = _rand(8, 3).requires_grad_()

    def block(rows: torch.Tensor) -> torch.Tensor:
        return rows[rows[:, 0] > 0.1].square().sum()

    return lambda: checkpoint(block, x, use_reentrant=False).backward()


@snippet(1, _WRITTEN, COPY)
def tensor_pickled() -> Body:
    x = _rand(8)
    return lambda: pickle.dumps(x)


@snippet(1, _STORAGE, COPY)
def storage_copied_to_the_host() -> Body:
    x = _rand(8)
    return lambda: x.untyped_storage().cpu()


@snippet(0, ON_DEVICE)
def tensors_copied_deeply() -> Body:
    state = {"x": _rand(8), "steps": [_rand(2)]}
    return lambda: copy.deepcopy(state)


@snippet(1, TENSOR, RANGE)
def tensors_of_a_default_device() -> Body:
    def body() -> object:
        with torch.device("cuda"):
            return torch.tensor([1.0, 2.0]) + torch.arange(2)

    return body


@snippet(1, _CLOSE, READ, exact=False)
def closeness_asserted() -> Body:
    x, y = _rand(8), _rand(8)
    return lambda: torch.testing.assert_close(x, y, atol=9, rtol=0)


@snippet(0, SHAPE)
def loss_logged_to_nobody() -> Body:
    log, loss = logging.getLogger("bench.nobody"), _rand(8).mean()
    return lambda: log.debug("loss %s", loss)


@snippet(1, READ)
def loss_asserted_with_a_message() -> Body:
    loss = _rand(8).mean()

    def body() -> object:
        assert loss >= 0, f"the loss is {loss}"
        return loss

    return body


@snippet(1, READ)
def truth_asked_for() -> Body:
    flag = torch.ones((), device="cuda")
    return lambda: torch.is_nonzero(flag)


@snippet(2, READ)
def two_doubts_in_one_condition() -> Body:
    x = _rand(8)

    def body() -> object:
        if x.max().item() > 9 or x.isnan().any():
            raise ValueError("a bad batch")
        return x

    return body


@snippet(2, TENSOR)
def numbers_stacked() -> Body:
    return lambda: torch.stack([torch.as_tensor(one, device="cuda") for one in (1.0, 2.0)])


@snippet(1, UNIQUE)
def places_among_the_unique() -> Body:
    labels = torch.arange(8, device="cuda") % 3
    return lambda: labels.unique(return_inverse=True)[1]


@snippet(0, ELEMENTWISE, REDUCTION)
def gradient_of_a_function() -> Body:
    x, weight = _rand(8, 3), _rand(3)
    return lambda: torch.func.grad(lambda w: (x @ w).square().mean())(weight)


@snippet(0, ELEMENTWISE, REDUCTION)
def rows_mapped() -> Body:
    x, y = _rand(8, 3), _rand(8, 3)
    return lambda: torch.func.vmap(lambda a, b: (a * b).sum())(x, y)


@snippet(0, UNBIND, ELEMENTWISE)
def rows_zipped() -> Body:
    x, y = _rand(4, 3), _rand(4, 3)
    return lambda: sum((a - b).square().sum() for a, b in zip(x, y, strict=True))


@snippet(0, ELEMENTWISE)
def scaled_by_a_number_of_numpy() -> Body:
    x, scale = _rand(8), np.float32(2.0)
    return lambda: (scale * x, x * scale)


@snippet(0, ON_DEVICE)
def loss_put_into_a_history() -> Body:
    history, loss = torch.zeros(4, 2, device="cuda"), _rand(8).mean()

    def body() -> object:
        history[2, 1] = loss
        return history

    return body


@snippet(1, READ)
def rounded_down() -> Body:
    x = _rand(8).sum()
    return lambda: math.floor(x)


@snippet(0, ATTENTION, ELEMENTWISE)
def attention_with_padding() -> Body:
    layer, x = nn.MultiheadAttention(8, 2, batch_first=True).cuda(), _rand(2, 5, 8)
    padding = torch.zeros(2, 5, dtype=torch.bool, device="cuda")
    return lambda: layer(x, x, x, key_padding_mask=padding)[0]


@snippet(1, _CAUSAL, READ)
def decoder_with_a_mask() -> Body:
    layer = nn.TransformerDecoderLayer(8, 2, 16, batch_first=True)
    decoder, x = nn.TransformerDecoder(layer, 2).cuda(), _rand(2, 5, 8)
    mask = nn.Transformer.generate_square_subsequent_mask(5, device="cuda")
    return lambda: decoder(x, x, tgt_mask=mask)
