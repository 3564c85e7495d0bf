"""Run a network by a memory plan: operators in the plan's order, results at the planned places."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchtrim.errors import Unsupported
from torchtrim.executor.network.captured import Captured, NetworkValue, Op, Ref, Source
from torchtrim.executor.network.out_variants import OutVariant, way_of
from torchtrim.memory.network import Graph, Layout, Node, bytes_alive, homes_of, lay_out

_SHARE_OF_A_SLICE = 256  # Arbitrary: a slice takes little memory next to the peak.
_LEAST_SLICE = 64 * 2**10  # Arbitrary: smaller slices cost more time than they save memory.
Env = list[Any]
Step = Callable[[Env, Tensor | None], None]


class Switches(NamedTuple):
    """The techniques that are on."""

    release: bool = True
    in_place: bool = True
    arena: bool = True


class NetworkProgram:
    """A planned network. Calls share no state, so any number of threads may run it.

    Each call allocates its own arena and frees it at the end. Results are outside of the arena.
    """

    def __init__(self, captured: Captured, switches: Switches, *, whole: float = 1.0) -> None:
        self.captured = captured
        self.graph, self.buffers, ways = graph_of(captured, whole)
        self.layout = lay_out(self.graph, in_place=switches.in_place, arena=switches.arena)
        ways = _with_room(captured, self.graph, self.layout, ways, whole)
        dead = _dead_values(captured, self.layout.order)
        self._steps = [
            (_step(self, number, ways[number]), tuple(values) if switches.release else ())
            for number, values in zip(self.layout.order, dead, strict=True)
        ]
        some = next((value for value in captured.values if value.ours), None)
        self._device = some.device if some is not None else torch.device("cpu")

    @property
    def peak_bytes(self) -> int:
        """Peak bytes of a call."""
        return self.layout.peak

    @property
    def output_bytes(self) -> int:
        """Peak bytes of results and arena during a call."""
        return self.layout.outputs

    @property
    def made_bytes(self) -> int:
        """Bytes of the arena and of all separate allocations."""
        apart = set(self.layout.homes) - self.layout.offsets.keys()
        return self.layout.height + sum(self.graph.sizes[home] for home in apart)

    def run(self, inputs: Sequence[Any], tensors: Mapping[str, Tensor]) -> list[Any]:
        """Run on the inputs' leaves and return flat results. `tensors`: parameters and buffers by name."""
        env: Env = [None] * len(self.captured.values)
        for source in self.captured.sources:
            env[source.value] = _value_of(source, inputs, tensors)
        height = self.layout.height
        arena = torch.empty(height, dtype=torch.uint8, device=self._device) if height else None
        for step, dead in self._steps:
            step(env, arena)
            for value in dead:
                env[value] = None
        for source, updated in self.captured.updates:
            _value_of(source, inputs, tensors).copy_(env[updated])
        return [env[r.value] if isinstance(r, Ref) else r for r in self.captured.results]


def _value_of(source: Source, inputs: Sequence[Any], tensors: Mapping[str, Tensor]) -> Any:
    return inputs[source.key] if isinstance(source.key, int) else tensors[source.key]


def graph_of(
    captured: Captured, whole: float = 1.0
) -> tuple[Graph, dict[int, int], list[OutVariant | None]]:
    """Return the planner's graph, the number of each memory in it, and the operators' out-variants.

    `whole`: the size of the whole batch relative to this part.
    """
    values = captured.values
    ours = sorted({v.memory for v in values if v.ours})
    buffers = {memory: number for number, memory in enumerate(ours)}
    sizes = tuple(captured.memories[memory] for memory in buffers)
    last = [r.value for r in captured.results if isinstance(r, Ref)]
    last += [value for _, value in captured.updates]
    results = frozenset(buffers[values[v].memory] for v in last if values[v].ours)
    bare = Graph(_nodes(captured, buffers, [None] * len(captured.ops)), sizes, results)
    order = range(len(bare.nodes))
    bound = max(bytes_alive(bare, order, homes_of(bare, order)), default=0)
    most = max(bound // _SHARE_OF_A_SLICE, _LEAST_SLICE)
    ways = [way_of(op, values, most, whole) for op in captured.ops]
    return bare._replace(nodes=_nodes(captured, buffers, ways)), buffers, ways


def _with_room(
    captured: Captured,
    graph: Graph,
    layout: Layout,
    ways: Sequence[OutVariant | None],
    whole: float,
) -> list[OutVariant | None]:
    """Choose out-variants that use all the memory below the plan's peak.

    Slices are as large as possible, since each has overhead. An operator that then needs no slices and has no
    place allocates its own result.
    """
    found: list[OutVariant | None] = []
    for op, way, node, room in zip(captured.ops, ways, graph.nodes, layout.room, strict=True):
        if way is None or room <= way.workspace or not node.makes:
            found.append(way)
            continue
        home = layout.homes[node.makes[0]]
        apart = home == node.makes[0] and home not in layout.offsets
        if apart and whole == 1 and way.own <= room:
            found.append(way._replace(always=False))
            continue
        wide = way_of(op, captured.values, room, whole)
        found.append(wide if wide is not None and wide.workspace <= room else way)
    return found


def _nodes(
    captured: Captured, buffers: dict[int, int], ways: Sequence[OutVariant | None]
) -> tuple[Node, ...]:
    values, nodes, random = captured.values, [], -1
    made_by: dict[int, int] = {}
    born: set[int] = set()
    for number, (op, way) in enumerate(zip(captured.ops, ways, strict=True)):
        needs = [made_by[value] for value in op.inputs if value in made_by]
        if torch.Tag.nondeterministic_seeded in op.target.tags:
            needs += [random] * (random >= 0)
            random = number
        made_by.update({value: number for value in op.outputs if value >= 0})
        seen = dict.fromkeys(values[v].memory for v in op.outputs if v >= 0 and values[v].ours)
        makes = [memory for memory in seen if memory not in born]
        born.update(makes)
        workspace = way.workspace if way is not None else 0
        nodes.append(
            Node(
                name=op.target.name(),
                needs=tuple(needs),
                reads=tuple(buffers[values[v].memory] for v in op.inputs if values[v].ours),
                makes=tuple(buffers[memory] for memory in makes),
                over=_overwritable(op, values, buffers) if way is not None and way.over else (),
                writes=way is not None,
                workspace=workspace,
                own=0 if way is None else workspace if way.always else way.own,
            )
        )
    return tuple(nodes)


def _overwritable(
    op: Op, values: tuple[NetworkValue, ...], buffers: dict[int, int]
) -> tuple[int, ...]:
    out = values[op.outputs[0]]
    inputs = dict.fromkeys(values[v] for v in op.inputs)
    other = {one.memory for one in inputs if one._replace(memory=out.memory, ours=out.ours) != out}
    memories = dict.fromkeys(one.memory for one in inputs if one.ours)
    return tuple(buffers[memory] for memory in memories if memory not in other)


def _dead_values(captured: Captured, order: Sequence[int]) -> list[list[int]]:
    last: dict[int, int] = {}
    for position, number in enumerate(order):
        op = captured.ops[number]
        last.update(dict.fromkeys((*op.inputs, *(v for v in op.outputs if v >= 0)), position))
    kept = {r.value for r in captured.results if isinstance(r, Ref)}
    kept |= {value for _, value in captured.updates}
    dead: list[list[int]] = [[] for _ in order]
    for value, position in last.items():
        if value not in kept:
            dead[position].append(value)
    return dead


def _step(program: NetworkProgram, number: int, way: OutVariant | None) -> Step:
    op = program.captured.ops[number]
    args, kwargs = _filler(op.args), _filler(op.kwargs)
    place = _place(program, op, program.graph.nodes[number], way)
    if way is None or place is None:
        return _allocating(op, args, kwargs)
    write, out = way.write, op.outputs[0]

    def step(env: Env, arena: Tensor | None) -> None:
        there = place(env, arena)
        write(args(env), kwargs(env), there)
        env[out] = there

    return step


def _place(
    program: NetworkProgram, op: Op, node: Node, way: OutVariant | None
) -> Callable[[Env, Tensor | None], Tensor] | None:
    """Return a function that returns the result's place, or None if the operator allocates it."""
    if way is None or not node.makes:
        return None
    layout, values, buffers = program.layout, program.captured.values, program.buffers
    value, home = values[op.outputs[0]], layout.homes[node.makes[0]]
    if home != node.makes[0]:
        own = (v for v in op.inputs if values[v].ours)
        taken = next(v for v in own if layout.homes[buffers[values[v].memory]] == home)
        return lambda env, _: env[taken]
    if home in layout.offsets:
        return _view_into(value, layout.offsets[home] // value.dtype.itemsize)
    return (lambda _env, _arena: fresh(value)) if way.always else None


def _view_into(value: NetworkValue, at: int) -> Callable[[Env, Tensor | None], Tensor]:
    def place(_env: Env, arena: Tensor | None) -> Tensor:
        assert arena is not None
        empty = torch.empty(0, dtype=value.dtype, device=value.device)
        return empty.set_(arena.untyped_storage(), at, value.shape, value.strides)

    return place


def fresh(value: NetworkValue) -> Tensor:
    """Allocate a value."""
    return torch.empty_strided(value.shape, value.strides, dtype=value.dtype, device=value.device)


def _allocating(op: Op, args: Callable[[Env], Any], kwargs: Callable[[Env], Any]) -> Step:
    target, outputs = op.target, op.outputs
    if op.single:
        (out,) = outputs

        def step(env: Env, _arena: Tensor | None) -> None:
            env[out] = target(*args(env), **kwargs(env))

        return step

    def several(env: Env, _arena: Tensor | None) -> None:
        for out, result in zip(outputs, target(*args(env), **kwargs(env)), strict=True):
            if out >= 0:
                env[out] = result

    return several


def _filler(arguments: Any) -> Callable[[Env], Any]:
    leaves, spec = pytree.tree_flatten(arguments, is_leaf=lambda x: isinstance(x, Ref))
    if not any(isinstance(leaf, Ref) for leaf in leaves):
        return lambda _: arguments
    if isinstance(arguments, tuple) and all(
        isinstance(x, Ref) or not isinstance(x, (list, tuple, dict)) for x in arguments
    ):
        return lambda env: tuple(env[x.value] if isinstance(x, Ref) else x for x in leaves)
    return lambda env: pytree.tree_unflatten(
        [env[x.value] if isinstance(x, Ref) else x for x in leaves], spec
    )


def tensors_of(module: nn.Module, captured: Captured) -> dict[str, Tensor]:
    """Return the parameters, buffers and constants that the network reads.

    Raises `Unsupported` if one has changed since the capture.
    """
    found: dict[str, Tensor] = {}
    for source in captured.sources:
        if source.kind == "input":
            continue
        name = str(source.key)
        tensor = captured.constants.get(name) if source.kind == "constant" else _named(module, name)
        value = captured.values[source.value]
        known = value.shape, value.dtype, value.device
        if tensor is None or (tuple(tensor.shape), tensor.dtype, tensor.device) != known:
            raise Unsupported(f"`{name}` has changed since the network was captured")
        found[name] = tensor
    return found


def _named(module: nn.Module, name: str) -> Tensor | None:
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    parameter = owner._parameters.get(last)
    return parameter if parameter is not None else owner._buffers.get(last)
