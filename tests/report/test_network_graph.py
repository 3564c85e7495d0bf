"""The picture of a network: lanes that do not overlap, names from outside made harmless, a limit told."""

from xml.etree import ElementTree

from torchtrim.records.network_graph import GraphMemory, GraphOperator, NetworkGraph, Section
from torchtrim.report.network_graph import MOST_LINES, NetworkPicture, colours_of, lanes_of


def operator(name: str = "conv2d", module: str = "a.b") -> GraphOperator:
    return GraphOperator(
        name=name, module=module, shape=(2, 3), dtype="float32", reads=(), writes=(0,), needs=()
    )


def graph(count: int, *, name: str = "conv2d", model: str = "Net") -> NetworkGraph:
    memories = (GraphMemory(bytes=24, first=0, last=count, offset=0),)
    section = Section(
        title="the whole batch",
        operators=tuple(operator(name) for _ in range(count)),
        memories=memories,
        height=24,
    )
    return NetworkGraph(model=model, sections=(section,))


def test_memories_that_live_at_once_have_lanes_of_their_own() -> None:
    spans = [(0, 3), (1, 2), (2, 5), (3, 4), (4, 9)]
    memories = [GraphMemory(bytes=1, first=a, last=b) for a, b in spans]
    lanes = lanes_of(memories)
    for i, one in enumerate(memories):
        for j, other in enumerate(memories[:i]):
            if one.first < other.last and other.first < one.last:
                assert lanes[i] != lanes[j]
    assert max(lanes) == 1


def test_one_place_has_one_colour() -> None:
    places = (0, 64, 0, -1)
    memories = tuple(
        GraphMemory(bytes=8, first=n, last=n + 1, offset=p) for n, p in enumerate(places)
    )
    colours = colours_of(Section(title="", operators=(), memories=memories, height=72))
    assert colours[0] == colours[2]
    assert len(set(colours)) == 3


def test_hostile_names_do_no_harm() -> None:
    picture = NetworkPicture(graph(2, name='<script>"\\n]', model="</svg><b>\x1b[31m"))
    ElementTree.fromstring(picture.svg())
    assert "<script>" not in picture.svg()
    assert '"\\n]' not in picture.dot().replace("\\\\", "")


def test_what_is_left_out_is_told() -> None:
    text = NetworkPicture(graph(MOST_LINES + 7)).svg()
    assert "the last 7 operators are omitted" in text
    assert len(text) < 2**20
