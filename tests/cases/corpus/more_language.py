"""Language models, as their projects write them. Labelled before anything ran."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from tests.cases.corpus.snippet import Body, Since, snippet
from tests.cases.corpus.sources import (
    BINS_HIGH,
    BINS_LOW,
    COPY,
    ELEMENTWISE,
    FILLED_POSITIONS,
    HOST_INDEX,
    INDEX,
    INDEX_KERNEL,
    MASKED_FILL,
    NONZERO,
    NUMBER,
    ON_DEVICE,
    READ,
    REDUCTION,
    SCAN,
    SCATTER,
    SELECT,
    SLICE_FILL,
    SORT,
    TOPK,
    VALUE,
    aten,
    line,
)

_NARROW = aten("TensorShape.cpp", 1788, "start.item()")
_SIZES = line("torch/csrc/utils/python_arg_parser.h", 614, "a tensor among the sizes is read")


def _rand(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, device="cuda")


@snippet(3, READ)
def generation_until_all_are_done() -> Body:
    table, end = _rand(10, 10), 99

    def body() -> object:
        ids = torch.zeros(2, 1, dtype=torch.long, device="cuda")
        unfinished = torch.ones(2, dtype=torch.long, device="cuda")
        for _ in range(3):
            token = table[ids[:, -1]].argmax(-1) * unfinished
            ids = torch.cat([ids, token[:, None]], -1)
            unfinished = unfinished.mul(token.ne(end).long())
            if unfinished.max() == 0:
                break
        return ids

    return body


@snippet(0, INDEX_KERNEL, REDUCTION, repairs=generation_until_all_are_done)
def generation_of_known_length() -> Body:
    table, end = _rand(10, 10), 99

    def body() -> object:
        ids = torch.zeros(2, 1, dtype=torch.long, device="cuda")
        unfinished = torch.ones(2, dtype=torch.long, device="cuda")
        for _ in range(3):
            token = table[ids[:, -1]].argmax(-1) * unfinished
            ids = torch.cat([ids, token[:, None]], -1)
            unfinished = unfinished.mul(token.ne(end).long())
        return ids

    return body


@snippet(0, SCATTER, ELEMENTWISE)
def repeated_tokens_penalized() -> Body:
    scores, ids = _rand(2, 10), torch.tensor([[1, 2], [3, 4]], device="cuda")

    def body() -> object:
        found = scores.gather(1, ids)
        return scores.scatter(1, ids, torch.where(found < 0, found * 1.2, found / 1.2))

    return body


@snippet(0, SORT, SCAN, SLICE_FILL, MASKED_FILL)
def nucleus_of_likely_tokens() -> Body:
    scores = _rand(1, 10)

    def body() -> object:
        ordered, order = scores.sort(descending=False)
        remove = ordered.softmax(-1).cumsum(-1) <= 0.2
        remove[..., -1:] = 0
        removed = remove.scatter(1, order, remove)
        return torch.multinomial(scores.masked_fill(removed, -math.inf).softmax(-1), 1)

    return body


@snippet(0, TOPK, MASKED_FILL)
def tokens_below_the_best_removed() -> Body:
    scores = _rand(2, 10)

    def body() -> object:
        low = scores < scores.topk(min(4, scores.size(-1)))[0][..., -1, None]
        return scores.masked_fill(low, -math.inf)

    return body


@snippet(
    6, COPY, HOST_INDEX, VALUE, since=Since(version="2.15", waits=4, evidence=FILLED_POSITIONS)
)
def tokens_banned_in_each_row() -> Body:
    scores, ids = _rand(2, 10), torch.tensor([[1, 2, 1], [3, 4, 3]], device="cuda")

    def body() -> object:
        for row in range(2):
            seen = ids[row].tolist()
            scores[row, [seen[0], seen[1]]] = -float("inf")
        return scores

    return body


@snippet(0, SLICE_FILL)
def end_token_banned() -> Body:
    scores, end = _rand(2, 10), 3

    def body() -> object:
        processed = scores.clone()
        processed[:, end] = -math.inf
        return processed

    return body


@snippet(1, READ)
def mask_looked_through() -> Body:
    mask = torch.ones(2, 5, dtype=torch.long, device="cuda")

    def body() -> object:
        return mask[:, None, None, :] if 0 in mask else None

    return body


@snippet(0, MASKED_FILL, ELEMENTWISE)
def causal_mask_with_padding() -> Body:
    mask = torch.ones(2, 5, dtype=torch.long, device="cuda")

    def body() -> object:
        causal = torch.ones(5, 5, dtype=torch.bool, device=mask.device).tril()
        allowed = causal[None, None] & mask[:, None, None, :].bool()
        bias = torch.zeros(2, 1, 5, 5, device=mask.device)
        return bias.masked_fill(~allowed, torch.finfo(bias.dtype).min)

    return body


@snippet(0, SCAN, MASKED_FILL)
def positions_of_a_padded_batch() -> Body:
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]], device="cuda")
    return lambda: (mask.long().cumsum(-1) - 1).masked_fill_(mask == 0, 1)


@snippet(0, REDUCTION, INDEX_KERNEL)
def reward_at_the_last_token() -> Body:
    rewards, ids = _rand(2, 5), torch.tensor([[4, 5, 6, 0, 0], [7, 8, 9, 1, 0]], device="cuda")

    def body() -> object:
        last = torch.eq(ids, 0).int().argmax(-1) - 1
        return rewards[torch.arange(ids.shape[0], device=rewards.device), last % ids.shape[-1]]

    return body


@snippet(1, HOST_INDEX)
def reward_at_the_last_token_by_host_rows() -> Body:
    rewards, last = _rand(2, 5), torch.tensor([2, 3], device="cuda")
    return lambda: rewards[torch.arange(rewards.shape[0]), last]


@snippet(1, READ)
def pooling_that_asks_for_the_padding() -> Body:
    states, mask = _rand(2, 5, 4), torch.ones(2, 5, dtype=torch.long, device="cuda")

    def body() -> object:
        if mask[:, -1].sum() == mask.shape[0]:
            return states[:, -1]
        rows = torch.arange(states.shape[0], device=states.device)
        return states[rows, mask.sum(1) - 1]

    return body


@snippet(0, INDEX_KERNEL)
def cache_written_at_device_positions() -> Body:
    cache, key = torch.zeros(1, 2, 8, 4, device="cuda"), _rand(1, 2, 1, 4)
    place = torch.tensor([3], device="cuda")

    def body() -> object:
        cache[:, :, place] = key
        return cache.index_copy_(2, place + 1, key)

    return body


@snippet(1, SELECT)
def cache_written_at_a_device_scalar() -> Body:
    cache, key = torch.zeros(1, 2, 8, 4, device="cuda"), _rand(1, 2, 4)
    place = torch.tensor(3, device="cuda")

    def body() -> object:
        cache[:, :, place] = key
        return cache

    return body


@snippet(1, _NARROW, READ)
def cache_narrowed_at_a_device_scalar() -> Body:
    cache, key = torch.zeros(1, 2, 8, 4, device="cuda"), _rand(1, 2, 1, 4)
    place = torch.tensor(3, device="cuda")
    return lambda: torch.narrow(cache, 2, place, 1).copy_(key)


@snippet(0, ON_DEVICE)
def cache_written_at_a_number() -> Body:
    cache, key = torch.zeros(1, 2, 8, 4, device="cuda"), _rand(1, 2, 1, 4)

    def body() -> object:
        for place in range(3):
            cache[:, :, place : place + 1] = key
        return cache[:, :, :3]

    return body


@snippet(0, INDEX_KERNEL, ELEMENTWISE)
def rotation_by_position() -> Body:
    x, angles = _rand(2, 3, 5, 8), _rand(16, 8)
    places = torch.arange(5, device="cuda").expand(2, 5)

    def body() -> object:
        cos, sin = angles.cos()[places][:, None], angles.sin()[places][:, None]
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    return body


@snippet(0, TOPK, INDEX_KERNEL)
def step_of_a_beam() -> Body:
    scores, cache = _rand(2, 3 * 10), _rand(6, 4)

    def body() -> object:
        best, place = scores.topk(3)
        beams = torch.div(place, 10, rounding_mode="floor")
        rows = (beams + torch.arange(2, device="cuda")[:, None] * 3).view(-1)
        return best, place % 10, cache.index_select(0, rows)

    return body


@snippet(4, READ)
def ends_of_a_beam() -> Body:
    tokens = torch.tensor([[1, 2], [3, 9]], device="cuda")

    def body() -> object:
        done = []
        for row in tokens:
            done.extend(place for place, token in enumerate(row) if token.item() == 9)
        return done

    return body


@snippet(3, BINS_LOW, BINS_HIGH, COPY)
def tokens_split_by_expert() -> Body:
    x, expert = _rand(8, 4), torch.arange(8, device="cuda") % 4

    def body() -> object:
        counts = torch.bincount(expert, minlength=4).tolist()
        return x[expert.argsort()].split(counts)

    return body


@snippet(0, SORT, aten("cuda/SummaryOps.cu", 328, "the range is given, so not read"))
def tokens_ordered_by_expert() -> Body:
    x, expert = _rand(8, 4), torch.arange(8, device="cuda") % 4

    def body() -> object:
        counts = torch.histc(expert.float(), bins=4, min=0, max=3)
        return x[expert.argsort()], counts.cumsum(0)

    return body


@snippet(0, TOPK, REDUCTION, aten("Onehot.cpp", 58, "only the CPU compares with the classes"))
def balance_of_the_router() -> Body:
    logits = _rand(8, 4)

    def body() -> object:
        chance = logits.softmax(-1)
        chosen = chance.topk(2, dim=-1).indices
        used = F.one_hot(chosen, 4).float().mean((0, 1))
        return 4 * (used * chance.mean(0)).sum()

    return body


@snippet(4, NONZERO)
def experts_that_were_hit() -> Body:
    x, chosen = _rand(6, 4), torch.arange(6, device="cuda")[:, None] % 3

    def body() -> object:
        out = torch.zeros_like(x)
        mask = F.one_hot(chosen, 3).permute(2, 1, 0)
        for expert in torch.greater(mask.sum((-1, -2)), 0).nonzero():
            _, rows = torch.where(mask[expert].squeeze(0))
            out.index_add_(0, rows, x[rows] * 2)
        return out

    return body


@snippet(2, NONZERO, READ)
def padding_removed() -> Body:
    x = _rand(2, 5, 4)
    mask = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]], device="cuda")

    def body() -> object:
        lengths = mask.sum(-1, dtype=torch.int32)
        rows = torch.nonzero(mask.flatten(), as_tuple=False).flatten()
        bounds = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        return x.flatten(0, 1)[rows], bounds, lengths.max().item()

    return body


@snippet(1, _SIZES, READ)
def padded_to_the_longest() -> Body:
    x, lengths = _rand(2, 5), torch.tensor([5, 7], device="cuda")
    return lambda: F.pad(x, (0, lengths.max() - 5))


@snippet(1, NUMBER, READ)
def positions_up_to_the_longest() -> Body:
    lengths = torch.tensor([5, 7], device="cuda")
    return lambda: torch.arange(lengths.max(), device="cuda")[None] < lengths[:, None]


@snippet(1, INDEX)
def heads_viewed_by_a_tensor() -> Body:
    x, heads = _rand(2, 12), torch.tensor(3, device="cuda")
    return lambda: x.view(2, int(heads), -1)
