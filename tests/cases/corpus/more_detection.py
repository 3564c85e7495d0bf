"""Detection and segmentation, as their projects write them. Labelled before anything ran."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from tests.cases.corpus.snippet import Body, Since, snippet
from tests.cases.corpus.sources import (
    BINS_HIGH,
    BINS_LOW,
    COPY,
    ELEMENT,
    ELEMENTWISE,
    EXPAND,
    FILL_PATH,
    FILLED_POSITIONS,
    HOST_INDEX,
    INDEX_KERNEL,
    MASKED_FILL,
    NONZERO,
    ON_DEVICE,
    RANGE,
    READ,
    REDUCTION,
    SCAN,
    SCATTER,
    SHAPE,
    SORT,
    TENSOR,
    TOPK,
    VALUE,
    WHERE,
    aten,
    line,
)

_DISTANCE = aten("cuda/DistanceKernel.cu", 241, "launches a kernel and returns")
_UNRAVEL = line("torch/functional.py", 2004, "a tensor of factors, and one of sizes, on the device")


def _rand(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, device="cuda")


@snippet(1, COPY, _DISTANCE)
def queries_matched_to_targets() -> Body:
    logits, boxes, wanted = _rand(2, 5, 4), _rand(2, 5, 4), _rand(3, 4)
    labels = torch.tensor([0, 2, 1], device="cuda")

    def body() -> object:
        chance = logits.flatten(0, 1).softmax(-1)
        cost = torch.cdist(boxes.flatten(0, 1), wanted, p=1) - chance[:, labels]
        host = cost.view(2, 5, -1).cpu()
        return [part[n].argmin(0).tolist() for n, part in enumerate(host.split([2, 1], -1))]

    return body


@snippet(4, HOST_INDEX)
def matched_queries_by_host_positions() -> Body:
    boxes, labels = _rand(2, 5, 4), torch.tensor([1, 2, 3], device="cuda")
    place = (torch.tensor([0, 0, 1]), torch.tensor([4, 1, 2]))

    def body() -> object:
        classes = torch.full((2, 5), 9, device="cuda")
        classes[place] = labels
        return boxes[place], classes

    return body


@snippet(2, TENSOR, READ)
def number_of_boxes_read_back() -> Body:
    targets = [3, 5]

    def body() -> object:
        boxes = torch.as_tensor([sum(targets)], dtype=torch.float, device="cuda")
        return boxes.clamp(min=1).item()

    return body


@snippet(1, FILL_PATH, NONZERO, INDEX_KERNEL)
def anchors_matched_by_quality() -> Body:
    quality = _rand(3, 16)

    def body() -> object:
        best, matches = quality.max(0)
        every = matches.clone()
        matches[best < 0.3] = -1
        matches[(best >= 0.3) & (best < 0.7)] = -2
        restored = torch.where(quality == quality.max(1).values[:, None])[1]
        matches[restored] = every[restored]
        return matches

    return body


@snippet(0, FILL_PATH, MASKED_FILL, REDUCTION)
def anchors_matched_by_thresholds() -> Body:
    quality = _rand(3, 16)

    def body() -> object:
        best, matches = quality.max(0)
        matches[best < 0.3] = -1
        matches[(best >= 0.3) & (best < 0.7)] = -2
        return (matches >= 0).float()

    return body


@snippet(1, COPY, REDUCTION)
def boxes_moved_apart_by_a_host_one() -> Body:
    boxes, kinds = _rand(8, 4), torch.arange(8, device="cuda") % 3

    def body() -> object:
        apart = kinds.to(boxes) * (boxes.max() + torch.tensor(1).to(boxes))
        return boxes + apart[:, None]

    return body


@snippet(0, ON_DEVICE, REDUCTION, repairs=boxes_moved_apart_by_a_host_one)
def boxes_moved_apart_by_a_number() -> Body:
    boxes, kinds = _rand(8, 4), torch.arange(8, device="cuda") % 3
    return lambda: boxes + (kinds.to(boxes) * (boxes.max() + 1))[:, None]


@snippet(2, NONZERO, INDEX_KERNEL)
def boxes_pooled_by_level() -> Body:
    maps, boxes = [_rand(8, 2), _rand(8, 2)], _rand(8, 4) * 500

    def body() -> object:
        side = ((boxes[:, 2] + 1) * (boxes[:, 3] + 1)).sqrt()
        levels = torch.floor(4 + torch.log2(side / 224)).clamp(3, 4).long() - 3
        pooled = torch.zeros(8, 2, device="cuda")
        for level, features in enumerate(maps):
            rows = torch.where(levels == level)[0]
            pooled[rows] = features[rows].to(pooled.dtype)
        return pooled

    return body


@snippet(2, NONZERO, INDEX_KERNEL)
def boxes_that_are_large_and_likely() -> Body:
    boxes, scores = _rand(16, 4), _rand(16)

    def body() -> object:
        keep = torch.where((boxes[:, 2] > 0.1) & (boxes[:, 3] > 0.1))[0]
        left, likely = boxes[keep], scores[keep]
        keep = torch.where(likely > 0.05)[0]
        return left[keep], likely[keep]

    return body


@snippet(0, RANGE, INDEX_KERNEL, ELEMENTWISE)
def masks_of_their_classes() -> Body:
    logits, wanted = _rand(6, 4, 7, 7), _rand(6, 7, 7)
    labels = torch.tensor([0, 1, 2, 3, 0, 1], device="cuda")

    def body() -> object:
        own = logits[torch.arange(logits.shape[0], device=logits.device), labels]
        return F.binary_cross_entropy_with_logits(own, wanted)

    return body


@snippet(1, HOST_INDEX)
def scores_of_their_classes_by_range() -> Body:
    scores, labels = _rand(6, 4), torch.tensor([0, 1, 2, 3, 0, 1], device="cuda")
    return lambda: scores[range(6), labels]


@snippet(2, EXPAND, NONZERO, INDEX_KERNEL)
def targets_given_to_cells() -> Body:
    targets, anchors = _rand(3, 5, 4) * 8, torch.ones(3, 1, 2, device="cuda")

    def body() -> object:
        ratio = targets[..., 2:4] / anchors
        near = targets[torch.max(ratio, 1 / ratio).max(2)[0] < 1e6]
        left, up = (near[:, :2] % 1 < 0.5).T
        near = near.repeat((2, 1, 1))[torch.stack((left, up))]
        column, row = near[:, :2].long().clamp_(0, 7).T
        cells = torch.zeros(8, 8, device="cuda")
        cells[row, column] = near[:, 2]
        return cells

    return body


@snippet(1, COPY, ELEMENT)
def sizes_put_into_a_gain() -> Body:
    gain, feature = torch.ones(7, device="cuda"), torch.empty(2, 3, 4, 5)

    def body() -> object:
        gain[2:6] = torch.tensor(feature.shape)[[3, 2, 3, 2]]
        return gain

    return body


@snippet(4, EXPAND, NONZERO, SORT)
def candidates_of_each_image() -> Body:
    predictions = _rand(2, 30, 7)

    def body() -> object:
        likely = predictions[..., 4] > 0.3
        found = []
        for n, rows in enumerate(predictions):
            rows = rows[likely[n]]
            if not rows.shape[0]:
                continue
            score, kind = rows[:, 5:].max(1, keepdim=True)
            rows = torch.cat((rows[:, :4], score, kind.float()), 1)[score.view(-1) > 0.1]
            found.append(rows[rows[:, 4].argsort(descending=True)[:10]])
        return found

    return body


@snippet(0, ELEMENTWISE, REDUCTION)
def focal_loss_of_gathered_weights() -> Body:
    logits, labels = _rand(16, 4), torch.arange(16, device="cuda") % 4
    weights = torch.tensor([0.25, 0.75, 0.5, 0.5], device="cuda")

    def body() -> object:
        log = logits.log_softmax(-1).gather(1, labels[:, None]).squeeze(1)
        loss = -weights.gather(0, labels) * (1 - log.exp()) ** 2 * log
        return loss.sum() / (labels > 0).sum().clamp(min=1)

    return body


@snippet(1, READ)
def loss_divided_by_at_least_one() -> Body:
    loss, positive = _rand(16), torch.arange(16, device="cuda") > 3
    return lambda: loss.sum() / max(positive.sum(), 1)


@snippet(0, ELEMENTWISE, REDUCTION)
def dice_and_cross_entropy() -> Body:
    logits, wanted = _rand(2, 8, 8), (_rand(2, 8, 8) > 0.5).float()

    def body() -> object:
        chance = logits.sigmoid().flatten(1)
        same = 2 * (chance * wanted.flatten(1)).sum(-1)
        dice = 1 - (same + 1) / (chance.sum(-1) + wanted.flatten(1).sum(-1) + 1)
        return dice.mean() + F.binary_cross_entropy_with_logits(logits, wanted)

    return body


@snippet(3, READ, SORT, SCAN)
def lovasz_of_each_class() -> Body:
    chance, labels = _rand(32, 3), torch.arange(32, device="cuda") % 3

    def body() -> object:
        losses = []
        for kind in range(3):
            own = (labels == kind).float()
            if own.sum() == 0:
                continue
            wrong, order = (own - chance[:, kind]).abs().sort(descending=True)
            sorted_own = own[order]
            joint = own.sum() - sorted_own.cumsum(0)
            union = own.sum() + (1 - sorted_own).cumsum(0)
            losses.append((wrong * (1 - joint / union)).sum())
        return torch.stack(losses).mean()

    return body


@snippet(2, READ, EXPAND, NONZERO)
def hard_pixels_above_a_threshold() -> Body:
    loss = _rand(64)

    def body() -> object:
        worst = loss.sort(descending=True).values
        return worst[worst > 0.0].mean() if worst[8] > 0.0 else worst[:8].mean()

    return body


@snippet(0, TOPK, repairs=hard_pixels_above_a_threshold)
def hard_pixels_of_known_number() -> Body:
    loss = _rand(64)
    return lambda: loss.topk(loss.numel() // 8).values.mean()


@snippet(4, EXPAND, NONZERO, BINS_LOW, BINS_HIGH)
def confusion_of_valid_pixels() -> Body:
    wanted, said = torch.arange(64, device="cuda") % 5, torch.arange(64, device="cuda") % 4

    def body() -> object:
        valid = (wanted >= 0) & (wanted < 4)
        return torch.bincount(4 * wanted[valid] + said[valid], minlength=16).view(4, 4)

    return body


@snippet(0, WHERE, SCATTER, repairs=confusion_of_valid_pixels)
def confusion_of_all_pixels() -> Body:
    wanted, said = torch.arange(64, device="cuda") % 5, torch.arange(64, device="cuda") % 4

    def body() -> object:
        place = torch.where(wanted < 4, 4 * wanted + said, 16)
        counts = torch.zeros(17, dtype=torch.long, device="cuda")
        return counts.scatter_add_(0, place, torch.ones_like(place))[:16].view(4, 4)

    return body


@snippet(7, READ, VALUE, since=Since(version="2.15", waits=4, evidence=FILLED_POSITIONS))
def best_cells_of_each_box() -> Body:
    cost, overlap = _rand(3, 12), _rand(3, 12)

    def body() -> object:
        matching = torch.zeros_like(cost)
        wanted = overlap.topk(4, dim=1).values.sum(1).int().clamp(min=1)
        for box in range(3):
            _, cells = torch.topk(cost[box], k=wanted[box].item(), largest=False)
            matching[box][cells] = 1.0
        if (matching.sum(0) > 1).sum() > 0:
            matching *= cost == cost.min(0).values
        return matching

    return body


@snippet(2, EXPAND, NONZERO)
def overlaps_of_positives() -> Body:
    overlap = _rand(12, 3)

    def body() -> object:
        positive = overlap >= overlap.mean(0) + overlap.std(0)
        kept = torch.full_like(overlap, -1e8)
        kept[positive] = overlap[positive]
        return kept.max(1)

    return body


@snippet(0, WHERE, repairs=overlaps_of_positives)
def overlaps_of_positives_chosen() -> Body:
    overlap = _rand(12, 3)

    def body() -> object:
        positive = overlap >= overlap.mean(0) + overlap.std(0)
        return torch.where(positive, overlap, -1e8).max(1)

    return body


@snippet(1, READ, SCATTER, WHERE)
def anchors_of_several_boxes() -> Body:
    overlap = _rand(2, 3, 12)
    positive = (_rand(2, 3, 12) > 0.2).float()

    def body() -> object:
        chosen, counts = positive, positive.sum(-2)
        if counts.max() > 1:
            best = torch.zeros_like(chosen).scatter_(1, overlap.argmax(1, keepdim=True), 1)
            chosen = torch.where((counts > 1).unsqueeze(1), best, chosen)
        return chosen.argmax(-2), chosen.sum(-2)

    return body


@snippet(2, _UNRAVEL, TENSOR)
def peak_of_a_heatmap() -> Body:
    heat = _rand(4, 6, 8)
    return lambda: torch.unravel_index(heat.flatten(1).argmax(1), (6, 8))


@snippet(0, ELEMENTWISE, REDUCTION, repairs=peak_of_a_heatmap)
def peak_of_a_heatmap_by_hand() -> Body:
    heat = _rand(4, 6, 8)

    def body() -> object:
        place = heat.flatten(1).argmax(1)
        return torch.stack((place % 8, torch.div(place, 8, rounding_mode="floor")), 1)

    return body


@snippet(0, RANGE, ELEMENTWISE)
def centres_of_a_grid() -> Body:
    feature = _rand(1, 3, 6, 8)

    def body() -> object:
        y = torch.arange(feature.shape[2], device=feature.device) + 0.5
        x = torch.arange(feature.shape[3], device=feature.device) + 0.5
        return torch.stack(torch.meshgrid(x, y, indexing="xy"), -1).view(-1, 2) * 16

    return body


@snippet(3, READ)
def areas_of_segments() -> Body:
    ids = torch.arange(36, device="cuda").view(6, 6) % 3

    def body() -> object:
        areas = [(ids == segment).sum().item() for segment in range(3)]
        return [n for n, area in enumerate(areas) if area > 4]

    return body


@snippet(0, ON_DEVICE, SHAPE)
def crop_at_a_host_place() -> Body:
    images = _rand(2, 3, 8, 8)

    def body() -> object:
        top = int(torch.randint(0, 5, (1,)).item())
        left = random.randint(0, 4)
        return images[:, :, top : top + 4, left : left + 4].contiguous()

    return body


@snippet(0, ON_DEVICE)
def patches_of_other_images() -> Body:
    images = _rand(4, 3, 8, 8)

    def body() -> object:
        images[:, :, 1:4, 2:6] = images.flip(0)[:, :, 1:4, 2:6]
        return images

    return body


@snippet(1, HOST_INDEX)
def images_mixed_in_a_host_order() -> Body:
    images = _rand(4, 3, 8, 8)

    def body() -> object:
        share = random.betavariate(1.0, 1.0)
        return share * images + (1 - share) * images[torch.randperm(images.size(0))]

    return body


@snippet(0, INDEX_KERNEL, repairs=images_mixed_in_a_host_order)
def images_mixed_in_a_device_order() -> Body:
    images = _rand(4, 3, 8, 8)

    def body() -> object:
        share = random.betavariate(1.0, 1.0)
        order = torch.randperm(images.size(0), device=images.device)
        return share * images + (1 - share) * images[order]

    return body


@snippet(2, COPY, ELEMENT)
def patches_erased_by_host_noise() -> Body:
    images = _rand(2, 3, 8, 8)

    def body() -> object:
        for n in range(2):
            images[n, :, 1:3, 2:6] = torch.empty(3, 2, 4).normal_()
        return images

    return body
