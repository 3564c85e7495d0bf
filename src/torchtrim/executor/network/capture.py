"""Capture a network by `torch.export` on fake tensors, without allocating or computing at full size."""

from __future__ import annotations

import contextlib
import importlib.util
import operator
import random
import warnings
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.nn.modules import module as modules_of_torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from torchtrim.capture.modules import HOOKS, without_hooks
from torchtrim.capture.snapshot import OF_TORCH, Snapshot
from torchtrim.core.words import first_line
from torchtrim.errors import TorchtrimError, Unsupported
from torchtrim.executor.network.captured import Captured, From, NetworkValue, Op, Ref, Source

_KINDS: dict[InputKind, From] = {
    InputKind.USER_INPUT: "input",
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
}


_CHECKS = frozenset((torch.ops.aten._assert_tensor_metadata.default,))
"""Checks added by torch.export, which fake tensors have already passed."""


class Reader(fx.Interpreter):
    """Runs the exported graph on its fake tensors, to find which of them share memory."""

    def __init__(self, program: ExportedProgram) -> None:
        super().__init__(program.graph_module)
        self._program = program
        self._values: list[NetworkValue] = []
        self._numbers: dict[fx.Node, tuple[int, ...]] = {}
        self._memories: dict[int, int] = {}
        self._bytes: list[int] = []
        self._alive: list[Any] = []
        self._ops: list[Op] = []
        self._are_ours: list[bool] = []

    def read(self) -> Captured:
        """Read the graph. Raises `Unsupported` for nodes that cannot be planned."""
        signature = self._program.graph_signature
        nodes = list(self._program.graph.nodes)
        fakes = [node.meta["val"] for node in nodes if node.op == "placeholder"]
        mode = next((v.fake_mode for v in fakes if hasattr(v, "fake_mode")), None)
        with mode or contextlib.nullcontext():
            self.run(*fakes, enable_io_processing=False)
        sources = self._sources()
        (output,) = (node for node in nodes if node.op == "output")
        returned = list(zip(signature.output_specs, output.args[0], strict=True))
        specs = zip(signature.input_specs, sources, strict=True)
        written: dict[OutputKind, dict[Any, Source]] = {
            OutputKind.BUFFER_MUTATION: {source.key: source for source in sources},
            OutputKind.USER_INPUT_MUTATION: {spec.arg.name: source for spec, source in specs},
        }
        results, updates = [], []
        for spec, node in returned:
            if spec.kind is OutputKind.USER_OUTPUT:
                results.append(self._ref(node))
            elif spec.kind in written:
                updates.append((written[spec.kind][spec.target], self._ref(node).value))
            else:
                raise Unsupported(f"its graph returns a {spec.kind.name}")
        return Captured(
            ops=tuple(self._ops),
            values=tuple(self._values),
            memories=tuple(self._bytes),
            sources=tuple(sources),
            constants={
                name: value
                for name, value in self._program.constants.items()
                if isinstance(value, torch.Tensor)
            },
            results=tuple(results),
            returns=self._program.call_spec.out_spec,
            updates=tuple(updates),
        )

    def run_node(self, n: fx.Node) -> Any:
        """Run a node on fake tensors and number its outputs."""
        result = super().run_node(n)
        self._alive.append(result)
        if n.op == "placeholder":
            self._numbers[n] = (self._number(result, ours=False),)
        elif n.op == "call_function":
            self._operator(n, result)
        elif n.op == "get_attr":
            raise Unsupported(f"its graph has a subgraph, `{n.target}`")
        return result

    def _operator(self, node: fx.Node, result: Any) -> None:
        if node.target is operator.getitem:
            source, index = node.args
            assert isinstance(source, fx.Node)
            assert isinstance(index, int)
            self._numbers[node] = (self._numbers[source][index],)
            return
        if node.target in _CHECKS:
            return
        if not isinstance(node.target, OpOverload):
            raise Unsupported(f"its graph has `{node.name}`, which is not a tensor operator")
        single = isinstance(result, torch.Tensor)
        parts = [result] if single else list(result) if isinstance(result, (list, tuple)) else []
        if not parts:
            raise Unsupported(f"`{node.target}` returns a number that is known only at run time")
        if node.target._schema.is_mutable:
            raise Unsupported(f"`{node.target}` writes into its arguments")
        outputs = tuple(self._number(part, ours=True) for part in parts)
        self._numbers[node] = outputs
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._ref)
        leaves = pytree.tree_leaves((args, kwargs), is_leaf=lambda x: isinstance(x, Ref))
        inputs = tuple(x.value for x in leaves if isinstance(x, Ref))
        stack = node.meta.get("nn_module_stack") or {}
        path = list(stack.values())[-1][0] if stack else ""
        self._ops.append(Op(node.target, args, kwargs, inputs, outputs, single, path))

    def _number(self, tensor: Any, *, ours: bool) -> int:
        if not isinstance(tensor, torch.Tensor):
            return -1
        if any(not isinstance(n, int) for n in (*tensor.shape, *tensor.stride())):
            raise Unsupported("a shape in it depends on values")
        storage = tensor.untyped_storage()
        memory = self._memories.setdefault(storage._cdata, len(self._bytes))
        if memory == len(self._bytes):
            self._bytes.append(int(storage.nbytes()))
            self._are_ours.append(ours)
        self._values.append(
            NetworkValue(
                tuple(tensor.shape),
                tuple(tensor.stride()),
                int(tensor.storage_offset()),
                tensor.dtype,
                tensor.device,
                memory,
                self._are_ours[memory],
            )
        )
        return len(self._values) - 1

    def _ref(self, node: Any) -> Any:
        if not isinstance(node, fx.Node):
            return node
        (number,) = self._numbers[node]
        if number < 0:
            raise Unsupported(f"`{node.name}` is not a tensor, and is known only at run time")
        return Ref(number)

    def _sources(self) -> list[Source]:
        nodes = [node for node in self._program.graph.nodes if node.op == "placeholder"]
        found, leaf = [], 0
        for spec, node in zip(self._program.graph_signature.input_specs, nodes, strict=True):
            kind = _KINDS.get(spec.kind)
            if kind is None:
                raise Unsupported(f"its graph takes a {spec.kind.name}")
            key: int | str = str(spec.target)
            if kind == "input":
                key, leaf = leaf, leaf + 1
            found.append(Source(kind, key, self._numbers[node][0]))
        return found


_NUMPY = importlib.util.find_spec("numpy") is not None
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks")
PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_FUSED = (nn.TransformerEncoderLayer, nn.TransformerEncoder, nn.MultiheadAttention)


def capture(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Captured:
    """Return the graph of one call, without the module's own forward hooks.

    Raises `Unsupported` with the reason: control flow or shapes that depend on values, hooks on inner
    modules, tensor subclasses, state other than tensors. The module is unchanged.
    """
    _check(module, args, kwargs)
    before, drawn = _whole_state(module), _random_state()
    snapshot = Snapshot([module], (), values=False)
    states: list[Hashable] = []
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            _disable_current_modes(),
            torch.no_grad(),
            without_hooks(module),
            # Each call adds the state at its end, before torch.export restores it.
            module.register_forward_hook(lambda *_: states.append(_whole_state(module))),
        ):
            program = torch.export.export(module, args, dict(kwargs), strict=False)
            program = program.run_decompositions({})
        if any(state != before for state in states):
            raise Unsupported("it changes its own attributes when it is called")
        if _random_state() != drawn:
            raise Unsupported("it draws random numbers outside of torch")
    except TorchtrimError:
        raise
    except Exception as error:
        line = next(filter(None, map(str.strip, str(error).splitlines())), "no message")
        raise Unsupported(
            f"torch.export cannot follow it: {type(error).__name__}: {line}"
        ) from error
    finally:
        snapshot.restore()
    try:
        return Reader(program).read()
    except Unsupported as error:
        raise Unsupported(first_line(error)) from None


def _check(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise Unsupported("it is compiled by TorchScript")
    for path, inner in module.named_modules():
        if path and any(getattr(inner, name, None) for name in HOOKS):
            raise Unsupported(f"`{path}` has hooks, which would no longer run")
        if takes_fused_path(inner):
            raise Unsupported(
                f"`{path or type(inner).__name__}` takes a fused path in eval that torch.export does "
                "not see (torch.backends.mha.set_fastpath_enabled(False) turns it off)"
            )
    if any(getattr(modules_of_torch, name, None) for name in _GLOBAL_HOOKS):
        raise Unsupported("there are hooks for all modules, which would no longer run")
    leaves = pytree.tree_leaves((args, dict(kwargs)))
    for leaf in (leaf for leaf in leaves if isinstance(leaf, torch.Tensor)):
        if type(leaf) not in (torch.Tensor, nn.Parameter):
            raise Unsupported(f"an input is a {type(leaf).__name__}, which is a tensor subclass")
        if leaf.layout is not torch.strided:
            raise Unsupported(f"an input is not dense but {leaf.layout}")


def takes_fused_path(module: nn.Module) -> bool:
    """Return True if torch runs the module by a fused kernel in eval mode, which tracing does not see."""
    fused = any(type(module).forward is kind.forward for kind in _FUSED)
    return fused and not module.training and torch.backends.mha.get_fastpath_enabled()


def plain_state(module: nn.Module) -> Hashable:
    """Return all inner modules with their modes and plain attributes, which a graph depends on."""
    return tuple(
        (id(inner), type(inner).__qualname__, inner.training, _attributes(inner))
        for inner in module.modules()
    )


def _whole_state(module: nn.Module) -> Hashable:
    sizes = tuple(
        (name, len(value))
        for inner in module.modules()
        for name, value in vars(inner).items()
        if name not in OF_TORCH and isinstance(value, (list, dict, set))
    )
    return plain_state(module), sizes


def _attributes(module: nn.Module) -> Hashable:
    return tuple(
        (name, value)
        for name, value in vars(module).items()
        if name not in OF_TORCH
        and all(isinstance(x, PLAIN_TYPES) for x in (value if type(value) is tuple else (value,)))
    )


def _random_state() -> Hashable:
    drawn: Any = importlib.import_module("numpy.random").get_state() if _NUMPY else None
    return random.getstate(), None if drawn is None else (bytes(drawn[1]), *drawn[2:])
