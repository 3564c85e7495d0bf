"""Where a network is cut in two: parts of the batch before, all of it after."""

from torchtrim.memory.network import Graph, Node, best_cut


def network(*sizes: int) -> Graph:
    nodes = tuple(
        Node("op", (i - 1,) if i else (), (i - 1,) if i else (), (i,)) for i in range(len(sizes))
    )
    return Graph(nodes, sizes, frozenset((len(sizes) - 1,)))


WHOLE, PART = network(800, 800, 80, 8), network(100, 100, 10, 1)


def test_the_heavy_layers_run_in_parts() -> None:
    cut = best_cut(WHOLE, PART, range(4), 4)
    assert cut.position == 4
    assert cut.carried == 8
    assert cut.peak == 208


def test_it_stops_where_samples_see_each_other() -> None:
    cut = best_cut(WHOLE, PART, range(4), 3)
    assert (cut.position, cut.carried, cut.peak) == (3, 80, 280)


def test_where_nothing_keeps_samples_apart_nothing_is_cut() -> None:
    cut = best_cut(WHOLE, PART, range(4), 0)
    assert (cut.position, cut.peak) == (0, 1600)


def test_a_skip_over_the_cut_is_carried() -> None:
    nodes = list(WHOLE.nodes)
    nodes[3] = nodes[3]._replace(needs=(0, 2), reads=(0, 2))
    whole = WHOLE._replace(nodes=tuple(nodes))
    part = PART._replace(nodes=tuple(nodes))
    assert best_cut(whole, part, range(4), 3).peak >= 880
