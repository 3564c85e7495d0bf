"""A small random GPT-2 on generated rows, trained by transformers' Trainer in 70% of its memory."""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from torchtrim.integrations import TorchtrimCallback


class Counting(torch.utils.data.Dataset):
    """Rows that count on from a start, modulo 97."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = (torch.arange(128) + index) % 97
        return {"input_ids": row, "labels": row}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--memory", default="70%")
    parser.add_argument("--plain", action="store_true", help="train without torchtrim, to compare")
    options = parser.parse_args()
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "n_positions": 128, "n_embd": 64, "n_layer": 4, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    trainer = Trainer(
        model,
        TrainingArguments(
            "torchtrim-out/transformers_trainer/checkpoints",
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            max_steps=6,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=3,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=Counting(256),
        eval_dataset=Counting(16),
        callbacks=[] if options.plain else [TorchtrimCallback(memory=options.memory)],
    )
    trainer.train()
    print("weights", sum(one.double().sum().item() for one in model.parameters()))


if __name__ == "__main__":
    main()
