"""What scripts do to train on a device: more for the battery in `snippets`."""

from __future__ import annotations

import copy
import functools
import io
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.optim import lr_scheduler, swa_utils
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from emulator.snippets import SNIPPETS, snippet


def trained(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: str,
    size: tuple[int, ...] = (3, 4),
    steps: int = 3,
) -> list[Tensor]:
    """The parameters after some steps on random input."""
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(size).to(device)).square().mean().backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@snippet
def sparse_gradients(d: str) -> Any:
    table = nn.Embedding(10, 3, sparse=True).to(d)
    optimizer = torch.optim.SparseAdam(table.parameters())
    table(torch.tensor([1, 2, 2], device=d)).sum().backward()
    gradient = table.weight.grad
    assert gradient is not None
    assert gradient.is_sparse
    optimizer.step()
    return [table.weight, gradient.to_dense()]


@snippet
def losses(d: str) -> Any:
    x = torch.randn(4, 5, device=d, requires_grad=True)
    t, y = torch.tensor([0, 1, 2, 3], device=d), torch.rand(4, 5, device=d)
    logs = torch.randn(6, 2, 5, device=d).log_softmax(2)
    each = [
        F.cross_entropy(x, t, label_smoothing=0.1, ignore_index=2),
        F.cross_entropy(x, y.softmax(1)),
        F.nll_loss(F.log_softmax(x, 1), t),
        F.mse_loss(x, y),
        F.smooth_l1_loss(x, y),
        F.binary_cross_entropy_with_logits(x, y, pos_weight=torch.ones(5, device=d)),
        F.kl_div(F.log_softmax(x, 1), y, reduction="batchmean"),
        F.triplet_margin_loss(x, y, y.flip(0)),
        F.multi_margin_loss(x, t),
        F.gaussian_nll_loss(x, y, y),
        F.ctc_loss(logs, torch.tensor([[1, 2], [3, 4]]).to(d), (6, 6), (2, 2)),
        F.ctc_loss(
            logs,
            torch.tensor([[1, 2], [3, 4]]).to(d),
            torch.tensor([6, 6]),
            torch.tensor([2, 2]),
            reduction="sum",
        ),
    ]
    torch.stack(each).sum().backward()
    return [*each, x.grad]


@snippet
def images(d: str) -> Any:
    x = torch.randn(2, 4, 8, 8, device=d, requires_grad=True)
    results = [
        nn.Conv2d(4, 4, 3, padding="same").to(d)(x),
        nn.ConvTranspose2d(4, 2, 2, 2).to(d)(x),
        F.interpolate(x, scale_factor=2, mode="bilinear"),
        F.max_pool2d(x, 2),
        F.adaptive_avg_pool2d(x, 1),
        F.pad(x, (1, 1, 1, 1), mode="reflect"),
        F.grid_sample(x, torch.rand(2, 3, 3, 2, device=d), align_corners=False),
        F.group_norm(x, 2),
        F.pixel_shuffle(x, 2),
        F.fold(F.unfold(x, 2), (8, 8), 2),
        F.dropout2d(x, 0.5),
    ]
    torch.cat([result.flatten() for result in results]).sum().backward()
    return [*results, x.grad]


@snippet
def channels_last(d: str) -> Any:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).to(d)
    model = model.to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 8, 8).to(d, memory_format=torch.channels_last, non_blocking=True)
    y = model(x)
    y.sum().backward()
    assert y.is_contiguous(memory_format=torch.channels_last)
    return [y, *(parameter.grad for parameter in model.parameters())]


@snippet
def normalization(d: str) -> Any:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.InstanceNorm2d(4)).to(d)
    model(torch.randn(2, 3, 8, 8, device=d)).sum().backward()
    y = model.eval()(torch.randn(2, 3, 8, 8, device=d))
    return [y, *model.state_dict().values(), model[0].weight.grad, F.rms_norm(y, (6,))]


@snippet
def embeddings(d: str) -> Any:
    table = nn.Embedding(10, 4, padding_idx=0).to(d)
    bag = nn.EmbeddingBag(10, 3, mode="mean").to(d)
    y = table(torch.randint(0, 10, (3, 5), device=d))
    z = bag(torch.tensor([1, 2, 3, 4]).to(d), torch.tensor([0, 2]).to(d))
    (y.square().sum() + z.sum()).backward()
    return [y, z, table.weight.grad, bag.weight.grad]


@snippet
def recurrent(d: str) -> Any:
    results = []
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        model: Any = kind(4, 5, 2, batch_first=True, bidirectional=True).to(d)
        model.flatten_parameters()
        y = model(torch.randn(3, 6, 4, device=d))[0]
        y.sum().backward()
        results += [y, model.weight_ih_l0.grad]
    cell = nn.LSTMCell(4, 5).to(d)
    return [*results, *cell(torch.randn(3, 4, device=d))]


@snippet
def packed_sequences(d: str) -> Any:
    model = nn.GRU(4, 5, batch_first=True).to(d)
    x = torch.randn(3, 6, 4).to(d)
    results = []
    for lengths, is_sorted in (([6, 4, 2], True), ([2, 6, 4], False)):
        packed = pack_padded_sequence(
            x, torch.tensor(lengths), batch_first=True, enforce_sorted=is_sorted
        ).to(d)
        y, sizes = pad_packed_sequence(model(packed)[0], batch_first=True)
        assert packed.batch_sizes.device.type == sizes.device.type == "cpu"
        results += [y, sizes]
    return results


@snippet
def attention(d: str) -> Any:
    model = nn.MultiheadAttention(16, 4, batch_first=True).to(d)
    x = torch.randn(2, 5, 16, device=d, requires_grad=True)
    padding = torch.zeros(2, 5, dtype=torch.bool, device=d)
    padding[0, 3:] = True
    y, weights = model(x, x, x, key_padding_mask=padding)
    y.sum().backward()
    with torch.no_grad():
        fast = model.eval()(x, x, x, need_weights=False)[0]
    return [y, weights, x.grad, fast]


@snippet
def fused_attention(d: str) -> Any:
    q, k, v = (torch.randn(2, 4, 8, 16, device=d, requires_grad=True) for _ in range(3))
    allowed = torch.rand(8, 8, device=d) > 0.3
    results = []
    for options in ({}, {"is_causal": True}, {"attn_mask": allowed}, {"scale": 0.5}):
        y = F.scaled_dot_product_attention(q, k, v, **options)  # type: ignore[arg-type]
        y.sum().backward()
        results += [y]
    grouped = F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True)
    return [*results, grouped, q.grad]


@snippet
def encoder(d: str) -> Any:
    layer = nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).to(d)
    x = torch.randn(2, 5, 16, device=d)
    y = model(x)
    y.sum().backward()
    model.eval()
    with torch.no_grad():
        fast = model(x)
    with torch.inference_mode():
        faster = model(x)
    return [y, fast, faster.clone(), *(parameter.grad for parameter in model.parameters())]


@snippet
def dropout(d: str) -> Any:
    x = torch.ones(100, device=d, requires_grad=True)
    y = F.dropout(nn.Dropout(0.3)(x), 0.5)
    y.sum().backward()
    return [y, x.grad, F.dropout(x, 0.5, training=False), F.alpha_dropout(x, 0.2)]


@snippet
def checkpointing(d: str) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)).to(d)
    results = []
    for reentrant in (True, False):
        x = torch.randn(3, 4, device=d, requires_grad=True)
        y = checkpoint(model, x, use_reentrant=reentrant)
        y.sum().backward()
        results += [y, x.grad]
    return results


@snippet
def accumulation(d: str) -> Any:
    model = nn.Linear(4, 4).to(d)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for i in range(4):
        (model(torch.randn(3, 4).to(d)).square().mean() / 2).backward()
        if i % 2:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
    return [*model.parameters(), norm]


@snippet
def optimizer_before_the_move(d: str) -> Any:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    return trained(model.to(d), optimizer, d)


@snippet
def closures(d: str) -> Any:
    model = nn.Linear(4, 1).to(d)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, line_search_fn="strong_wolfe")
    x, y = torch.randn(8, 4, device=d), torch.randn(8, 1, device=d)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)  # type: ignore[arg-type]
    return list(model.parameters())


@snippet
def schedules(d: str) -> Any:
    model = nn.Linear(4, 4).to(d)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, 10)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer)
    for _ in range(3):
        loss = model(torch.randn(3, 4).to(d)).square().mean()
        loss.backward()
        optimizer.step()
        cosine.step()
        plateau.step(loss.detach())
    return list(model.parameters())


@snippet
def average_of_weights(d: str) -> Any:
    model = nn.Linear(4, 4).to(d)
    average = swa_utils.AveragedModel(
        model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), device=d
    )
    for _ in range(3):
        average.update_parameters(model)
        model.weight.data.add_(1)
    return [*average.module.parameters(), average.n_averaged]


@snippet
def checkpoints_on_disk(d: str) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(d)
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    trained(model, optimizer, d)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, map_location=d)
    again = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(d)
    again.load_state_dict(saved["model"])
    other = torch.optim.Adam(again.parameters(), foreach=True)
    other.load_state_dict(saved["optimizer"])
    return trained(again, other, d)


@snippet
def copies(d: str) -> Any:
    model = nn.Linear(4, 4).to(d)
    twin = copy.deepcopy(model)
    twin.weight.data.mul_(2)
    model.bias.data = twin.bias.data.clone()
    return [*model.parameters(), *twin.parameters(), copy.copy(model.weight.data)]


@snippet
def functions_of_functions(d: str) -> Any:
    model = nn.Linear(3, 3).to(d)
    parameters = dict(model.named_parameters())
    x = torch.randn(4, 3, device=d)

    def loss(parameters: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).sum()

    each = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, x)
    return [
        *torch.func.grad(loss)(parameters, x).values(),
        *each.values(),
        torch.func.jacrev(model)(x[0]),
        torch.func.jvp(torch.sin, (x,), (x,))[1],
    ]


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


@snippet
def functions_of_ones_own(d: str) -> Any:
    x = torch.randn(3, device=d, requires_grad=True)
    y: Any = Square.apply(x)  # type: ignore[no-untyped-call]
    y.sum().backward()
    return [y, x.grad]


@snippet
def hooks(d: str) -> Any:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU()).to(d)
    seen: list[Tensor] = []
    model[0].register_forward_hook(lambda module, args, y: seen.append(y.detach() + args[0].mean()))
    model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    x = torch.randn(2, 3, device=d, requires_grad=True)
    x.register_hook(lambda gradient: gradient * 2)
    y = model(x)
    y.retain_grad()
    y.sum().backward()
    return [x.grad, y.grad, *seen]


@snippet
def offloaded_activations(d: str) -> Any:
    x = torch.randn(3, device=d, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.cpu(), lambda t: t.to(d)):
        y = (x * x).exp()
    y.sum().backward()
    return [y, x.grad]


@snippet
def loaders(d: str) -> Any:
    data = TensorDataset(torch.randn(8, 3), torch.arange(8))
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(data, 4, shuffle=True, generator=generator)
    return [tensor.to(d, non_blocking=True) * 2 for batch in loader for tensor in batch]


@snippet
def reparametrized(d: str) -> Any:
    kinds = nn.utils.parametrizations
    model = nn.Sequential(
        kinds.weight_norm(nn.Linear(3, 3)), kinds.spectral_norm(nn.Linear(3, 3))
    ).to(d)
    model(torch.randn(2, 3, device=d)).sum().backward()
    vector = nn.utils.parameters_to_vector(model.parameters())
    return [vector, *(parameter.grad for parameter in model.parameters())]


@snippet
def meta_models(d: str) -> Any:
    model = nn.Linear(2, 2, device="meta").to_empty(device=d)
    nn.init.ones_(model.weight)
    nn.init.zeros_(model.bias)
    assert torch.ones(1, device=d).to("meta").is_meta
    return [model(torch.ones(1, 2, device=d))]


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "Adam": {"amsgrad": True},
    "AdamW": {"fused": True},
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "RMSprop": {"centered": True, "momentum": 0.9},
    "Adagrad": {},
    "NAdam": {},
    "RAdam": {},
    "Adadelta": {},
    "Adamax": {},
    "ASGD": {},
    "Rprop": {},
    "Adafactor": {},
    "Muon": {},
}
WITHOUT_LISTS = ("AdamW", "Muon")


def optimized(name: str, d: str) -> Any:
    """An optimizer, and one that takes its state over. A GPU's default is lists, the CPU's is not."""
    options = OPTIMIZERS[name] | ({} if name in WITHOUT_LISTS else {"foreach": True})
    model = nn.Linear(4, 4, bias=False).to(d)
    make: Any = getattr(torch.optim, name)
    optimizer = make(model.parameters(), **options)
    trained(model, optimizer, d)
    other = make(model.parameters(), **options)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return trained(model, other, d)


for optimizer_name in OPTIMIZERS:
    SNIPPETS[optimizer_name] = functools.partial(optimized, optimizer_name)
