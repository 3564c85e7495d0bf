"""Models that people use, with random weights, a batch and a loss: from torchvision, timm and transformers.

    pip install --no-deps torchvision==0.28.0 timm

A model is for calibration if anything of the table of workspaces was looked up with it, else held out.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tests.cases import nets
from torch import nn

_OPERATOR = re.compile(r"""register_(?:fake|meta)\(\s*["'](?:torchvision::)?(\w+)["']""")


class Sample(NamedTuple):
    """A model with a batch; `loss` takes both."""

    model: nn.Module
    batch: Any
    loss: Callable[[nn.Module, Any], torch.Tensor]


Maker = Callable[[], Sample]


def define_operators() -> None:
    """Have a torchvision that was built for CUDA import on a torch without: its operators get names."""
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        raise SystemExit("pip install --no-deps torchvision==0.28.0 timm")
    if "torchvision" in sys.modules:
        return
    text = (Path(found.origin).parent / "_meta_registrations.py").read_text()
    library = torch.library.Library("torchvision", "DEF")
    for name in sorted({*_OPERATOR.findall(text), "nms"}):
        library.define(f"{name}(Tensor a) -> Tensor")
    _LIBRARIES.append(library)
    importlib.import_module("torchvision")


_LIBRARIES: list[torch.library.Library] = []


def import_libraries() -> None:
    """Import what the models come from."""
    define_operators()
    for name in ("torchvision.models", "timm", "transformers"):
        importlib.import_module(name)


def classified(model: nn.Module, batch: Any) -> torch.Tensor:
    """Cross-entropy of an image's class, or of its parts' classes where there are auxiliary ones."""
    images, classes = batch
    output = model(images)
    output = getattr(output, "logits", output)
    if isinstance(output, dict):
        output = output["out"]
        return F.cross_entropy(output, classes[:, None, None].expand(-1, *output.shape[2:]))
    return F.cross_entropy(output, classes)


def language(model: nn.Module, batch: Any) -> torch.Tensor:
    """The model's own loss."""
    loss: torch.Tensor = model(**batch).loss
    return loss


def next_token(model: nn.Module, batch: Any) -> torch.Tensor:
    """Cross-entropy of each position's token."""
    tokens, wanted = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), wanted.flatten())


def rebuilt(model: nn.Module, batch: Any) -> torch.Tensor:
    """How far the output is from the input."""
    return F.mse_loss(model(batch[0]).float(), batch[0])


def images(size: int, count: int, classes: int = 1000) -> Any:
    return torch.randn(count, 3, size, size), torch.randint(classes, (count,))


def vision(name: str, size: int = 96, count: int = 4, **options: Any) -> Maker:
    """A model of torchvision's."""

    def make() -> Sample:
        define_operators()
        models = importlib.import_module("torchvision.models")
        if name.startswith(("fcn", "deeplab", "lraspp")):
            segmentation = importlib.import_module("torchvision.models.segmentation")
            model = getattr(segmentation, name)(weights=None, weights_backbone=None)
            return Sample(model, images(size, count, 21), classified)
        model = models.get_model(name, weights=None, **options)
        return Sample(model, images(size, count), classified)

    return make


def timm(name: str, size: int = 96, count: int = 4, **options: Any) -> Maker:
    """A model of timm's."""

    def make() -> Sample:
        define_operators()
        module = importlib.import_module("timm")
        return Sample(module.create_model(name, **options), images(size, count), classified)

    return make


def own(net: Callable[[], nn.Module], batch: Callable[[], Any], loss: Any = classified) -> Maker:
    """A network of `tests.cases.nets`."""
    return lambda: Sample(net(), batch(), loss)


def waves(count: int = 4, length: int = 8000) -> Any:
    return torch.randn(count, 1, length), torch.randint(35, (count,))


def clips(count: int = 2, frames: int = 8, size: int = 48) -> Any:
    return torch.randn(count, 3, frames, size, size), torch.randint(10, (count,))


def pixels(count: int = 4, size: int = 96) -> Any:
    return torch.randn(count, 3, size, size), torch.randint(4, (count, size, size))


def tokens(count: int = 4, length: int = 96) -> Any:
    found = torch.randint(4000, (count, length))
    return found, found.roll(-1, 1)


def transformer(
    kind: str,
    task: str,
    length: int = 128,
    count: int = 2,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Maker:
    """A model of transformers', by the names of its configuration and of its automatic class."""

    def make() -> Sample:
        define_operators()
        module = importlib.import_module("transformers")
        config = getattr(module, f"{kind}Config")(**options)
        model = getattr(module, f"AutoModelFor{task}").from_config(config).to(dtype)
        tokens = torch.randint(3, config.vocab_size, (count, length))
        batch = {"input_ids": tokens, "labels": tokens.clone()}
        if task == "SequenceClassification":
            batch["labels"] = torch.randint(2, (count,))
        return Sample(model, batch, language)

    return make


_SMALL = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
_BERT = {**_SMALL, "intermediate_size": 1024, "vocab_size": 8000}
_LLAMA = {**_BERT, "num_key_value_heads": 2}

CALIBRATION: dict[str, Maker] = {
    "resnet18": vision("resnet18"),
    "resnet50": vision("resnet50"),
    "vgg11": vision("vgg11", 64),
    "mobilenet_v2": vision("mobilenet_v2"),
    "densenet121": vision("densenet121"),
    "efficientnet_b0": vision("efficientnet_b0"),
    "convnext_tiny": vision("convnext_tiny"),
    "vit_b_16": vision("vit_b_16", 96, 2, image_size=96),
    "swin_t": vision("swin_t"),
    "fcn_resnet50": vision("fcn_resnet50", 96, 2),
    "timm resnetv2": timm("resnetv2_50"),
    "timm deit_tiny": timm("deit_tiny_patch16_224", 224, 2),
    "bert": transformer("Bert", "MaskedLM", **_BERT),
    "gpt2": transformer(
        "GPT2", "CausalLM", n_embd=256, n_layer=4, n_head=4, vocab_size=8000, n_positions=256
    ),
    "llama": transformer("Llama", "CausalLM", **_LLAMA),
}

HELD_OUT: dict[str, Maker] = {
    "alexnet": vision("alexnet", 128),
    "squeezenet1_1": vision("squeezenet1_1"),
    "googlenet": vision("googlenet", 128, aux_logits=False, init_weights=False),
    "shufflenet_v2": vision("shufflenet_v2_x1_0"),
    "mnasnet1_0": vision("mnasnet1_0"),
    "regnet_y_400mf": vision("regnet_y_400mf"),
    "resnext50": vision("resnext50_32x4d", 96),
    "wide_resnet50": vision("wide_resnet50_2", 96, 2),
    "mobilenet_v3_large": vision("mobilenet_v3_large"),
    "efficientnet_v2_s": vision("efficientnet_v2_s", 96),
    "maxvit_t": vision("maxvit_t", 224, 1),
    "deeplabv3_mobilenet": vision("deeplabv3_mobilenet_v3_large", 128, 2),
    "lraspp_mobilenet": vision("lraspp_mobilenet_v3_large", 128, 2),
    "timm mixer_s16": timm("mixer_s16_224", 224, 2),
    "timm xcit_nano": timm("xcit_nano_12_p16_224", 224, 2),
    "timm poolformer_s12": timm("poolformer_s12", 128, 2),
    "timm ghostnet_100": timm("ghostnet_100"),
    "timm nfnet_l0": timm("nfnet_l0", 96, 2),
    "timm repvgg_a0": timm("repvgg_a0"),
    "roberta": transformer("Roberta", "SequenceClassification", **_BERT, pad_token_id=1),
    "distilbert": transformer(
        "DistilBert", "MaskedLM", dim=256, n_layers=3, n_heads=4, hidden_dim=1024, vocab_size=8000
    ),
    "albert": transformer("Albert", "MaskedLM", embedding_size=128, **_BERT),
    "electra": transformer("Electra", "MaskedLM", **_BERT),
    "mistral": transformer("Mistral", "CausalLM", **_LLAMA),
    "qwen2": transformer("Qwen2", "CausalLM", **_LLAMA),
    "gemma": transformer("Gemma", "CausalLM", head_dim=64, **_LLAMA),
    "phi": transformer("Phi", "CausalLM", **_BERT),
    "opt": transformer(
        "OPT", "CausalLM", ffn_dim=1024, word_embed_proj_dim=256, **_SMALL, vocab_size=8000
    ),
    "t5": transformer(
        "T5",
        "Seq2SeqLM",
        d_model=256,
        d_kv=64,
        d_ff=512,
        num_layers=3,
        num_heads=4,
        vocab_size=8000,
        decoder_start_token_id=0,
    ),
    "mamba": transformer(
        "Mamba", "CausalLM", 64, hidden_size=128, num_hidden_layers=2, vocab_size=8000
    ),
}

OWN: dict[str, Maker] = {
    "own unet": own(nets.UNet, pixels),
    "own lstm": own(lambda: nets.Recurrent(nn.LSTM), tokens, next_token),
    "own gru": own(lambda: nets.Recurrent(nn.GRU), tokens, next_token),
    "own audio": own(nets.Audio, waves),
    "own video": own(nets.Video, clips),
    "own autoencoder": own(nets.Autoencoder, pixels, rebuilt),
    "own encoder": own(nets.Encoder, tokens, next_token),
    "own relative attention": own(nets.Relative, lambda: images(96, 4, 10)),
    "own autocast encoder": own(lambda: nets.Autocast(nets.Encoder()), tokens, next_token),
    "own autocast unet": own(lambda: nets.Autocast(nets.UNet()), pixels),
    "llama bf16": transformer("Llama", "CausalLM", dtype=torch.bfloat16, **_LLAMA),
    "bert bf16": transformer("Bert", "MaskedLM", dtype=torch.bfloat16, **_BERT),
}

SETS = {"calibration": CALIBRATION, "held out": HELD_OUT, "own": OWN}
