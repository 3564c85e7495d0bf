"""Speech, ragged batches and embeddings, as their projects write them. Labelled before anything ran."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from tests.cases.corpus.snippet import Body, snippet
from tests.cases.corpus.sources import (
    COPY,
    ELEMENTWISE,
    EMBEDDING,
    EQUAL,
    EXPAND,
    FOREACH,
    HOST_MASK,
    INDEX_KERNEL,
    LOSS,
    MASKED_FILL,
    NONZERO,
    ON_DEVICE,
    READ,
    RECURRENT,
    REDUCTION,
    SCATTER,
    TENSOR,
    UNIQUE,
    aten,
    line,
)
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, unpad_sequence

_CTC_CHECK = aten("LossCTC.cpp", 569, "targets are copied to the host, and again at 516")
_CTC_LENGTHS = aten("cuda/LossCTC.cu", 287, "lengths and offsets are moved: three copies")
_CTC_MEAN = aten("LossCTC.cpp", 485, "target lengths made on the device")
_SPARSE_ROWS = aten("Embedding.cpp", 92, "index and gradient selected by a mask")
_SPARSE_ADD = aten("sparse/cuda/SparseCUDATensorMath.cu", 362, "rows added by index")
_COALESCE = aten("sparse/cuda/SparseCUDATensor.cu", 90, "this forces device-host synchronization")
_ADAPTIVE = line("torch/nn/modules/adaptive.py", 231, "nonzero, then a selection, per cluster")
_NESTED = aten("nested/NestedTensorMath.cpp", 91, "sizes.to(kCPU)")
_NESTED_CHECK = aten("nested/NestedTensorMath.cpp", 114, "sizes.equal(nums)")
_UNPADDED = line("torch/nn/utils/rnn.py", 516, "a selection by mask for each sequence")


def _rand(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, device="cuda")


@snippet(0, MASKED_FILL, ELEMENTWISE)
def frames_masked_at_random() -> Body:
    x = _rand(2, 10, 4)

    def body() -> object:
        start = torch.randint(0, 8, (2, 1), device=x.device)
        place = torch.arange(10, device=x.device)[None]
        return x.masked_fill(((place >= start) & (place < start + 2))[..., None], 0.0)

    return body


@snippet(6, _CTC_CHECK, _CTC_LENGTHS, _CTC_MEAN)
def ctc_loss_of_padded_targets() -> Body:
    log_probs = _rand(12, 2, 5).log_softmax(-1)
    targets = torch.tensor([[1, 2, 3], [2, 3, 0]], device="cuda")
    lengths, wanted = torch.tensor([12, 10]), torch.tensor([3, 2])
    return lambda: F.ctc_loss(log_probs, targets, lengths, wanted)


@snippet(6, UNIQUE, EXPAND, COPY)
def ctc_decoded_greedily() -> Body:
    logits = _rand(2, 12, 5)

    def body() -> object:
        rows = [torch.unique_consecutive(best) for best in logits.argmax(-1)]
        return [row[row != 0].tolist() for row in rows]

    return body


@snippet(3, READ)
def transducer_decoded_greedily() -> Body:
    logits = _rand(3, 5)

    def body() -> object:
        found = [logits[step].argmax().item() for step in range(3)]
        return [token for token in found if token != 0]

    return body


@snippet(2, _UNPADDED, EXPAND, NONZERO)
def unpadded_by_device_lengths() -> Body:
    x, lengths = _rand(2, 5, 4), torch.tensor([5, 3], device="cuda")
    return lambda: unpad_sequence(x, lengths, batch_first=True)


@snippet(0, _UNPADDED, HOST_MASK, repairs=unpadded_by_device_lengths)
def unpadded_by_host_lengths() -> Body:
    x, lengths = _rand(2, 5, 4), torch.tensor([5, 3])
    return lambda: unpad_sequence(x, lengths, batch_first=True)


@snippet(1, COPY, RECURRENT)
def recurrent_over_packed() -> Body:
    x, lengths = _rand(2, 5, 4), torch.tensor([5, 3], device="cuda")
    rnn = nn.GRU(4, 4, batch_first=True).cuda()

    def body() -> object:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True)
        return pad_packed_sequence(rnn(packed)[0], batch_first=True)

    return body


@snippet(0, _SPARSE_ADD, EMBEDDING, FOREACH)
def sparse_rows_learned() -> Body:
    table, ids = nn.Embedding(16, 4, sparse=True).cuda(), torch.tensor([1, 2, 1], device="cuda")
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)

    def body() -> object:
        table(ids).sum().backward()
        optimizer.step()
        return table.weight

    return body


@snippet(2, _SPARSE_ROWS, EXPAND, NONZERO)
def sparse_rows_without_padding() -> Body:
    table = nn.Embedding(16, 4, sparse=True, padding_idx=0).cuda()
    ids = torch.tensor([1, 2, 0], device="cuda")
    return lambda: table(ids).sum().backward()


@snippet(1, line("torch/optim/_functional.py", 44, "grad.coalesce()"), _COALESCE, exact=False)
def sparse_rows_learned_by_adam() -> Body:
    table, ids = nn.Embedding(16, 4, sparse=True).cuda(), torch.tensor([1, 2, 1], device="cuda")
    optimizer = torch.optim.SparseAdam(table.parameters())
    table(ids).sum().backward()
    return lambda: optimizer.step()


@snippet(0, aten("cuda/EmbeddingBag.cu", 418, "launches a kernel and returns"))
def bags_of_words() -> Body:
    table = nn.EmbeddingBag(16, 4, mode="mean").cuda()
    ids, starts = torch.arange(10, device="cuda"), torch.tensor([0, 4], device="cuda")
    return lambda: table(ids, starts)


@snippet(1, READ)
def perplexity_of_a_loss() -> Body:
    loss = _rand(8).mean()
    return lambda: math.exp(loss)


@snippet(1, EXPAND, NONZERO)
def accuracy_of_labelled_tokens() -> Body:
    logits, labels = _rand(2, 5, 7), torch.tensor([[1, 2, -100, 3, -100]] * 2, device="cuda")

    def body() -> object:
        right = logits.argmax(-1) == labels
        return right[labels != -100].float().mean()

    return body


@snippet(0, LOSS)
def next_token_loss() -> Body:
    logits, labels = _rand(2, 5, 7), torch.tensor([[1, 2, -100, 3, -100]] * 2, device="cuda")
    return lambda: F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@snippet(0, SCATTER, REDUCTION)
def preference_loss() -> Body:
    logits, ids = _rand(4, 5, 7), torch.ones(4, 5, dtype=torch.long, device="cuda")
    mask, reference = torch.ones(4, 5, device="cuda"), _rand(4)

    def body() -> object:
        log = logits.log_softmax(-1).gather(2, ids[..., None]).squeeze(2)
        ratio = (log * mask).sum(-1) / mask.sum(-1) - reference
        chosen, rejected = ratio.chunk(2)
        return -F.logsigmoid(0.1 * (chosen - rejected)).mean()

    return body


@snippet(1, TENSOR)
def slopes_of_the_heads() -> Body:
    x = _rand(1, 4, 5, 5)

    def body() -> object:
        slopes = torch.tensor([2.0 ** -(head + 1) for head in range(4)], device=x.device)
        distance = torch.arange(5, device=x.device)
        return x + slopes.view(1, 4, 1, 1) * distance

    return body


@snippet(0, ON_DEVICE, INDEX_KERNEL)
def bias_of_relative_positions() -> Body:
    table, place = _rand(9, 4), (torch.arange(25, device="cuda") % 9).view(5, 5)
    return lambda: table[place.view(-1)].view(5, 5, -1).permute(2, 0, 1).contiguous()


@snippet(6, _ADAPTIVE, EXPAND, NONZERO)
def adaptive_softmax() -> Body:
    head = nn.AdaptiveLogSoftmaxWithLoss(8, 12, cutoffs=[4, 8]).cuda()
    x, labels = _rand(6, 8), torch.tensor([0, 1, 5, 6, 9, 10], device="cuda")
    return lambda: head(x, labels).loss


@snippet(2, _NESTED_CHECK, EQUAL, _NESTED, COPY, exact=False)
def encoder_that_makes_ragged() -> Body:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder, x = nn.TransformerEncoder(layer, 1).cuda().eval(), _rand(2, 5, 8)
    padding = torch.arange(5, device="cuda") >= torch.tensor([[5], [3]], device="cuda")

    def body() -> object:
        with torch.no_grad():
            return encoder(x, src_key_padding_mask=padding)

    return body


@snippet(1, COPY)
def ends_found_on_the_host() -> Body:
    ids = torch.tensor([[1, 2], [3, 9]], device="cuda")
    return lambda: [bool((row == 9).any()) for row in ids.cpu()]
