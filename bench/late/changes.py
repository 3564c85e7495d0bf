"""Scripts that begin to do something new: those of `attacks.toml`, hooks of all kinds, and drawn ones."""

from __future__ import annotations

import itertools
import random
import re
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
CERTIFIED = "#: loop"
BEGINS = (8, 20, 50)
"""Steps before a change begins."""
AFTER = 5  # Arbitrary; steps that follow.
_SIZES = "LATE, STEPS, "
_SETTINGS: dict[str, Any] = tomllib.loads((HERE / "shapes.toml").read_text())
SHAPES: dict[str, dict[str, str]] = _SETTINGS["shapes"]
OPTIMIZERS: dict[str, str] = _SETTINGS["optimizers"]


class Change(NamedTuple):
    """Code in the slots of the loop.

    `cause`: a pattern of what a run that stops has to name. `unseen`: what torch cannot see of it, in the
    words of techniques. `single`: it leaves double precision, so what rounds is judged in single precision.
    """

    name: str
    slots: dict[str, str]
    cause: str = ""
    unseen: str = ""
    single: bool = False


class Case(NamedTuple):
    """A training script that changes at step `late`, and its names."""

    changes: tuple[Change, ...] = ()
    shape: str = "mlp"
    optimizer: str = "SGD"
    late: int = 4
    steps: int = 8
    block: int = 1

    @property
    def name(self) -> str:
        """The changes and what they are made to."""
        what = "+".join(one.name for one in self.changes)
        return f"{what} @{self.late} {self.shape} {self.optimizer} {self.block}"

    @property
    def unseen(self) -> tuple[str, ...]:
        """What torch cannot see of it."""
        return tuple(one.unseen for one in self.changes if one.unseen)

    @property
    def is_double(self) -> bool:
        """True if it computes in double precision throughout."""
        return not any(one.single for one in self.changes)

    @property
    def causes(self) -> str:
        """A pattern of what a run that stops has to name."""
        return "|".join(one.cause for one in self.changes if one.cause)

    def text(self, *, double: bool = True, nudged: bool = False) -> str:
        """The script. `nudged`: its parameters begin one rounding away."""
        slots: dict[str, list[str]] = {}
        own = {"setup": SHAPES[self.shape].get("setup", "pass")}
        nudge = {"loop": _NUDGE} if nudged else {}
        for each in (own, *(one.slots for one in self.changes), nudge):
            for slot, code in each.items():
                slots.setdefault(slot, []).append(code)
        base = (HERE / "loop.py").read_text()
        base = re.sub(f"{_SIZES}(.*) = 4, 8", f"{_SIZES}\\1 = {self.late}, {self.steps}", base)
        base = base.replace("#: shape", SHAPES[self.shape]["text"])
        base = base.replace("#: optimizer", OPTIMIZERS[self.optimizer])
        if not double:
            base = base.replace(
                "set_default_dtype(torch.float64)", "set_default_dtype(torch.float32)"
            )
        made = _filled(base, {slot: "\n".join(code) for slot, code in slots.items()})
        return made.replace("net.blocks[1]", f"net.blocks[{self.block}]")

    def beginning(self) -> str:
        """The script up to its loop, in float32."""
        text, found, _ = (
            Case(shape=self.shape, optimizer=self.optimizer).text(double=False).partition(_LOOP)
        )
        assert found
        return text


_LOOP = "for STEP in range(STEPS):"
_NUDGE = """
with torch.no_grad():
    signs = torch.Generator().manual_seed(7)
    for p in net.parameters():
        p.mul_(1 + torch.finfo(p.dtype).eps * (torch.randint(0, 2, p.shape, generator=signs) * 2 - 1))
"""


def _filled(base: str, slots: dict[str, str]) -> str:
    def put(match: re.Match[str]) -> str:
        return textwrap.indent(slots.pop(match["name"], "pass"), match["indent"])

    text = re.sub(r"^(?P<indent> *)#: (?P<name>\w+)$", put, base, flags=re.MULTILINE)
    assert not slots, slots
    return text


def written() -> Iterator[Change]:
    """The changes of `attacks.toml`, named by group and name."""
    for group, entries in tomllib.loads((HERE / "attacks.toml").read_text()).items():
        for name, entry in entries.items():
            slots = dict(entry)
            cause, unseen = slots.pop("cause", _CAUSES.get(group, "")), slots.pop("unseen", "")
            single = bool(slots.pop("single", ""))
            yield Change(f"{group}.{name}", slots, cause, unseen, single)


_CAUSES = {
    "state": "a rerun would repeat that|draws random numbers|while it runs|changes in forward",
    "model": "a gradient|forward and its backward|changes in forward|weights or its input changed|statistics",
    **dict.fromkeys(("settings", "loading", "optimizers"), "a gradient"),
    "data": "a gradient|in place while other variables alias|after its weights|supports `backward",
    "gradients": "a gradient|differentiated twice|supports `backward|gradients|`step`|step hook|settings",
}
"""What a message may name as the cause, for changes without their own `cause`."""


_SITES = """
    net net.blocks net.blocks[1] net.blocks[1].norm net.blocks[1].up net.blocks[1].act net.blocks[1].down
    net.blocks[1].drop net.embed net.norm net.head
"""
_ALL = "torch.nn.modules.module.register_module"
_OF_GRADIENTS = "lambda m, i, o: (lambda v: [{effect}, None][1])(o[0])"
_OF_MODULES = {
    "forward": "{site}.register_forward_hook(lambda m, a, v: {effect})",
    "kwargs": "{site}.register_forward_hook(lambda m, a, k, v: {effect}, with_kwargs=True)",
    "always": "{site}.register_forward_hook(lambda m, a, v: {effect}, always_call=True)",
    "first": "{site}.register_forward_hook(lambda m, a, v: {effect}, prepend=True)",
    "pre": "{site}.register_forward_pre_hook(lambda m, a: (lambda v: {effect})(a[0]))",
    "backward": f"{{site}}.register_full_backward_hook({_OF_GRADIENTS})",
    "backward pre": "{site}.register_full_backward_pre_hook(lambda m, o: (lambda v: {effect})(o[0]))",
    "all forward": f"{_ALL}_forward_hook(lambda m, a, v: {{effect}})",
    "all pre": f"{_ALL}_forward_pre_hook(lambda m, a: (lambda v: {{effect}})(a[0]))",
    "all backward": f"{_ALL}_full_backward_hook({_OF_GRADIENTS})",
}
_OF_PARAMETERS = {
    "gradient": "{site}.register_hook(lambda v: {effect})",
    "accumulated": "{site}.register_post_accumulate_grad_hook("
    "lambda p: (lambda v: [{effect}, None][1])(p.grad))",
}
_OF_STEPS = {
    "step pre": "opt.register_step_pre_hook(lambda *_: {effect})",
    "step post": "opt.register_step_post_hook(lambda *_: {effect})",
    "all steps": "torch.optim.optimizer.register_optimizer_step_post_hook(lambda *_: {effect})",
    "state saved": "opt.register_state_dict_post_hook(lambda o, s: {effect})",
    "model saved": "net.register_state_dict_post_hook(lambda *_: {effect})",
}
_EFFECTS = {
    "counts": "(SEEN.append(1), None)[1]",
    "reads": "(SEEN.append(float(v.detach().sum())), None)[1]",
    "keeps": "(SEEN.append(v), None)[1]",
    "scales": "v * 1.01",
    "writes": "(v.detach().mul_(1.01), None)[1]",
    "writes data": "(v.data.mul_(1.01), None)[1]",
}


def hooked() -> Iterator[Change]:
    """Hooks of every kind with every effect, at some places."""
    rows = itertools.product(_OF_MODULES.items(), _EFFECTS.items(), _SITES.split())
    for (kind, code), (does, effect), site in rows:
        yield _hook(f"{kind} {does} {site}", code.format(site=site, effect=effect))
    places = (
        "net.blocks[1].up.weight",
        "net.blocks[1].down.bias",
        "net.head.weight",
        "net.embed.weight",
    )
    for (kind, code), (does, effect), site in itertools.product(
        _OF_PARAMETERS.items(), _EFFECTS.items(), places
    ):
        yield _hook(f"{kind} {does} {site}", code.format(site=site, effect=effect))
    for kind, code in _OF_STEPS.items():
        yield _hook(f"{kind} counts", code.format(effect=_EFFECTS["counts"]))
    for does, effect in _EFFECTS.items():
        code = f"if STEP >= LATE and x.requires_grad: x.register_hook(lambda v: {effect})"
        causes = f"{_OF_HOOKS}|calls `SEEN.append`"  # which stands in the code of forward
        yield Change(f"hooks.tensor {does}", {"forward": code, "end": _SAYS_SEEN}, causes, "")


_OF_HOOKS = "hook|written|overwr|holds|reads or adds|in place|after its weights|twice"
_SAYS_SEEN = "say(*[float(torch.as_tensor(one).detach().sum()) for one in SEEN])"


def _hook(name: str, code: str) -> Change:
    slots = {"before": f"if STEP == LATE: {code}", "end": _SAYS_SEEN}
    return Change(f"hooks.{name}", slots, _OF_HOOKS, ".data" if ".data." in code else "")


_BEGIN = "STEP >= LATE"
_WHEN = (_BEGIN, "STEP >= LATE and STEP % 2", "STEP >= LATE and self.training")


def drawn(seed: int) -> Iterator[Case]:
    """Cases without end: changes, a model, an optimizer, the step at which they begin, and the block."""
    rng = random.Random(seed)
    every = [list(group) for group in _by_group((*written(), *hooked())).values()]
    while True:
        count = 1 if rng.random() < 0.7 else 2
        changes = tuple(_varied(rng, rng.choice(rng.choice(every))) for _ in range(count))
        (late,) = rng.choices(BEGINS, (4, 2, 1))
        shape, optimizer = rng.choice(list(SHAPES)), rng.choice(list(OPTIMIZERS))
        yield Case(changes, shape, optimizer, late, late + AFTER, rng.randrange(4))


def _by_group(changes: tuple[Change, ...]) -> dict[str, list[Change]]:
    groups: dict[str, list[Change]] = {}
    for one in changes:
        groups.setdefault(one.name.partition(".")[0], []).append(one)
    return groups


def _varied(rng: random.Random, change: Change) -> Change:
    """The change, in each step from then on or in some of them."""
    if _BEGIN not in (code := change.slots.get("forward", "")):
        return change
    return change._replace(
        slots={**change.slots, "forward": code.replace(_BEGIN, rng.choice(_WHEN))}
    )
