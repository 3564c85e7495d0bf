"""Contrast, diffusion and metrics, as their projects write them. Labelled before anything ran."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.cases.corpus.snippet import Body, Since, snippet
from tests.cases.corpus.sources import (
    CHECK,
    COPY,
    ELEMENT,
    ELEMENTWISE,
    EXPAND,
    FILLED_ELEMENT,
    HOST_SCALAR,
    INDEX,
    INDEX_KERNEL,
    MASKED_FILL,
    NONZERO,
    NUMBER,
    ON_DEVICE,
    RANDOM,
    READ,
    REDUCTION,
    SCAN,
    SCATTER,
    SEARCH,
    SORT,
    UNBIND,
    WHERE,
    aten,
)
from torch import nn

_SORTER = aten("BucketizationUtils.h", 139, "the smallest and the largest of the sorter are read")
_QUANTILE = aten("Sorting.cpp", 261, "only the CPU checks q")
_TRIANGLE = aten("BatchLinearAlgebra.cpp", 3844, "solve_triangular checks nothing")
_SVD = aten("BatchLinearAlgebra.cpp", 3211, "checks for errors")


def _rand(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, device="cuda")


@snippet(2, READ, ELEMENT, since=Since(version="2.15", waits=1, evidence=FILLED_ELEMENT))
def queue_with_a_device_pointer() -> Body:
    queue, keys = _rand(4, 16), _rand(8, 4)
    pointer = torch.zeros(1, dtype=torch.long, device="cuda")

    def body() -> object:
        start = int(pointer)
        queue[:, start : start + 8] = keys.T
        pointer[0] = (start + 8) % 16
        return queue

    return body


@snippet(0, ON_DEVICE, repairs=queue_with_a_device_pointer)
def queue_with_a_host_pointer() -> Body:
    queue, keys = _rand(4, 16), _rand(8, 4)
    pointer = torch.zeros(1, dtype=torch.long)

    def body() -> object:
        start = int(pointer)
        queue[:, start : start + 8] = keys.T
        pointer[0] = (start + 8) % 16
        return queue

    return body


@snippet(1, EXPAND, NONZERO)
def similarities_without_the_diagonal() -> Body:
    views = F.normalize(_rand(6, 4), dim=1)

    def body() -> object:
        same = torch.eye(6, dtype=torch.bool, device=views.device)
        return (views @ views.T)[~same].view(6, -1).logsumexp(1)

    return body


@snippet(0, MASKED_FILL, REDUCTION, repairs=similarities_without_the_diagonal)
def similarities_with_a_masked_diagonal() -> Body:
    views = F.normalize(_rand(6, 4), dim=1)

    def body() -> object:
        same = torch.eye(6, dtype=torch.bool, device=views.device)
        return (views @ views.T).masked_fill_(same, -9e15).logsumexp(1)

    return body


@snippet(1, COPY, SCATTER)
def mask_of_others_by_host_positions() -> Body:
    labels = torch.arange(6, device="cuda") % 3

    def body() -> object:
        mask = torch.eq(labels[:, None], labels[None]).float()
        rows = torch.arange(6).view(-1, 1).to(labels.device)
        return mask * torch.scatter(torch.ones_like(mask), 1, rows, 0)

    return body


@snippet(0, ELEMENTWISE, REDUCTION)
def image_and_text_loss() -> Body:
    images, texts = F.normalize(_rand(6, 4), dim=1), F.normalize(_rand(6, 4), dim=1)
    scale = nn.Parameter(torch.full((), 2.6, device="cuda"))

    def body() -> object:
        logits = scale.exp().clamp(max=100) * images @ texts.T
        labels = torch.arange(6, device=logits.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)).backward()

    return body


@snippet(0, REDUCTION, ELEMENTWISE)
def assignment_by_sinkhorn() -> Body:
    scores, centre = _rand(6, 4), torch.zeros(1, 4, device="cuda")

    def body() -> object:
        share = torch.exp(scores / 0.05).T
        share /= share.sum()
        for _ in range(3):
            share /= share.sum(1, keepdim=True)
            share /= share.sum(0, keepdim=True)
        centre.mul_(0.9).add_(scores.mean(0, keepdim=True), alpha=0.1)
        return share.T

    return body


@snippet(0, WHERE, REDUCTION)
def hardest_triplets() -> Body:
    x, labels = _rand(6, 4), torch.arange(6, device="cuda") % 2

    def body() -> object:
        distance, same = torch.cdist(x, x), labels[:, None] == labels[None]
        far = torch.where(same, distance, 0.0).amax(1)
        near = distance.masked_fill(same, float("inf")).amin(1)
        return F.relu(far - near + 0.3).mean()

    return body


@snippet(1, EXPAND, NONZERO)
def triplets_that_still_cost() -> Body:
    loss = F.relu(torch.randn(16, device="cuda"))
    return lambda: loss[loss > 0].mean()


@snippet(2, NONZERO, READ)
def place_of_a_timestep() -> Body:
    timesteps = torch.arange(9, -1, -1, device="cuda")

    def body() -> object:
        found = (timesteps == 4).nonzero()
        return found[1 if len(found) > 1 else 0].item()

    return body


@snippet(0, INDEX_KERNEL, ELEMENTWISE)
def noise_of_device_tables() -> Body:
    images, table = _rand(2, 3, 4, 4), torch.linspace(0.1, 0.9, 10, device="cuda")
    steps = torch.tensor([3, 7], device="cuda")

    def body() -> object:
        kept, noise = table[steps].sqrt().flatten(), torch.randn_like(images)
        while kept.dim() < images.dim():
            kept = kept.unsqueeze(-1)
        return kept * images + (1 - kept**2).sqrt() * noise

    return body


@snippet(1, COPY)
def noise_of_host_tables() -> Body:
    images, table = _rand(2, 3, 4, 4), torch.linspace(0.1, 0.9, 10)
    steps = torch.tensor([3, 7], device="cuda")

    def body() -> object:
        kept = table.to(device=images.device, dtype=images.dtype)[steps].view(2, 1, 1, 1)
        return kept.sqrt() * images

    return body


@snippet(0, HOST_SCALAR, UNBIND)
def denoised_by_host_sigmas() -> Body:
    x, sigmas = _rand(2, 3, 4, 4), torch.linspace(1, 0, 4)
    timesteps = torch.arange(3, device="cuda")

    def body() -> object:
        found = x
        for place, step in enumerate(timesteps):
            slope = found * 0.1 + step
            found = found + slope * (sigmas[place + 1] - sigmas[place])
        return found

    return body


@snippet(1, COPY)
def noise_of_a_host_generator() -> Body:
    generator = torch.Generator().manual_seed(3)
    return lambda: torch.randn(2, 3, 4, generator=generator).to("cuda")


@snippet(0, RANDOM)
def noise_of_a_device_generator() -> Body:
    generator = torch.Generator("cuda").manual_seed(3)
    return lambda: torch.randn(2, 3, 4, generator=generator, device="cuda")


@snippet(0, _QUANTILE, ELEMENTWISE)
def samples_clamped_by_quantile() -> Body:
    x = torch.randn(2, 48, device="cuda")

    def body() -> object:
        most = torch.quantile(x.abs(), 0.995, dim=1).clamp(min=1, max=2).unsqueeze(1)
        return torch.clamp(x, -most, most) / most

    return body


@snippet(1, NUMBER, READ)
def samples_clamped_between_number_and_tensor() -> Body:
    x, most = torch.randn(2, 48, device="cuda"), torch.ones((), device="cuda")
    return lambda: x.clamp(0, most)


@snippet(0, SCAN, SEARCH, INDEX_KERNEL)
def samples_along_a_ray() -> Body:
    weights, bins = _rand(4, 8) + 0.01, torch.linspace(0, 1, 9, device="cuda").expand(4, 9)

    def body() -> object:
        share = weights / weights.sum(-1, keepdim=True)
        total = F.pad(share.cumsum(-1), (1, 0)).contiguous()
        place = torch.searchsorted(total, torch.rand(4, 5, device=bins.device), right=True)
        return bins.gather(1, place.clamp(max=8))

    return body


@snippet(2, _SORTER, READ)
def places_in_an_unsorted_table() -> Body:
    table, wanted = _rand(16), _rand(4)
    return lambda: torch.searchsorted(table, wanted, sorter=table.argsort())


@snippet(3, READ, INDEX, EXPAND, NONZERO)
def codes_that_died_replaced() -> Body:
    codes, x, usage = _rand(8, 4), _rand(16, 4), torch.arange(8, device="cuda")

    def body() -> object:
        dead = usage < 3
        count = dead.sum()
        if count > 0:
            codes[dead] = x[torch.randperm(x.size(0), device=x.device)[:count]]
        return codes

    return body


@snippet(6, READ, EXPAND, NONZERO)
def calibration_by_bins() -> Body:
    sure, right = torch.linspace(0.1, 0.9, 8, device="cuda"), torch.ones(8, device="cuda")

    def body() -> object:
        error = torch.zeros((), device="cuda")
        for low in (0.0, 0.5):
            inside = (sure > low) & (sure <= low + 0.5)
            share = inside.float().mean()
            if share.item() > 0:
                error += (sure[inside].mean() - right[inside].mean()).abs() * share
        return error

    return body


@snippet(0, SORT, SCAN)
def area_under_the_curve() -> Body:
    scores, wanted = _rand(16), (torch.arange(16, device="cuda") % 2).float()

    def body() -> object:
        hits = wanted[scores.argsort(descending=True)]
        rate, false = hits.cumsum(0) / hits.sum(), (1 - hits).cumsum(0) / (1 - hits).sum()
        return torch.trapezoid(rate, false)

    return body


@snippet(1, CHECK)
def features_whitened() -> Body:
    x = _rand(16, 4)

    def body() -> object:
        centred = x - x.mean(0)
        values, vectors = torch.linalg.eigh(centred.T @ centred / 15)
        return centred @ vectors / (values + 1e-5).sqrt()

    return body


@snippet(1, _SVD, exact=False)
def largest_stretch_of_weights() -> Body:
    weights = _rand(8, 4)
    return lambda: torch.linalg.matrix_norm(weights, ord=2)


@snippet(0, _TRIANGLE)
def triangle_solved() -> Body:
    lower, x = torch.eye(4, device="cuda") + _rand(4, 4).tril(-1), _rand(4, 2)
    return lambda: torch.linalg.solve_triangular(lower, x, upper=False)


@snippet(3, READ)
def power_iteration_until_still() -> Body:
    matrix = _rand(6, 6)

    def body() -> object:
        vector = torch.ones(6, device="cuda")
        for _ in range(3):
            new = F.normalize(matrix @ vector, dim=0)
            if (new - vector).norm() < 0:
                break
            vector = new
        return vector

    return body


@snippet(0, ON_DEVICE, ELEMENTWISE)
def spectrogram_of_a_wave() -> Body:
    wave, window = _rand(2, 400), torch.hann_window(64, device="cuda")

    def body() -> object:
        found = torch.stft(wave, 64, hop_length=16, window=window, return_complex=True)
        return found.abs().pow(2).clamp(min=1e-10).log10()

    return body
