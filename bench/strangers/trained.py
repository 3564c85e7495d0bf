"""Trains public programs for some hundred backward passes as they are and under their BITWISE plans.

    python -m bench.strangers.trained --sources DIR [--library DIR] --keep DIR [NAME...] [--save]

`--programs unseen` trains those of `unseen.toml`. `--keep` names the folder of a run of `bench.strangers`,
which made the plans. Losses are compared bit by bit; where they differ the script is run once more as it is,
to see whether it differs from itself.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from bench import machine
from bench.strangers.running import HERE, Place, Program, paths_of, prepared, programs, run

BACKWARDS = 200
LONGER = {
    "nanoGPT": "--max_iters=240 --eval_interval=1000",
    "minGPT adder": "--trainer.max_iters=240",
    "minGPT chargpt": "--trainer.max_iters=240",
    "mnist_rnn": "--epochs 40",
    "vae": "--epochs 40",
    "minimind train_pretrain": "--epochs 40",
    "minimind train_full_sft": "--epochs 40",
    "pygcn": "--epochs 240",
    "pyGAT": "--epochs 240 --patience 1000",
    "mnist": "--epochs 40",
    "word_language_model": "--epochs 40",
    "word_language_model, optimizer": "--epochs 40",
    "cleanrl c51": "--total-timesteps 6000",
    "PyTorch-GAN aae": "--n_epochs 40",
    "dcgan": "--niter 20",
    "PyTorch-GAN gan": "--n_epochs 40",
    "PyTorch-GAN acgan": "--n_epochs 40",
    "makemore transformer": "--max-steps 240",
    "makemore gru": "--max-steps 240",
    "llama2.c": "--max_iters=240 --eval_interval=1000 --compile=False",
    "lightning autoencoder": "--trainer.max_epochs=40",
    "cleanrl ppo": "--total-timesteps 9000",
    "cleanrl dqn": "--total-timesteps 6000",
    "pytorch-tutorial gan": "",
    "pytorch-tutorial language_model": "",
    "Pytorch-UNet": "--epochs 100",
    "denoising-diffusion": "",
    "efficient_densenet_pytorch demo": "--n_epochs 4",
    "vector-quantize-pytorch autoencoder": "",
    "stargan main": "--num_iters 240",
    "ddim main": "",
    "nri train": "--epochs 40",
    "mixup-cifar10 train": "",
    "Informer2020 main_informer": "--train_epochs 20",
    "LTSF-Linear run_longExp": "--train_epochs 20 --patience 20",
    "awd-lstm-lm main": "--epochs 40",
    "s4 example": "",
    "Pointnet_Pointnet2_pytorch train_classification": "--epoch 40",
}
"""What makes a program long enough; of two values for an option the last one counts."""


def losses(program: Program, place: Place, plan: str, limit: float) -> list[str]:
    """A line for each backward pass: the bits of its losses."""
    folder = prepared(program, place, "trained")
    file = folder / "losses.txt"
    arguments = shlex.split(f"{program.args} {LONGER.get(program.name, '')}")
    command = [sys.executable, str(HERE / "losses.py"), str(BACKWARDS), str(file), plan]
    paths = paths_of(program, place, "trained")
    ended = run([*command, program.script, *arguments], folder, paths, limit)
    found = file.read_text().splitlines() if file.exists() else []
    if len(found) < BACKWARDS:
        print(ended.output[-1500:], flush=True)
    return found


def compared(program: Program, place: Place, limit: float) -> dict[str, Any] | None:
    """How long the losses of the two agree; None where there is no BITWISE plan."""
    name = f"{program.name}-optimize".replace(" ", "-").replace(",", "")
    report = place.scratch / "out" / name / "report.json"
    known = json.loads(report.read_text()) if report.exists() else {}
    certificate, plan = known.get("certificate") or {}, known.get("plan") or {}
    if certificate.get("verdict") != "BITWISE" or not plan.get("techniques"):
        return None
    plain = losses(program, place, "-", limit)
    plans = (report.parent / f"{prefix}plan.toml" for prefix in ("", "missed-"))
    file = next(plan for plan in plans if plan.exists())
    planned = losses(program, place, str(file.resolve()), limit)
    found: dict[str, Any] = {
        "name": program.name,
        "techniques": [one["name"] for one in plan["techniques"]],
        "backwards": min(len(plain), len(planned)),
        "equal": agreeing(plain, planned),
    }
    if found["equal"] < found["backwards"]:
        found["equal_to_itself"] = agreeing(plain, losses(program, place, "-", limit))
    return found


def agreeing(one: list[str], other: list[str]) -> int:
    """How many lines agree before the first that does not."""
    for number, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if mine != theirs:
            return number
    return min(len(one), len(other))


def main() -> None:
    """Run, print, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="all that are known to be long enough"
    )
    parser.add_argument("--sources", type=Path, required=True)
    parser.add_argument("--library", default="")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for each run")
    parser.add_argument("--save", action="store_true", help="into the results")
    parser.add_argument("--keep", type=Path, required=True)
    parser.add_argument("--programs", choices=("known", "unseen"), default="known")
    options = parser.parse_args()
    unseen = options.programs == "unseen"
    saved = "trained-unseen" if unseen else "trained"
    place = Place(options.sources, options.library, options.keep)
    rows = {row["name"]: row for row in machine.saved(saved).get("programs", ())}
    for program in programs("unseen.toml") if unseen else programs():
        if program.name in (options.names or LONGER):
            row = compared(program, place, options.limit)
            print(program.name, row or "no BITWISE plan", flush=True)
            if row is not None:
                rows[program.name] = row
            if options.save:
                machine.save(saved, {"programs": list(rows.values())})


if __name__ == "__main__":
    main()
