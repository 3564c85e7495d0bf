"""Real models train on the emulated device to the bits that the CPU gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import SAMPLES, ResidualBlock, UNet
from torchtrim.emulator import emulate

STEPS = 4
Batch = Callable[[], dict[str, Tensor]]
Case = tuple[Callable[[], nn.Module], Batch]


class Classified(nn.Module):
    """A model whose output is classified, over the last dimension."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(inputs).flatten(0, -2), labels.flatten())


class Tagger(nn.Module):
    """A class for each word."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 12, padding_idx=0)
        self.lstm = nn.LSTM(12, 10, 2, dropout=0.2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(20, 6)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(words))[0])  # type: ignore[no-any-return]


def resnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        ResidualBlock(8),
        nn.MaxPool2d(2),
        ResidualBlock(8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(8, 5),
    )


def words(vocabulary: int) -> Batch:
    def batch() -> dict[str, Tensor]:
        tokens = torch.randint(1, vocabulary, (2, 12))
        return {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}

    return batch


def labelled(shape: tuple[int, ...], classes: int, at: tuple[int, ...], integers: int = 0) -> Batch:
    def batch() -> dict[str, Tensor]:
        inputs = torch.randint(1, integers, shape) if integers else torch.randn(shape)
        return {"inputs": inputs, "labels": torch.randint(classes, at)}

    return batch


def images() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.randint(3, (2,))}


def transformers_model(name: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        library = pytest.importorskip("transformers")
        kind, head = name.split(" ")
        config = getattr(library, f"{kind}Config")(**options)
        return getattr(library, f"{kind}{head}")(config)  # type: ignore[no-any-return]

    return make


SMALL: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
CASES: dict[str, Case] = {
    "gpt2": (
        transformers_model("GPT2 LMHeadModel", n_layer=2, n_embd=16, n_head=2, vocab_size=60),
        words(60),
    ),
    "bert": (transformers_model("Bert ForMaskedLM", **SMALL), words(60)),
    "llama": (
        transformers_model("Llama ForCausalLM", num_key_value_heads=1, **SMALL),
        words(60),
    ),
    "vit": (
        transformers_model(
            "ViT ForImageClassification",
            image_size=16,
            patch_size=4,
            num_labels=3,
            **{name: value for name, value in SMALL.items() if name != "vocab_size"},
        ),
        images,
    ),
    "resnet": (lambda: Classified(resnet()), labelled((4, 3, 16, 16), 5, (4,))),
    "u-net": (lambda: Classified(UNet()), labelled((2, 3, 16, 16), 4, (2, 16, 16))),
    "tagger": (lambda: Classified(Tagger()), labelled((3, 9), 6, (3, 9), 40)),
    "encoder": (
        lambda: Classified(SAMPLES["encoder"]().model),
        labelled((2, 8, 16), 16, (2, 8)),
    ),
    "tied": (lambda: Classified(SAMPLES["tied"]().model), labelled((2, 8), 50, (2, 8), 50)),
    "checkpointed": (
        lambda: Classified(SAMPLES["checkpointed reentrant"]().model),
        labelled((8, 16), 16, (8,)),
    ),
}


def trained(case: Case, device: str) -> list[Tensor]:
    """The losses and the parameters after some steps. Lists, as the device's optimizers take by default."""
    make, batch = case
    torch.manual_seed(0)
    model = make().to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    losses = []
    for _ in range(STEPS):
        given = {name: tensor.to(device, non_blocking=True) for name, tensor in batch().items()}
        output: Any = model(**given)
        loss = output if isinstance(output, Tensor) else output.loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        losses.append(loss.detach())
    found = [*losses, *model.state_dict().values()]
    assert {tensor.device.type for tensor in found} == {device}
    return [tensor.cpu().clone() for tensor in found]


@pytest.mark.filterwarnings("ignore:.*use_reentrant:UserWarning")
@pytest.mark.filterwarnings("ignore:.*loss_type:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_a_model_trains_to_the_same_bits(name: str) -> None:
    expected = trained(CASES[name], "cpu")
    with emulate() as emulation:
        found = trained(CASES[name], "cuda")
        assert emulation.counters.settle().peak_allocated > 0
    assert all(map(torch.equal, expected, found))
    assert len({float(loss) for loss in expected[:STEPS]}) == STEPS
