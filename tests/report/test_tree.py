from profiles import Step
from torchtrim.report.tree import count, tree


def test_bytes_of_a_module_are_with_its_parents_and_add_up() -> None:
    step = Step()
    weight = step.alive("parameter", 1000, name="net.block.0.weight")
    batch = step.alive("input", 500)
    with step.module("net", "Net"), step.module("net.block", "Block"):
        with step.module("net.block.0", "Linear"):
            first = step.op("aten::mm", weight, batch, makes=3000)
        with step.module("net.block.1", "Linear"):
            step.op("aten::mm", first, makes=4000)
    found = tree(step.profile())
    assert [(node.name, node.bytes) for node in found] == [("net", 8000), ("outside modules", 500)]
    (block,) = found[0].children
    assert [(node.name, node.bytes) for node in block.children] == [("0", 4000), ("1", 4000)]
    assert sum(node.share for node in found) == 100


def test_many_small_modules_are_summed() -> None:
    step = Step()
    for number in range(500):
        step.alive("parameter", 10, name=f"net.{number}.weight")
        step.declare(f"net.{number}")
    step.declare("net")
    step.op("aten::mm", makes=8)
    found = tree(step.profile())
    assert count(found) < 30
    assert found[0].children[-1].name == "500 others"
    assert found[0].bytes == 5000
