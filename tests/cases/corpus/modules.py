"""Modules."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from tests.cases.corpus.snippet import Body, snippet
from tests.cases.corpus.sources import (
    ATTENTION,
    COPY,
    DROPOUT,
    ELEMENTWISE,
    EMBEDDING,
    LAYER_NORM,
    NORMALIZATION,
    ON_DEVICE,
    READ,
    RECURRENT,
    SOFTMAX,
    aten,
    line,
)
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence
from torch.utils.checkpoint import checkpoint


@snippet(0, NORMALIZATION)
def batch_norm() -> Body:
    layer, x = nn.BatchNorm2d(3).cuda(), torch.rand(2, 3, 4, 4, device="cuda", requires_grad=True)
    return lambda: layer(x).sum().backward()


@snippet(0, LAYER_NORM)
def layer_norm() -> Body:
    layer, x = nn.LayerNorm(8).cuda(), torch.rand(2, 8, device="cuda", requires_grad=True)
    return lambda: layer(x).sum().backward()


@snippet(0, DROPOUT)
def dropout() -> Body:
    x = torch.rand(64, device="cuda", requires_grad=True)
    return lambda: F.dropout(x, 0.3).sum().backward()


@snippet(0, EMBEDDING)
def embedding() -> Body:
    layer, x = (
        nn.Embedding(10, 4, padding_idx=0).cuda(),
        torch.randint(0, 10, (3, 5), device="cuda"),
    )
    return lambda: layer(x).sum().backward()


@snippet(0, aten("cuda/Embedding.cu", 351, "unique on the device, its number stays there"))
def embedding_of_bounded_norm() -> Body:
    layer, x = nn.Embedding(10, 4, max_norm=1.0).cuda(), torch.tensor([1, 2, 1], device="cuda")
    return lambda: layer(x)


@snippet(0, ATTENTION)
def attention() -> Body:
    q = torch.rand(2, 4, 8, 16, device="cuda", requires_grad=True)
    return lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()


@snippet(0, ATTENTION, SOFTMAX)
def multi_head_attention() -> Body:
    layer, x = nn.MultiheadAttention(16, 4, batch_first=True).cuda(), torch.rand(2, 5, 16).cuda()
    padding = torch.zeros(2, 5, dtype=torch.bool, device="cuda")
    return lambda: layer(x, x, x, key_padding_mask=padding)[0].sum().backward()


@snippet(1, line("torch/nn/modules/transformer.py", 1245, "bool of the masks compared"), READ)
def encoder_with_a_mask() -> Body:
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2
    ).cuda()
    x = torch.rand(2, 5, 16, device="cuda")
    mask = nn.Transformer.generate_square_subsequent_mask(5, device=torch.device("cuda"))
    return lambda: encoder(x, mask=mask)


@snippet(
    0,
    line("torch/nn/modules/transformer.py", 1236, "looks at the mask only where it is not told"),
    repairs=encoder_with_a_mask,
)
def encoder_that_is_told() -> Body:
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2
    ).cuda()
    x = torch.rand(2, 5, 16, device="cuda")
    mask = nn.Transformer.generate_square_subsequent_mask(5, device=torch.device("cuda"))
    return lambda: encoder(x, mask=mask, is_causal=True)


@snippet(0, RECURRENT)
def lstm() -> Body:
    layer, x = nn.LSTM(8, 8, 2, batch_first=True).cuda(), torch.rand(2, 5, 8, device="cuda")
    return lambda: layer(x)[0].sum().backward()


@snippet(0, aten("PackedSequence.cpp", 24, "lengths must be on the host"), RECURRENT)
def packed_sorted() -> Body:
    layer, x = nn.GRU(8, 8, batch_first=True).cuda(), torch.rand(2, 5, 8, device="cuda")
    lengths = torch.tensor([5, 3])

    def body() -> object:
        out, _ = layer(pack_padded_sequence(x, lengths, batch_first=True))
        return pad_packed_sequence(out, batch_first=True)

    return body


@snippet(1, line("torch/nn/utils/rnn.py", 319, "sorted_indices.to(device)"), COPY)
def packed_unsorted() -> Body:
    x, lengths = torch.rand(2, 5, 8, device="cuda"), torch.tensor([3, 5])
    return lambda: pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)


@snippet(
    2, line("torch/nn/utils/rnn.py", 319, "moved"), line("torch/nn/utils/rnn.py", 399, "copied")
)
def packed_unsorted_and_padded() -> Body:
    x, lengths = torch.rand(2, 5, 8, device="cuda"), torch.tensor([3, 5])

    def body() -> object:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(packed, batch_first=True)

    return body


@snippet(1, COPY)
def packed_by_lengths_of_the_device() -> Body:
    x, lengths = torch.rand(2, 5, 8, device="cuda"), torch.tensor([5, 3], device="cuda")
    return lambda: pack_padded_sequence(x, lengths.cpu(), batch_first=True)


@snippet(0, ON_DEVICE)
def padded() -> Body:
    rows = [torch.rand(n, device="cuda") for n in (3, 5, 2)]
    return lambda: pad_sequence(rows, batch_first=True)


@snippet(0, ELEMENTWISE)
def convolutions() -> Body:
    layer = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)).cuda()
    x = torch.rand(2, 3, 8, 8, device="cuda")
    return lambda: F.interpolate(layer(x), scale_factor=2).sum().backward()


@snippet(0, ELEMENTWISE)
def recomputed() -> Body:
    layer, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)).cuda(), torch.rand(2, 8).cuda()
    x.requires_grad_()
    return lambda: checkpoint(layer, x, use_reentrant=False).sum().backward()


@snippet(0, line("torch/storage.py", 241, "cloned on its device"), ON_DEVICE)
def module_copied() -> Body:
    module = nn.Linear(8, 8).cuda()
    return lambda: copy.deepcopy(module)


@snippet(2, COPY)
def state_copied_to_host() -> Body:
    module = nn.Linear(8, 8).cuda()
    return lambda: {name: value.cpu() for name, value in module.state_dict().items()}


@snippet(0, ON_DEVICE)
def state_loaded_from_the_device() -> Body:
    module, other = nn.Linear(8, 8).cuda(), nn.Linear(8, 8).cuda()
    return lambda: module.load_state_dict(other.state_dict())


@snippet(2, COPY)
def state_loaded_from_the_host() -> Body:
    module, other = nn.Linear(8, 8).cuda(), nn.Linear(8, 8)
    return lambda: module.load_state_dict(other.state_dict())
