"""Which lines wait, told from the source: the emulated device is the judge of each."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torchtrim
from torchtrim.linter.static_syncs import static_syncs
from torchtrim.syncs.lookup import is_from, row

HEAD = """
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn


def body(x: Tensor, mask: torch.BoolTensor, labels: torch.LongTensor, device: torch.device, n: int):
"""
WAIT = [
    "x.sum().item()",
    "float(x.sum())",
    "int(labels.max()) + 1",
    "bool(mask.any())",
    "x.tolist()",
    "x.cpu()",
    "x.to('cpu')",
    "x.detach().cpu().numpy()",
    "if (labels == 0).any(): pass",
    "if not mask.all(): pass",
    "if n > 0 and mask.any(): pass",
    "y = x if mask.any() else -x",
    "assert (labels >= 0).all()",
    "while (labels > 90).any(): break",
    "print(f'{x.sum()}')",
    "max(x.sum(), 0)",
    "torch.equal(x, x + 1)",
    "torch.allclose(x, x + 1)",
    "x[:labels.argmax()]",
    "torch.arange(labels.max())",
    "x.view(labels.size(0), -1).add(x, alpha=x.sum())",
    "x[mask]",
    "x[labels == 1]",
    "x[x.sum(1) > 0]",
    "x[mask] = x[0].clone()",
    "mask.nonzero()",
    "torch.where(mask)",
    "labels.unique()",
    "torch.unique_consecutive(labels)",
    "torch.bincount(labels)",
    "x.masked_select(mask[:, None])",
    "x.repeat_interleave(labels, dim=0)",
    "F.one_hot(labels)",
    "torch.tensor([1.0, 2.0], device=device)",
    "torch.tensor(0.5, device=x.device)",
    "x.new_tensor([1.0])",
    "torch.as_tensor([1, 2], device=device)",
    "torch.zeros(3).to(device)",
    "torch.arange(n).to(x.device)",
    "torch.linspace(0, 1, n).cuda()",
    "torch.from_numpy(np.zeros(3)).to(device)",
    "x[:, [0, 1]]",
    *([] if is_from("2.15") else ["x[labels] = 1.0"]),
    "torch.cuda.synchronize()",
    "[t.item() for t in x.sum(0)]",
    "for value in x.sum(0): float(value)",
    "torch.linalg.eigh(x @ x.T)",
    "x.masked_fill(mask[:, None], torch.scalar_tensor(0.0, device=device))",
    "if torch.bernoulli(x).sum() > 0: pass",
    "int(torch.multinomial(x[0], 1))",
    "float(torch.broadcast_to(x.sum(), (1,)))",
    "float(F.max_pool3d(x[None, None, None], 1).sum())",
]
WAIT_NOT = [
    "x[mask] = 0.0",
    "x.masked_fill(mask[:, None], 0.0)",
    "F.one_hot(labels, 8)",
    "x.repeat_interleave(2, dim=0)",
    "x.repeat_interleave(labels, dim=0, output_size=6)",
    "x.shape[0] + x.numel() + x.dim()",
    "if x.shape[0] > 2: pass",
    "if x is not None and x.is_floating_point(): pass",
    "assert x.shape == (4, 3)",
    "torch.where(mask[:, None], x, 0.0)",
    "torch.zeros(3, device=device)",
    "torch.full((2,), 1.0, device=x.device)",
    "torch.arange(n, device=device)",
    "torch.tensor([1.0, 2.0]).sum().item()",
    "torch.rand([]).item() < 0.5",
    "torch.tensor([3])[torch.tensor([True])]",
    "float(np.ones(3).sum())",
    "[value.item() for value in torch.linspace(0, 1, 4)]",
    "if device.type == 'cpu': x.sum().item()",
    "if not x.is_cuda: x.tolist()",
    "if torch.jit.is_scripting(): x.sum().item()",
    "if isinstance(n, torch.Tensor): n.item()",
    "max(n, 3)",
    "len(x)",
    "for row in x: row.mul(2)",
    "x.size(0) if x.requires_grad else x.stride(0)",
    "x[labels]",
    "x[..., :2]",
    "x.to(torch.float16)",
    "torch.is_floating_point(x)",
    "x.to(device)",
    "torch.sort(labels).values",
    "x.max(dim=1).values",
    "int(n)",
    "str(x.shape)",
    "{'a': x}['a']",
]


def snippet(line: str) -> str:
    return HEAD + textwrap.indent(line, "    ") + "\n"


@pytest.fixture(scope="module")
def waits_when_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], set[str]]]:
    """The codes of what a snippet waits for, on an emulated device."""
    path = tmp_path_factory.mktemp("snippets") / "snippet.py"
    with torchtrim.emulate():
        x = torch.ones(4, 3, device="cuda")
        labels = torch.arange(4, device="cuda")

        def run(text: str) -> set[str]:
            names: dict[str, Any] = {}
            exec(compile(text, str(path), "exec"), names)
            given = (x.clone(), labels > 1, labels.clone(), x.device, 4)
            measured = torchtrim.measure(lambda: names["body"](*given), project=path.parent)
            return {row(name).code for _, _, _, name, _ in measured.waits}

        yield run


def told(text: str) -> set[str]:
    return {row(one.row).code for one in static_syncs(ast.parse(text), "snippet.py")}


@pytest.mark.parametrize("line", WAIT)
def test_a_line_that_waits_is_found(line: str, waits_when_run: Callable[[str], set[str]]) -> None:
    found = told(snippet(line))
    assert found
    assert found <= waits_when_run(snippet(line))


@pytest.mark.parametrize("line", WAIT_NOT)
def test_a_line_that_does_not_wait_is_left_alone(
    line: str, waits_when_run: Callable[[str], set[str]]
) -> None:
    assert told(snippet(line)) == set()
    assert waits_when_run(snippet(line)) == set()


def lines(text: str, path: str = "model.py") -> list[int]:
    return [one.node.lineno for one in static_syncs(ast.parse(textwrap.dedent(text)), path)]


MODULE = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self, rates):
        super().__init__()
        self.rates = [r.item() for r in torch.linspace(0, 1, 3).cuda()]
        self.layer = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.table = torch.arange(10)

    def forward(self, x, config):
        y = self.layer(x)
        if config.any or self.training:
            y = y[y.sum(1) > 0]
        if self.count.item() > 3:
            y = y + self.table.to(y.device)
        return y, self.unknown(x).item()
"""


def test_attributes_of_a_module_are_known_from_its_constructor_which_runs_once() -> None:
    assert lines(MODULE) == [18, 19, 20, 21]
    assert lines(f"import numpy as np{MODULE}") == [18, 19, 20]


@pytest.mark.parametrize(
    "name",
    ["__init__", "reset_parameters", "_init_weights", "from_pretrained", "load_state", "save_it"],
)
def test_code_that_runs_once_is_left_out(name: str) -> None:
    code = f"import torch\nclass A:\n    def {name}(self, x: torch.Tensor):\n        x.item()\n"
    assert lines(code) == []
    assert lines(code.replace(name, "step")) == [4]


@pytest.mark.parametrize(
    ("base", "method", "found"),
    [
        ("Dataset", "step", []),
        ("ImageProcessor", "pad", []),
        ("ImageProcessor", "post_process_masks", [4]),
        ("Pipeline", "postprocess", []),
        ("Pipeline", "_forward", [4]),
        ("DiffusionPipeline", "__call__", [4]),
    ],
)
def test_classes_that_work_on_the_host(base: str, method: str, found: list[int]) -> None:
    code = f"import torch\nclass A({base}):\n    def {method}(self, x: torch.Tensor):\n        x.item()\n"
    assert lines(code) == found


def test_files_that_run_once() -> None:
    code = "import torch\ndef f(x: torch.Tensor):\n    x.item()\n"
    assert lines(code, "convert_weights.py") == []
    assert lines(code, "model.py") == [3]


def test_a_name_that_may_be_a_number_is_not_taken_for_a_tensor() -> None:
    assert lines("import torch\ndef f(x: torch.Tensor | float):\n    if x > 0: pass\n") == []
    assert (
        lines("import torch\ndef f(x, y: torch.Tensor):\n    if x > 0: x = y\n    float(x)\n") == []
    )


def test_both_ways_of_a_branch_are_followed() -> None:
    code = """
    import torch
    def f(x: torch.Tensor, host: bool):
        if host:
            y = x.cpu()
            return y.item()
        try:
            y = x.sum()
        except ValueError:
            raise
        else:
            pass
        with torch.no_grad():
            z = y + 1
        def inner():
            return z.item()
        match host:
            case True:
                z.item()
        return inner, lambda: z.tolist()
    """
    assert lines(code) == [5, 16, 19, 20]


def test_what_only_raises_an_error_is_left_out() -> None:
    assert (
        lines("import torch\ndef f(x: torch.Tensor):\n    raise ValueError(f'{x.sum()}')\n") == []
    )


def test_names_of_torch_may_be_called_anything() -> None:
    code = """
    import torch as th
    from torch import nonzero as nz
    from torch.nn import functional as fn
    def f(x, m: th.Tensor):
        torch = m
        return nz(m), fn.one_hot(m), torch.item(), th.unique(x)
    """
    assert len(lines(code)) == 4


def test_any_python_is_walked() -> None:
    for path in sorted(Path(ast.__file__).parent.glob("*.py"))[:60]:
        static_syncs(ast.parse(path.read_bytes()), str(path))


KEPT = [
    ("self.config = x", "torch.as_tensor(self.config.size - 1, device=self.device)", True),
    ("self.other = x", "torch.as_tensor(self.other.size - 1, device=self.device)", False),
    ("self.total = torch.zeros(1, device='cuda')", "self.total.item()", True),
    ("self.total = None\n        self.total = torch.relu(x)", "self.total.item()", True),
    ("self.total = torch.zeros(1)", "self.total.item()", False),
    ("self.total = 0\n        self.total = torch.relu(x)", "float(self.total)", False),
    ("self.seen = {'loss': torch.relu(x), 'n': 3}", "self.seen['loss'].item()", True),
    ("self.seen = {'loss': torch.relu(x), 'n': 3}", "float(self.seen['n'])", False),
]


@pytest.mark.parametrize(("kept", "read", "waits"), KEPT)
def test_what_is_kept_on_self_is_known_in_every_method(kept: str, read: str, waits: bool) -> None:
    code = f"class A:\n    def read(self):\n        return {read}\n    def step(self, x):\n        {kept}\n"
    assert bool(lines(f"import torch\n{code}")) is waits


DICTS = [
    ("d = {'a': torch.relu(x), 'b': 2}", "float(d['a'])", True),
    ("d = {'a': torch.relu(x), 'b': 2}", "float(d['b'])", False),
    ("d = {}\n    d['a'] = torch.relu(x)", "float(d['a'])", True),
    ("d = {'a': 1}\n    d['a'] = torch.relu(x)", "if d['a']: pass", True),
    ("d = dict(a=1)", "float(d['a'])", False),
    ("d = {k: torch.relu(x) for k in 'ab'}", "float(d['a'])", True),
    ("d = {'a': torch.relu(x)}", "[v.item() for v in d.values()]", True),
    ("d = {'a': torch.relu(x)}", "[float(v) for k, v in d.items()]", True),
    ("d = {'a': torch.relu(x)}", "[float(k) for k, v in d.items()]", False),
    ("d = {'a': torch.relu(x)}", "float(d.get('a'))", True),
    ("d = {'a': torch.relu(x), **more}", "float(d['c'])", False),
    ("d = {'a': torch.relu(x)} if y else {'a': 1}", "float(d['a'])", False),
]


@pytest.mark.parametrize(("made", "read", "waits"), DICTS)
def test_values_of_dicts(made: str, read: str, waits: bool) -> None:
    code = f"import torch\ndef f(x, y, more):\n    {made}\n    {read}\n"
    assert bool(lines(code)) is waits


def test_what_functions_and_methods_of_the_file_return() -> None:
    code = (
        "class A:\n    def use(self, x):\n        return float(self.made(x)) + float(self.shown)\n"
        "    def made(self, x):\n        return torch.relu(x)\n"
        "    @property\n    def shown(self):\n        return torch.relu(self.x)\n"
        "def use(x):\n    return float(made(x)) + float(plain(x))\n"
        "def made(x):\n    return torch.relu(x)\ndef plain(x):\n    return 3\n"
    )
    assert lines(f"import torch\n{code}") == [4, 4, 11]


UNKNOWN_NAMES = [
    ("loss = model(x)\n    loss.backward()\n    loss.item()", True),
    ("accelerator.backward(loss)\n    float(loss)", True),
    ("(target != ignored).sum().item()", True),
    ("int((model(x).argmax(dim=-1) == target).sum())", True),
    ("if exists(row) and row.any(): pass", True),
    ("if isinstance(row, torch.Tensor): row.item()", True),
    ("float(trainer.clip_grad_norm_(1.0))", True),
    ("[False] * torch.ones(3, device='cuda')[0]", True),
    ("torch.zeros(3).to(device=device, dtype=torch.float16)", True),
    ("get_accelerator().synchronize()", True),
    ("y = torch.cat(parts)\n    y[torch.cat(pad_masks)] = torch.relu(y)[0]", True),
    ("y = torch.cat(parts)\n    y[torch.cat(orders)] = torch.relu(y)[0]", False),
    ("[p.grad.norm().item() for p in parts]", True),
    ("function.backward(ctx, x)\n    if function: pass", False),
    ("row.any(axis=0)", False),
]


@pytest.mark.parametrize(("body", "waits"), UNKNOWN_NAMES)
def test_what_a_name_is_by_how_it_is_used(body: str, waits: bool) -> None:
    code = f"import torch\ndef f(x, target, parts, pad_masks, orders, row, device):\n    {body}\n"
    assert bool(lines(code)) is waits


@pytest.mark.parametrize("read", ["row.item()", "if row.any(): pass", "float((row > 0).sum())"])
def test_where_there_are_arrays_their_methods_say_nothing(read: str) -> None:
    assert lines(f"import torch\ndef f(row):\n    {read}\n")
    assert not lines(f"import torch\nimport numpy as np\ndef f(row):\n    {read}\n")


@pytest.mark.parametrize("name", ["main", "setup"])
def test_a_main_that_trains_runs_more_than_once(name: str) -> None:
    loop = "for x in parts:\n        loss = model(x)\n        loss.backward()\n        print(loss.item())"
    assert bool(lines(f"import torch\ndef {name}(parts):\n    {loop}\n")) is (name == "main")
    assert not lines(f"import torch\ndef {name}(x: torch.Tensor):\n    print(x.sum().item())\n")


UNKNOWN_BUT_TOLD = [
    ("float(x)\n    dist.all_reduce(x)\n    float(x)", [6]),
    ("self.total += x.loss.item() + metrics['train_loss'].item()", [4, 4]),
    ("x.rate.item()", []),
    ("assert x.rate.isnan().sum() == 0", [4]),
    ("y = get_accelerator().FloatTensor([x])", [4]),
]


@pytest.mark.parametrize(("code", "found"), UNKNOWN_BUT_TOLD)
def test_what_ranks_exchange_and_losses_are_tensors(code: str, found: list[int]) -> None:
    head = "import numpy, torch\nfrom engine import comm as dist\ndef f(self, x, config, metrics, other):\n"
    assert lines(f"{head}    {code}\n") == found


def test_an_annotated_function_gives_what_it_computes() -> None:
    every = "def every(x) -> torch.BoolTensor:\n    return {}\n"
    code = f"import torch\n{every}def f(x):\n    if every(x): pass\n"
    assert lines(code.format("x.sum() == x.numel()")) == [5]
    assert lines(code.format("x")) == []


LOOP = """
import torch
from loggers import logger
def train(model, loader, n, log_every):
    for epoch in range(n):
        for step, x in enumerate(loader):
            loss = torch.relu(x).sum()
            loss.backward()
            model.optimizer.step()
            {}
                print(loss.item())
        print(f"{{loss:.3f}} {{loss.item()}}")
"""


@pytest.mark.parametrize(
    ("test", "often"),
    [
        ("if step % log_every == 0:", False),
        ("if not (step + 1) % 100 and n:", False),
        ("if step == 0 or step % model.every == 0:", False),
        ("if step % 2 == 0:", True),
        ("if step % log_every != 0:", True),
        ("if n % len(x) == 0:", True),
        ("with torch.no_grad():", True),
    ],
)
def test_what_runs_every_so_many_steps_or_once_an_epoch_is_left_out(test: str, often: bool) -> None:
    assert lines(LOOP.format(test)) == ([11] if often else [])


def test_what_follows_microbatches_runs_in_each_step() -> None:
    code = LOOP.format("if step % log_every == 0:")
    assert lines(code.replace("model.optimizer.step()", "pass")) == [12, 12]
    assert lines(code.replace("enumerate(loader)", "range(n)").replace("step, x", "x")) == [12, 12]


@pytest.mark.parametrize(
    ("test", "stored", "cached"),
    [
        ("self.k is None", "self.k", True),
        ("'k' not in self.kept", "self.kept['k']", True),
        ("(k := self.kept.get('k')) is None", "self.kept['k']", True),
        ("self.k is None", "self.other", False),
        ("x.grad is None", "x.grad", False),
        ("k is None", "k", False),
    ],
)
def test_the_filling_of_a_cache_is_left_out(test: str, stored: str, cached: bool) -> None:
    code = f"import torch\ndef f(self, x: torch.Tensor, k):\n    if {test}:\n        {stored} = x.tolist()\n"
    assert lines(code) == ([] if cached else [4])


def test_helpers_around_synchronize_and_data_of_tensors() -> None:
    code = """
    from accelerators import device_synchronize
    def f(xs, y):
        device_synchronize()
        return max(x.data.abs().max() for x in xs), y.data.cpu(), y.data.sum()
    """
    assert lines(code) == [4, 5, 5]


def test_a_sampler_of_indices_works_on_the_host_and_one_of_images_does_not() -> None:
    code = "import torch\nclass MySampler:\n    def {}(self, x: torch.Tensor):\n        x.item()\n"
    assert lines(code.format("__iter__")) == []
    assert lines(code.format("sample")) == [4]


def test_what_goes_backward_is_a_tensor_whatever_an_annotation_says() -> None:
    code = """
    def total(x) -> float:
        return x.sum()
    def f(x):
        loss = total(x)
        loss.backward()
        return loss.item()
    """
    assert lines(code) == [7]
