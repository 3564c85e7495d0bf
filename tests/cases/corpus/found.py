"""Code as it stood in public projects, made small, and as it was repaired or could be."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.cases.corpus.snippet import Body, snippet
from tests.cases.corpus.sources import (
    COPY,
    ELEMENTWISE,
    EXPAND,
    INDEX_KERNEL,
    NONZERO,
    QUEUED,
    READ,
    REDUCTION,
    SCATTER,
    SORT,
    UNIQUE,
    WHERE,
    thread,
)


@snippet(3, EXPAND, NONZERO, thread("huggingface/diffusers", 13564, "a selection for each sample"))
def valid_tokens_of_each_sample() -> Body:
    states = torch.rand(3, 5, 4, device="cuda")
    mask = torch.arange(5, device="cuda") < torch.tensor([[5], [3], [2]], device="cuda")

    def body() -> object:
        rows = [states[n, mask[n].bool(), :] for n in range(3)]
        return torch.cat([F.pad(row, (0, 0, 0, 5 - row.shape[0])) for row in rows])

    return body


@snippet(0, WHERE, repairs=valid_tokens_of_each_sample)
def valid_tokens_masked() -> Body:
    states = torch.rand(3, 5, 4, device="cuda")
    mask = torch.arange(5, device="cuda") < torch.tensor([[5], [3], [2]], device="cuda")
    return lambda: torch.where(mask[..., None], states, 0.0)


@snippet(4, COPY, thread("huggingface/diffusers", 12072, "the same list made in each round"))
def lengths_read_in_each_round() -> Body:
    mask = torch.ones(2, 5, device="cuda")
    return lambda: [mask.sum(1).tolist() for _ in range(4)]


@snippet(1, COPY, repairs=lengths_read_in_each_round)
def lengths_read_ahead() -> Body:
    mask = torch.ones(2, 5, device="cuda")

    def body() -> object:
        lengths = mask.sum(1).tolist()
        return [lengths for _ in range(4)]

    return body


@snippet(3, EXPAND, NONZERO, thread("deepmodeling/deepmd-kit", 3361, "a selection for each type"))
def network_of_each_type() -> Body:
    kinds, x = torch.tensor([0, 1, 2, 1], device="cuda"), torch.rand(4, 3, device="cuda")
    return lambda: [x[kinds == kind].sum(0) * (kind + 1) for kind in range(3)]


@snippet(0, WHERE, repairs=network_of_each_type)
def every_network_on_all() -> Body:
    kinds, x = torch.tensor([0, 1, 2, 1], device="cuda"), torch.rand(4, 3, device="cuda")
    return lambda: [((kinds == kind)[:, None] * x).sum(0) * (kind + 1) for kind in range(3)]


@snippet(4, UNIQUE, COPY, thread("LibreYOLO/libreyolo", 772, "unique and a list for each image"))
def unique_boxes_of_each_image() -> Body:
    matches = torch.tensor([[0, 1, 1], [2, 2, 0]], device="cuda")
    return lambda: [row.unique().tolist() for row in matches]


@snippet(1, COPY, repairs=unique_boxes_of_each_image)
def boxes_read_together() -> Body:
    matches = torch.tensor([[0, 1, 1], [2, 2, 0]], device="cuda")
    return lambda: [sorted(set(row)) for row in matches.tolist()]


@snippet(1, NONZERO, thread("LibreYOLO/libreyolo", 772, "positions that the host knows"))
def positions_of_known_number() -> Body:
    counts, most = [2, 3], 4
    mask = torch.arange(most, device="cuda") < torch.tensor([[2], [3]], device="cuda")
    return lambda: (counts, mask.nonzero())


@snippet(0, ELEMENTWISE, repairs=positions_of_known_number)
def positions_of_all() -> Body:
    return lambda: torch.arange(8, device="cuda").reshape(2, 4)


@snippet(2, NONZERO)
def positives_and_negatives_sampled() -> Body:
    labels = torch.tensor([1, 0, 0, 1, 0, -1], device="cuda")

    def body() -> object:
        positive = ((labels != -1) & (labels != 0)).nonzero().squeeze(1)
        negative = (labels == 0).nonzero().squeeze(1)
        order = torch.randperm(positive.numel(), device="cuda")[:1]
        return positive[order], negative

    return body


@snippet(0, SORT, INDEX_KERNEL, repairs=positives_and_negatives_sampled)
def positives_sampled_by_random_keys() -> Body:
    labels = torch.tensor([1, 0, 0, 1, 0, -1], device="cuda")

    def body() -> object:
        keys = torch.rand(6, device="cuda")
        return torch.where(labels > 0, keys, -1.0).topk(1), torch.where(labels == 0, keys, -1.0)

    return body


@snippet(2, READ)
def numbers_of_anchors_logged() -> Body:
    labels = torch.tensor([1, 0, 0, 1, 0, -1], device="cuda")
    return lambda: {"pos": (labels == 1).sum().item(), "neg": (labels == 0).sum().item()}


@snippet(0, REDUCTION, repairs=numbers_of_anchors_logged)
def numbers_of_anchors_kept() -> Body:
    labels = torch.tensor([1, 0, 0, 1, 0, -1], device="cuda")
    return lambda: {"pos": (labels == 1).sum(), "neg": (labels == 0).sum()}


@snippet(1, READ)
def attention_mask_looked_at() -> Body:
    mask = torch.ones(2, 5, device="cuda")

    def body() -> object:
        return None if torch.all(mask == 1) else mask

    return body


@snippet(2, READ, thread("sgl-project/sglang", 7563, "the sum and the largest of lengths"))
def sum_and_largest_of_lengths() -> Body:
    lengths = torch.tensor([3, 5], device="cuda")
    return lambda: (lengths.sum().item(), lengths.max().item())


@snippet(0, ELEMENTWISE, repairs=sum_and_largest_of_lengths)
def lengths_of_the_host() -> Body:
    lengths, x = torch.tensor([3, 5]), torch.rand(8, device="cuda")
    return lambda: (lengths.sum().item(), lengths.max().item(), x * 2)


@snippet(3, COPY, thread("roboflow/rf-detr", 1369, "a list for each image"))
def size_of_each_image() -> Body:
    sizes = torch.tensor([[3, 4], [5, 6], [7, 8]], device="cuda")
    return lambda: [size.tolist() for size in sizes]


@snippet(1, COPY, repairs=size_of_each_image)
def sizes_of_all_images() -> Body:
    sizes = torch.tensor([[3, 4], [5, 6], [7, 8]], device="cuda")
    return lambda: sizes.tolist()


@snippet(
    6, READ, EXPAND, NONZERO, thread("jingyaogong/minimind", 837, "experts selected one by one")
)
def experts_one_by_one() -> Body:
    x, expert = torch.rand(8, 4, device="cuda"), torch.arange(8, device="cuda") % 3

    def body() -> object:
        out = torch.zeros_like(x)
        for number in range(3):
            chosen = expert == number
            if chosen.any():
                out += x[chosen].sum(0)
        return out

    return body


@snippet(0, SCATTER, repairs=experts_one_by_one)
def experts_all_at_once() -> Body:
    x, expert = torch.rand(8, 4, device="cuda"), torch.arange(8, device="cuda") % 3
    return lambda: torch.zeros(3, 4, device="cuda").index_add_(0, expert, x)


@snippet(0, QUEUED, thread("sgl-project/sglang", 16493, "a late copy that was read too early"))
def late_copy_kept_for_later() -> Body:
    x = torch.rand(8, device="cuda")

    def body() -> object:
        return x.to("cpu", non_blocking=True), torch.cuda.current_stream().record_event()

    return body
