"""Preference tuning of a small GPT-2 with random weights by trl's DPOTrainer, in 85% of its memory."""

import argparse
import copy

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

from torchtrim.integrations import TorchtrimCallback

WORDS = [f"w{number}" for number in range(90)]


def made_up(count: int, start: int) -> str:
    return " ".join(WORDS[(start + 7 * number) % 90] for number in range(count))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory", default="85%")
    parser.add_argument("--plain", action="store_true", help="train without torchtrim, to compare")
    options = parser.parse_args()
    torch.manual_seed(0)
    words = Tokenizer(
        WordLevel({w: n for n, w in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}, "<unk>")
    )
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
    sizes = {"vocab_size": 96, "n_positions": 128, "n_embd": 64, "n_layer": 4, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1, pad_token_id=0))
    rows = [
        {"prompt": made_up(20, n), "chosen": made_up(80, n + 1), "rejected": made_up(60, n + 2)}
        for n in range(64)
    ]
    trainer = DPOTrainer(
        model,
        copy.deepcopy(model),
        DPOConfig(
            "torchtrim-out/trl_dpo/checkpoints",
            per_device_train_batch_size=4,
            max_length=128,
            max_steps=6,
            logging_steps=1,
            gradient_checkpointing=False,
            bf16=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[] if options.plain else [TorchtrimCallback(memory=options.memory)],
    )
    trainer.train()
    print("weights", sum(one.double().sum().item() for one in model.parameters()))


if __name__ == "__main__":
    main()
