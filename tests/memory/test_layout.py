"""Plans of places: nothing that lives together overlaps, nothing living is overwritten, and how high."""

import itertools
import random

import pytest

from torchtrim.memory.network import (
    Graph,
    Layout,
    Node,
    best_order,
    bytes_alive,
    homes_of,
    lay_out,
    lives_of,
    peak_of,
)


def chain(*sizes: int, over: bool = True, writes: bool = True) -> Graph:
    """Each operator reads what the one before made; the last result outlives the call."""
    nodes = tuple(
        Node(
            name=f"op{number}",
            needs=(number - 1,) if number else (),
            reads=(number - 1,) if number else (),
            makes=(number,),
            over=(number - 1,) if number and over else (),
            writes=writes,
        )
        for number in range(len(sizes))
    )
    return Graph(nodes, sizes, frozenset((len(sizes) - 1,)))


def random_graph(seed: int) -> Graph:
    """Operators that read some of the last results; sizes of a few kinds, so that they can be taken over."""
    pick = random.Random(seed)
    nodes, sizes = [], []
    for number in range(pick.randint(2, 30)):
        reads = (
            tuple({pick.randrange(max(0, number - 6), number) for _ in range(pick.randint(0, 3))})
            if number
            else ()
        )
        sizes.append(pick.choice((64, 128, 128, 256, 1000)))
        nodes.append(
            Node(
                name="op",
                needs=reads,
                reads=reads,
                makes=(number,),
                over=reads if pick.random() < 0.5 else (),
                writes=pick.random() < 0.8,
                workspace=pick.choice((0, 0, 50)),
                own=pick.choice((0, 0, 70)),
            )
        )
    results = frozenset(pick.sample(range(len(sizes)), pick.randint(1, 2)))
    return Graph(tuple(nodes), tuple(sizes), results)


def replayed(graph: Graph, layout: Layout) -> int:
    """Run the plan on numbered memory, checking each read; the most bytes of results at once."""
    lives = lives_of(graph, layout.order)
    holds: dict[tuple[str, int], int] = {}
    most = 0
    done: set[int] = set()
    for position, number in enumerate(layout.order):
        node = graph.nodes[number]
        assert done >= set(node.needs)
        done.add(number)
        for buffer in node.reads:
            for cell in cells(graph, layout, buffer):
                assert holds[cell] == buffer, "an operator reads what another has overwritten"
        for buffer in node.makes:
            holds.update(dict.fromkeys(cells(graph, layout, buffer), buffer))
        apart = {
            layout.homes[b]
            for b, (birth, death) in enumerate(lives)
            if 0 <= birth <= position < death
        } - layout.offsets.keys()
        most = max(most, layout.height + sum(graph.sizes[home] for home in apart))
    for buffer in graph.results:
        assert layout.homes[buffer] not in layout.offsets
        assert all(holds[cell] == buffer for cell in cells(graph, layout, buffer))
    return most


def cells(graph: Graph, layout: Layout, buffer: int) -> list[tuple[str, int]]:
    home = layout.homes[buffer]
    if home in layout.offsets:
        first = layout.offsets[home]
        return [("arena", byte) for byte in range(first, first + graph.sizes[buffer])]
    return [(f"own {home}", 0)]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("arena", [False, True])
def test_no_one_reads_what_was_overwritten(in_place: bool, arena: bool) -> None:
    for seed in range(60):
        graph = random_graph(seed)
        layout = lay_out(graph, in_place=in_place, arena=arena)
        assert sorted(layout.order) == list(range(len(graph.nodes)))
        assert replayed(graph, layout) == layout.outputs
        assert layout.bound <= layout.outputs <= layout.peak


def test_a_chain_in_place_needs_one_buffer() -> None:
    layout = lay_out(chain(128, 128, 128, 128))
    assert layout.outputs == layout.bound == 128
    assert lay_out(chain(128, 128, 128, 128), in_place=False).outputs == 256


def test_another_size_is_not_taken_over() -> None:
    assert homes_of(chain(128, 64, 64), (0, 1, 2)) == (0, 1, 1)


def test_what_is_still_read_is_not_taken_over() -> None:
    nodes = (
        Node("a", makes=(0,)),
        Node("b", needs=(0,), reads=(0,), makes=(1,), over=(0,)),
        Node("c", needs=(0, 1), reads=(0, 1), makes=(2,)),
    )
    graph = Graph(nodes, (64, 64, 64), frozenset((2,)))
    assert homes_of(graph, (0, 1, 2)) == (0, 1, 2)


def test_a_result_is_not_overwritten() -> None:
    graph = chain(64, 64)._replace(results=frozenset((0, 1)))
    assert homes_of(graph, (0, 1)) == (0, 1)


def test_there_is_no_arena_where_it_would_need_more() -> None:
    """Nothing can be written to a place, so an arena would only come on top."""
    assert lay_out(chain(100, 200, 100, writes=False)).offsets == {}


def test_workspace_counts_at_its_operator() -> None:
    graph = chain(100, 200, 100, over=False)
    heavy = graph.nodes[0]._replace(workspace=1000, own=1000)
    layout = lay_out(graph._replace(nodes=(heavy, *graph.nodes[1:])), arena=False)
    assert (layout.outputs, layout.peak) == (300, 1100)


def test_an_empty_network() -> None:
    layout = lay_out(Graph((), ()))
    assert (layout.order, layout.peak, layout.height) == ((), 0, 0)


def tree() -> Graph:
    """Two branches that swell, and shrink before they meet: begun together they would both be large."""
    nodes, sizes = [], []
    for branch in range(2):
        for size in (1000, 10):
            number = len(nodes)
            before = (number - 1,) if size == 10 else ()
            nodes.append(Node(f"b{branch}", before, before, (number,)))
            sizes.append(size)
    swapped = [0, 2, 1, 3]
    place = {old: new for new, old in enumerate(swapped)}
    moved = [
        nodes[old]._replace(
            needs=tuple(place[n] for n in nodes[old].needs),
            reads=tuple(place[n] for n in nodes[old].reads),
            makes=(place[old],),
        )
        for old in swapped
    ]
    ends = tuple(place[n] for n in (1, 3))
    moved.append(Node("join", ends, ends, (4,)))
    return Graph(tuple(moved), (*(sizes[old] for old in swapped), 10), frozenset((4,)))


def test_branches_run_one_after_the_other() -> None:
    graph = tree()
    assert peak_of(graph, range(5)) == 2010
    assert peak_of(graph, best_order(graph)) == 1020


def test_orders_are_valid_never_worse_and_often_the_best() -> None:
    """Against every order, of small graphs."""
    best = 0
    for seed in range(60):
        graph = random_graph(seed)
        count = min(len(graph.nodes), 6)
        graph = Graph(
            graph.nodes[:count],
            graph.sizes[:count],
            frozenset(r for r in graph.results if r < count),
        )
        orders = [
            order
            for order in itertools.permutations(range(count))
            if all(
                order.index(n) < order.index(i) for i in range(count) for n in graph.nodes[i].needs
            )
        ]
        least = min(peak_of(graph, order) for order in orders)
        found = peak_of(graph, best_order(graph))
        assert least <= found <= peak_of(graph, range(count))
        best += found == least
    assert best >= 54


def test_bytes_alive_of_a_chain() -> None:
    graph = chain(1, 10, 100, over=False)
    assert bytes_alive(graph, range(3), range(3)) == [1, 11, 110]
