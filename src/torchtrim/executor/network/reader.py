"""Reads an exported program: its operators on numbered values, and which values share memory."""

from __future__ import annotations

import contextlib
import operator
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from torchtrim.errors import Unsupported
from torchtrim.executor.network.captured import Captured, From, Op, Ref, Source, Value

_KINDS: dict[InputKind, From] = {
    InputKind.USER_INPUT: "input",
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
}


_CHECKS = frozenset((torch.ops.aten._assert_tensor_metadata.default,))
"""What torch.export adds, of which fake tensors have seen already that it holds."""


class Reader(fx.Interpreter):
    """Runs the exported graph on its fake tensors, to see which of them share memory."""

    def __init__(self, program: ExportedProgram) -> None:
        super().__init__(program.graph_module)
        self._program = program
        self._values: list[Value] = []
        self._numbers: dict[fx.Node, tuple[int, ...]] = {}
        self._memories: dict[int, int] = {}
        self._bytes: list[int] = []
        self._alive: list[Any] = []
        self._ops: list[Op] = []
        self._producers: dict[int, int] = {}

    def read(self) -> Captured:
        """All of it. Raises `Unsupported` for what has no place in a plan."""
        signature = self._program.graph_signature
        nodes = list(self._program.graph.nodes)
        fakes = [node.meta["val"] for node in nodes if node.op == "placeholder"]
        mode = next((v.fake_mode for v in fakes if hasattr(v, "fake_mode")), None)
        with mode or contextlib.nullcontext():
            self.run(*fakes, enable_io_processing=False)
        sources = self._sources()
        (output,) = (node for node in nodes if node.op == "output")
        returned = list(zip(signature.output_specs, output.args[0], strict=True))
        by_key = {source.key: source for source in sources}
        by_name = {spec.arg.name: s for spec, s in zip(self._kept_specs(), sources, strict=True)}
        results, updates = [], []
        for spec, node in returned:
            if spec.kind is OutputKind.USER_OUTPUT:
                results.append(self._ref(node))
            elif spec.kind is OutputKind.BUFFER_MUTATION:
                updates.append((by_key[spec.target], self._ref(node).value))
            elif spec.kind is OutputKind.USER_INPUT_MUTATION:
                updates.append((by_name[spec.target], self._ref(node).value))
            else:
                raise Unsupported(f"its graph returns a {spec.kind.name}")
        return Captured(
            ops=tuple(self._ops),
            values=tuple(self._values),
            memories=tuple(self._bytes),
            sources=tuple(sources),
            constants=self._constants(),
            results=tuple(results),
            returns=self._program.call_spec.out_spec,
            updates=tuple(updates),
        )

    def run_node(self, n: fx.Node) -> Any:
        """Run one on fake tensors, and number what it gives."""
        result = super().run_node(n)
        self._alive.append(result)
        if n.op == "placeholder":
            self._numbers[n] = (self._number(result, ours=False),)
        elif n.op == "call_function":
            self._operator(n, result)
        elif n.op == "get_attr":
            raise Unsupported(f"its graph has a part of its own, `{n.target}`")
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
            raise Unsupported(f"its graph has `{node.name}`, which is no operator of tensors")
        single = isinstance(result, torch.Tensor)
        parts = [result] if single else list(result) if isinstance(result, (list, tuple)) else []
        if not parts:
            raise Unsupported(f"`{node.target}` gives a number that only running it would tell")
        if node.target._schema.is_mutable:
            raise Unsupported(f"`{node.target}` writes into its arguments")
        outputs = tuple(self._number(part, ours=True) for part in parts)
        self._numbers[node] = outputs
        args, kwargs = self._with_refs(node.args), self._with_refs(node.kwargs)
        inputs = tuple(x.value for x in _leaves((args, kwargs)) if isinstance(x, Ref))
        stack = node.meta.get("nn_module_stack") or {}
        path = list(stack.values())[-1][0] if stack else ""
        self._ops.append(Op(node.target, args, kwargs, inputs, outputs, single, path))

    def _number(self, tensor: Any, *, ours: bool) -> int:
        """Number of a value; -1 for what is no tensor."""
        if not isinstance(tensor, torch.Tensor):
            return -1
        if any(not isinstance(n, int) for n in (*tensor.shape, *tensor.stride())):
            raise Unsupported("a shape in it depends on values")
        storage = tensor.untyped_storage()
        memory = self._memories.get(storage._cdata)
        if memory is None:
            memory = self._memories[storage._cdata] = len(self._bytes)
            self._bytes.append(int(storage.nbytes()))
            self._producers[memory] = ours
        self._values.append(
            Value(
                tuple(tensor.shape),
                tuple(tensor.stride()),
                int(tensor.storage_offset()),
                tensor.dtype,
                tensor.device,
                memory,
                bool(self._producers[memory]),
            )
        )
        return len(self._values) - 1

    def _with_refs(self, arguments: Any) -> Any:
        return fx.map_arg(arguments, self._ref)

    def _ref(self, node: Any) -> Any:
        if not isinstance(node, fx.Node):
            return node
        (number,) = self._numbers[node]
        if number < 0:
            raise Unsupported(f"`{node.name}` is no tensor, and is known only when it runs")
        return Ref(number)

    def _kept_specs(self) -> list[Any]:
        return list(self._program.graph_signature.input_specs)

    def _sources(self) -> list[Source]:
        nodes = [node for node in self._program.graph.nodes if node.op == "placeholder"]
        found, leaf = [], 0
        for spec, node in zip(self._kept_specs(), nodes, strict=True):
            kind = _KINDS.get(spec.kind)
            if kind is None:
                raise Unsupported(f"its graph takes a {spec.kind.name}")
            key: int | str = str(spec.target)
            if kind == "input":
                key, leaf = leaf, leaf + 1
            found.append(Source(kind, key, self._numbers[node][0]))
        return found

    def _constants(self) -> dict[str, torch.Tensor]:
        return {
            name: value
            for name, value in self._program.constants.items()
            if isinstance(value, torch.Tensor)
        }


def _leaves(arguments: Any) -> list[Any]:
    return pytree.tree_leaves(arguments, is_leaf=lambda x: isinstance(x, Ref))
