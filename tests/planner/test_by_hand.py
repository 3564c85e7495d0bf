"""What a person would checkpoint by hand is found by its numbers."""

from __future__ import annotations

from torchtrim.planner.by_hand import by_hand
from torchtrim.step.step import Span
from torchtrim.techniques.base import Option


def options(*where: str, tasks: int = 4) -> list[Option]:
    return [Option("recompute", one, (Span(0, tasks),)) for one in where]


def test_the_largest_family_of_blocks_is_taken_in_order_of_its_numbers() -> None:
    small = options("Net.stem.0", "Net.stem.1", tasks=2)
    blocks = options("Net.blocks.10", "Net.blocks.2", "Net.blocks.1", "Net.blocks[1:3]", "Net.head")
    found = {
        name: [one.where for one in chosen] for name, chosen in by_hand(small + blocks).items()
    }
    assert found == {
        "each block checkpointed": ["Net.blocks.1", "Net.blocks.2", "Net.blocks.10"],
        "every second block checkpointed": ["Net.blocks.1", "Net.blocks.10"],
    }


def test_a_model_without_blocks_in_a_row_has_none() -> None:
    assert by_hand(options("Net.a", "Net.b.0")) == {}
