"""A program as a record that can be drawn."""

from __future__ import annotations

from torchtrim.executor.network.parts import PartsProgram
from torchtrim.executor.network.program import Program
from torchtrim.memory.network.graph import home_lives, lives_of
from torchtrim.records.network_graph import Memory, NetworkGraph, Operator, Section


def graph_record(model: str, program: Program | PartsProgram) -> NetworkGraph:
    """What runs, in its order, and who shares memory with whom."""
    if isinstance(program, Program):
        return NetworkGraph(model=model, sections=(_section(program, "the whole batch"),))
    first, rest = program.both
    batch, most = sum(program.parts), max(program.parts)
    sections = [_section(first, f"{len(program.parts)} parts of {most} of {batch} samples")]
    if rest.captured.ops:
        sections.append(_section(rest, "the whole batch"))
    return NetworkGraph(model=model, sections=tuple(sections))


def _section(program: Program, title: str) -> Section:
    layout, graph = program.layout, program.graph
    spans = home_lives(graph, lives_of(graph, layout.order), layout.homes)
    numbers = {home: number for number, home in enumerate(spans)}
    places = {number: position for position, number in enumerate(layout.order)}
    memories = tuple(
        Memory(bytes=size, first=first, last=last, offset=layout.offsets.get(home, -1))
        for home, (first, last, size) in spans.items()
    )
    operators = []
    for number in layout.order:
        op, node = program.captured.ops[number], graph.nodes[number]
        shown = next((v for v in op.outputs if v >= 0), None)
        value = program.captured.values[shown] if shown is not None else None
        operators.append(
            Operator(
                name=op.target.name().removeprefix("aten::"),
                module=op.module,
                shape=value.shape if value is not None else (),
                dtype=str(value.dtype).removeprefix("torch.") if value is not None else "",
                reads=tuple(dict.fromkeys(numbers[layout.homes[b]] for b in node.reads)),
                writes=tuple(dict.fromkeys(numbers[layout.homes[b]] for b in node.makes)),
                needs=tuple(sorted({places[n] for n in node.needs})),
                takes_over=any(layout.homes[b] != b for b in node.makes),
            )
        )
    return Section(title=title, operators=tuple(operators), memories=memories, height=layout.height)
