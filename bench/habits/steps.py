# ruff: noqa: E501 (lines of scripts)
"""Optimizers of generated scripts, and how a step uses them."""

from __future__ import annotations

from typing import NamedTuple


class Optimizer(NamedTuple):
    """Lines that make `opts`, a list; what stands before them."""

    lines: str
    before: str = ""
    sparse: bool = False
    """Takes sparse gradients."""


class Update(NamedTuple):
    """Lines of a step, with `<loss>` for the loss of `x`; `once`: lines before the loop.

    `plain`: every gradient comes from one backward of one loss, and then each optimizer steps once.
    """

    lines: str
    once: str = ""
    dense: bool = False
    """Takes no sparse gradients."""
    lone: bool = False
    """Takes one optimizer."""


_OWN = """
class Signs(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure() if closure else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad.sign(), alpha=-group["lr"])
        return loss
"""

OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": Optimizer("opts = [torch.optim.SGD(net.parameters(), lr=0.01)]", sparse=True),
    "momentum": Optimizer(
        "opts = [torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, nesterov=True)]"
    ),
    "adam": Optimizer("opts = [torch.optim.Adam(net.parameters(), lr=1e-3)]"),
    "adamw without foreach": Optimizer(
        "opts = [torch.optim.AdamW(net.parameters(), lr=1e-3, foreach=False)]"
    ),
    "adamw of one loop": Optimizer(
        "opts = [torch.optim.AdamW(net.parameters(), lr=1e-3, foreach=True, amsgrad=True)]"
    ),
    "rmsprop": Optimizer("opts = [torch.optim.RMSprop(net.parameters(), lr=1e-3, centered=True)]"),
    "adagrad": Optimizer("opts = [torch.optim.Adagrad(net.parameters(), lr=0.01)]", sparse=True),
    "groups": Optimizer(
        "opts = [torch.optim.AdamW([\n"
        "    {'params': [p for p in net.parameters() if p.dim() > 1], 'weight_decay': 0.1},\n"
        "    {'params': [p for p in net.parameters() if p.dim() <= 1], 'weight_decay': 0.0},\n"
        "], lr=1e-3)]"
    ),
    "two": Optimizer(
        "opts = [torch.optim.SGD(net.blocks.parameters(), lr=0.01), torch.optim.Adagrad(net.head.parameters(), lr=1e-3)]",
        sparse=True,
    ),
    "one a block": Optimizer(
        "opts = [torch.optim.Adam(b.parameters()) for b in net.blocks] + [torch.optim.Adam(net.head.parameters())]"
    ),
    "its own": Optimizer("opts = [Signs(net.parameters())]", _OWN),
    "made in a function": Optimizer(
        "def build(params):\n    return torch.optim.NAdam(list(params), lr=1e-3)\n\nopts = [build(net.parameters())]"
    ),
    "adafactor": Optimizer("opts = [torch.optim.Adafactor(net.parameters(), lr=0.01)]"),
}
_ZERO = "for o in opts:\n    o.zero_grad()\n"
_STEP = "for o in opts:\n    o.step()"
UPDATES: dict[str, Update] = {
    "plain": Update(_ZERO + "loss = <loss>\nloss.backward()\n<between>\n" + _STEP),
    "zeroed after": Update("loss = <loss>\nloss.backward()\n<between>\n" + _STEP + "\n" + _ZERO),
    "zeros kept": Update(
        "for o in opts:\n    o.zero_grad(set_to_none=False)\nloss = <loss>\nloss.backward()\n<between>\n"
        + _STEP,
        dense=True,
    ),
    "zeroed by the net": Update(
        "net.zero_grad()\nloss = <loss>\nloss.backward()\n<between>\n" + _STEP
    ),
    "accumulated": Update(
        "loss = <loss> / 2\nloss.backward()\nif step % 2:\n    <between>\n    for o in opts:\n        o.step()\n"
        "        o.zero_grad()"
    ),
    "micro-batches": Update(
        _ZERO
        + "for x in x.detach().chunk(2):\n    loss = <loss> / 2\n    loss.backward()\n<between>\n"
        + _STEP
    ),
    "clipped": Update(
        _ZERO + "loss = <loss>\nloss.backward()\n<between>\n"
        "norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)\n"
        + _STEP
        + "\nprint(f'{float(norm):.4f}')",
        dense=True,
    ),
    "values clipped": Update(
        _ZERO + "loss = <loss>\nloss.backward()\n<between>\n"
        "torch.nn.utils.clip_grad_value_(net.parameters(), 0.1)\n" + _STEP,
        dense=True,
    ),
    "autocast": Update(
        _ZERO
        + "with torch.autocast('cpu', dtype=torch.bfloat16):\n    loss = <loss>\nloss.backward()\n<between>\n"
        + _STEP
    ),
    "autocast and a scaler": Update(
        _ZERO + "with torch.autocast('cpu', dtype=torch.bfloat16):\n    loss = <loss>\n"
        "scaler.scale(loss).backward()\nscaler.unscale_(opts[0])\n<between>\nscaler.step(opts[0])\nscaler.update()",
        "scaler = torch.amp.GradScaler('cpu', init_scale=256.0)",
        dense=True,
        lone=True,
    ),
    "a closure": Update(
        "def closure():\n    opts[0].zero_grad()\n    loss = <loss>\n    loss.backward()\n    <between>\n    return loss\n\n"
        "loss = opts[0].step(closure)",
        lone=True,
    ),
    "lbfgs": Update(
        "def closure():\n    opts[0].zero_grad()\n    loss = <loss>\n    loss.backward()\n    <between>\n    return loss\n\n"
        "loss = opts[0].step(closure)",
        "opts = [torch.optim.LBFGS(net.parameters(), lr=0.01, max_iter=2, history_size=3)]",
        dense=True,
        lone=True,
    ),
    "skipped where not finite": Update(
        _ZERO
        + "loss = <loss>\nif torch.isfinite(loss):\n    loss.backward()\n    <between>\n    for o in opts:\n"
        "        o.step()"
    ),
    "torch.autograd.backward": Update(
        _ZERO + "loss = <loss>\ntorch.autograd.backward([loss, loss * 0.1])\n<between>\n" + _STEP
    ),
    "torch.autograd.grad": Update(
        "loss = <loss>\nparams = [p for p in net.parameters() if p.requires_grad]\n"
        "for p, g in zip(params, torch.autograd.grad(loss, params, allow_unused=True)):\n    p.grad = g\n<between>\n"
        + _STEP
    ),
    "two backwards": Update(
        _ZERO
        + "loss = <loss>\nloss.backward(retain_graph=True)\n(loss * 0.5).backward()\n<between>\n"
        + _STEP
    ),
    "two losses": Update(
        _ZERO
        + "loss = <loss>\nother = <loss>\nloss.backward()\nother.backward()\n<between>\n"
        + _STEP
    ),
    "a gradient's penalty": Update(
        _ZERO + "x = x.detach().requires_grad_()\nloss = <loss>\n"
        "(given,) = torch.autograd.grad(loss, x, create_graph=True)\n"
        "(loss + given.square().sum()).backward()\n<between>\n" + _STEP,
        dense=True,
    ),
    "sharpness": Update(
        _ZERO
        + "<loss>.backward()\nwith torch.no_grad():\n    moved = [(p, p.grad * 0.01) for p in net.parameters() if p.grad is not None]\n"
        "    for p, by in moved:\n        p.add_(by)\n" + _ZERO + "loss = <loss>\nloss.backward()\n"
        "with torch.no_grad():\n    for p, by in moved:\n        p.sub_(by)\n<between>\n" + _STEP
    ),
    "by hand": Update(
        "net.zero_grad()\nloss = <loss>\nloss.backward()\n<between>\nwith torch.no_grad():\n"
        "    for p in net.parameters():\n        if p.grad is not None:\n            p -= 0.01 * p.grad.to_dense()",
        "opts = []",
    ),
    "stepped in backward": Update(
        "loss = <loss>\nloss.backward()",
        "mine = {p: torch.optim.SGD([p], lr=0.01) for p in net.parameters()}\n\n"
        "def update(p):\n    mine[p].step()\n    mine[p].zero_grad()\n\n"
        "for p in net.parameters():\n    p.register_post_accumulate_grad_hook(update)\n"
        "opts = []",
    ),
    "functional_call": Update(
        _ZERO + "state = dict(net.named_parameters()) | dict(net.named_buffers())\n"
        "loss = functional(net, state, x)\nloss.backward()\n<between>\n" + _STEP,
        "class Called(nn.Module):\n    def __init__(self, net):\n        super().__init__()\n        self.net = net\n\n"
        "    def forward(self, x):\n        net = self.net\n        return <loss>\n\n"
        "def functional(net, state, x):\n    given = {f'net.{k}': v for k, v in state.items()}\n"
        "    return torch.func.functional_call(Called(net), given, (x,))",
    ),
}
