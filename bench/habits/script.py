# ruff: noqa: E501 (lines of scripts)
"""One habit of each kind, drawn from a seed, and the script that has them."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

from msgspec import Struct, field
from msgspec.structs import replace

from bench.habits.blocks import BLOCKS
from bench.habits.customs import ADDITIONS, ENDS, LAUNCHES, SETTINGS
from bench.habits.interfaces import RETURNS, TAKES
from bench.habits.loops import AROUND, LOOPS, SOURCES
from bench.habits.steps import OPTIMIZERS, UPDATES

STEPS = 9
IMPORTS = """
import argparse, asyncio, atexit, collections, contextlib, copy, dataclasses, functools, io, itertools, logging
import os, queue, random, signal, subprocess, sys, threading, time, types, warnings
from typing import NamedTuple

import numpy
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset
"""
_PROGRAM = """
<imports>

<settings>
torch.manual_seed(0)
LAST = <last>
<before>


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        <layers>

    def forward(self, <inner takes>):
        <inner unpacked>
        <forward>
        <inner returned>


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        out = <inner call>
        return <inner taken>


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(<depth>))
        self.head = nn.Linear(<d>, <d>)

    def forward(self, <takes>):
        <unpacked>
        for block in self.blocks:
            x = <block call>
        x = self.head(x)
        <returned>


def loss_of(net, x):
    out = <call>
    return <taken>.float().square().mean()


<code>
"""
_TRAIN = """
net = Net()
<optimizer>
<once>
<setup>
<around>
<end>
"""
_BODY = """
<update>
print(step, f'{loss.item():.6f}')
<after>
"""
PLAIN = {
    "block": "mlp of rows",
    "inner_takes": "a tensor",
    "inner_returns": "a tensor",
    "takes": "a tensor",
    "returns": "a tensor",
    "source": "made in the loop",
    "loop": "for",
    "around": "nothing",
    "optimizer": "sgd",
    "update": "plain",
    "end": "falls off its end",
    "launch": "at once",
}
"""The habit of each kind that has nothing special about it."""
_CHOICES = {
    "block": BLOCKS,
    "inner_takes": TAKES,
    "inner_returns": RETURNS,
    "takes": TAKES,
    "returns": RETURNS,
    "source": SOURCES,
    "loop": LOOPS,
    "around": AROUND,
    "optimizer": OPTIMIZERS,
    "update": UPDATES,
    "end": ENDS,
    "launch": LAUNCHES,
}
_USUAL = {
    "around": 0.4,
    "end": 0.5,
    "takes": 0.3,
    "returns": 0.3,
    "inner_takes": 0.3,
    "inner_returns": 0.3,
}
"""How often a kind is as in `PLAIN`, where most people's scripts are."""


class Habits(Struct, frozen=True, kw_only=True):
    """The habits of a script: one of each kind, any number of settings and additions."""

    one: dict[str, str] = field(default_factory=PLAIN.copy)
    settings: tuple[str, ...] = ()
    additions: tuple[str, ...] = ()
    depth: int = 4
    last: int = 6

    def __str__(self) -> str:
        special = {kind: name for kind, name in self.one.items() if name != PLAIN[kind]}
        words = [f"{kind}: {name}" for kind, name in special.items()]
        words += [f"+ {name}" for name in (*self.settings, *self.additions)]
        return "; ".join(words) or "plain"

    def sound(self) -> bool:
        """Return True if torch itself supports the combination."""
        return not any(self._clashes())

    def _clashes(self) -> Iterator[bool]:
        one = self.one
        block, update = BLOCKS[one["block"]], UPDATES[one["update"]]
        additions = [ADDITIONS[name] for name in self.additions]
        several = one["optimizer"] in ("two", "one a block")
        own = "opts =" in update.once
        yield block.sparse and not (own or OPTIMIZERS[one["optimizer"]].sparse)
        yield block.sparse and (update.dense or any(each.dense for each in additions))
        yield update.lone and several and not own
        yield from self._clashes_of_torch()

    def _clashes_of_torch(self) -> Iterator[bool]:
        one, settings, additions = self.one, set(self.settings), set(self.additions)
        block, update = one["block"], one["update"]
        wide = bool(settings & {"default dtype", "default tensor type"})
        half = update in ("autocast", "autocast and a scaler")
        yield block == "half within" and (wide or half)
        yield wide and half
        yield block == "reentrant checkpoints" and update in (
            "torch.autograd.grad",
            "a gradient's penalty",
        )
        strict = "warnings are errors" in settings or one["around"] == "caught warnings"
        yield strict and "warns" in additions
        yield one["around"] == "a thread" and bool(ENDS[one["end"]].after)
        yield one["around"] == "saved tensor hooks" and "functorch" in additions
        yield "nothing" in (one["returns"], one["inner_returns"]) and "a copy" in additions


def drawn(seed: int) -> Habits:
    """Return the habits of one script; each seed has its own."""
    rng = random.Random(seed)
    while True:
        one = {
            kind: PLAIN[kind] if rng.random() < _USUAL.get(kind, 0.2) else rng.choice(list(known))
            for kind, known in _CHOICES.items()
        }
        settings = rng.sample(list(SETTINGS), rng.choice((0, 0, 1, 1, 2)))
        additions = rng.sample(list(ADDITIONS), rng.choice((0, 1, 1, 2, 3)))
        habits = Habits(
            one=one,
            settings=tuple(settings),
            additions=tuple(additions),
            depth=rng.choice((2, 3, 4, 6)),
            last=rng.choice((2, 6)),
        )
        if habits.sound():
            return habits


def simpler(habits: Habits) -> Iterator[Habits]:
    """Yield the habits with one of them less, most at once first."""
    plain = {kind: name for kind, name in habits.one.items() if name == PLAIN[kind]}
    if habits.settings:
        yield replace(habits, settings=())
    if habits.additions:
        yield replace(habits, additions=())
    for kind in PLAIN.keys() - plain.keys():
        yield replace(habits, one={**habits.one, kind: PLAIN[kind]})
    for name in ("settings", "additions"):
        every = getattr(habits, name)
        for number in range(len(every)):
            fewer = every[:number] + every[number + 1 :]
            if fewer:
                yield replace(habits, **{name: fewer})


def text_of(habits: Habits, checkpointed: int = 0) -> str:
    """Return the script. `checkpointed`: each block (1) or every second one (2) is, as a person would do it."""
    one = habits.one
    block, update = BLOCKS[one["block"]], UPDATES[one["update"]]
    inner_takes, inner_returns = TAKES[one["inner_takes"]], RETURNS[one["inner_returns"]]
    takes, returns = TAKES[one["takes"]], RETURNS[one["returns"]]
    source, loop, around = SOURCES[one["source"]], LOOPS[one["loop"]], AROUND[one["around"]]
    optimizer, end = OPTIMIZERS[one["optimizer"]], ENDS[one["end"]]
    additions = [ADDITIONS[name] for name in habits.additions]
    own = "opts =" in update.once

    def all_of(part: str) -> str:
        return "\n".join(getattr(each, part) for each in additions if getattr(each, part))

    once = (inner_takes.before, inner_returns.before, takes.before, returns.before)
    before = [block.before, *dict.fromkeys(once), around.before, source.before, end.before]
    before += [optimizer.before, *(each.top for each in additions)]
    parts = {
        "imports": IMPORTS,
        "settings": "\n".join(SETTINGS[name] for name in habits.settings),
        "before": "\n".join(filter(None, before)),
        "layers": block.layers,
        "forward": block.forward,
        "inner takes": inner_takes.parameters,
        "inner unpacked": inner_takes.unpacked,
        "inner call": filled(inner_takes.call, module="self.inner", x="x"),
        "inner returned": inner_returns.returned,
        "inner taken": filled(inner_returns.taken, out="out", module="self.inner"),
        "takes": takes.parameters,
        "unpacked": takes.unpacked,
        "returned": returns.returned,
        "call": filled(takes.call, module="net", x="x"),
        "taken": filled(returns.taken, out="out", module="net"),
        "block call": _block_call(checkpointed),
        "depth": str(habits.depth),
        "code": LAUNCHES[one["launch"]],
        "train": _TRAIN,
        "optimizer": "" if own else optimizer.lines,
        "once": update.once,
        "setup": all_of("setup"),
        "around": around.lines,
        "loop": loop.lines,
        "body": _BODY,
        "update": update.lines,
        "between": all_of("between"),
        "after": "\n".join(filter(None, (all_of("after"), end.after))),
        "end": "\n".join(filter(None, (all_of("end"), end.lines))),
        "batches": source.batches,
        "sample": block.sample,
        "shape": repr(block.shape),
        "batch": str(block.shape[0]),
        "steps": str(STEPS),
        "loss": "loss_of(net, x)",
        "last": str(habits.last),
        "d": str(block.shape[-1]),
    }
    return (
        re.sub(r"\n{4,}", "\n\n\n", filled(_PROGRAM, **parts).replace("{shape}", "<shape>")).strip()
        + "\n"
    )


def _block_call(checkpointed: int) -> str:
    if not checkpointed:
        return "block(x)"
    call = "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)"
    if checkpointed == 1:
        return call
    return f"{call} if id(block) in {{id(b) for b in self.blocks[::2]}} else block(x)"


_ALONE = re.compile(r"^([ \t]*)<([\w ]+)>[ \t]*$")
_MARK = re.compile(r"<([a-z][a-z ]*)>")


def filled(text: str, **parts: str) -> str:
    """Return the text with each `<mark>` replaced, as lines of its own indented where it stands alone."""
    lines: list[str] = []
    for line in text.replace("{shape}", "<shape>").replace("{d}", "<d>").split("\n"):
        alone = _ALONE.match(line)
        if alone and (part := parts.get(alone[2])) is not None:
            inside = filled(part, **parts).strip("\n")
            lines += [alone[1] + one if one else "" for one in inside.split("\n")]
        else:
            lines.append(_MARK.sub(lambda mark: _inline(mark, parts), line))
    return "\n".join(lines)


def _inline(mark: re.Match[str], parts: dict[str, str]) -> str:
    part = parts.get(mark[1])
    return mark[0] if part is None else filled(part, **parts).strip("\n")
