"""The picture of an arena: every box where its buffer is, lines where they belong, strangers' names safe."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from torchtrim.memory.packing import Buffer, Packing, pack
from torchtrim.report import arena

SVG = "{http://www.w3.org/2000/svg}"


def drawn(text: str, kind: str) -> list[ElementTree.Element]:
    root = ElementTree.fromstring(text)
    return [
        node
        for node in root.iter()
        if kind in node.get("class", "").split() and node.tag != f"{SVG}text"
    ]


def box(node: ElementTree.Element) -> tuple[float, ...]:
    return tuple(float(node.get(name, "")) for name in ("x", "y", "width", "height"))


def test_boxes_lie_as_their_buffers_do() -> None:
    buffers = [Buffer("a", 0, 10, 100), Buffer("b", 5, 20, 50), Buffer("nothing", 3, 3, 10)]
    packing = Packing(
        offsets={"a": 0, "b": 150, "nothing": 0}, height=200, lower_bound=150, optimal=False
    )
    text = arena.render(buffers, packing, title="two.csv", capacity=400)
    a, b = (box(node) for node in drawn(text, "box"))
    assert len(drawn(text, "box")) == 2
    assert a[2] == b[2] / 1.5 == 470
    assert a[3] == 2 * b[3] == 125
    assert b[0] == a[0] + a[2] / 2
    assert a[1] + a[3] - (b[1] + b[3]) == 1.5 * a[3]
    (bound,), (top,), (cap,) = (drawn(text, line) for line in ("bound", "top", "cap"))
    heights = [float(line.get("y1", "")) for line in (bound, top, cap)]
    assert heights == [376.5, 314.0, 64.0]
    assert "33.33% above the bound" in text
    assert "43.8% of the area used" in text


def test_many_are_capped_and_it_says_so() -> None:
    buffers = [Buffer(i, i, i + 2, 1 + i % 5) for i in range(5000)]
    text = arena.render(buffers, pack(buffers, seconds=0), title="many")
    assert len(drawn(text, "box")) == arena.MOST_BOXES
    assert "the 2000 largest of 5000 buffers drawn" in text
    assert len(text) < 500_000


def test_names_from_outside_are_harmless() -> None:
    name = "</title><script>alert(1)</script>\x00\u202e&"
    buffers = [Buffer(name, 0, 10, 100)]
    text = arena.render(buffers, pack(buffers), title=name)
    assert "<script" not in text
    assert "\u202e" not in text
    ElementTree.fromstring(text)


def test_nothing_to_draw() -> None:
    text = arena.render([], pack([]), title="empty")
    assert drawn(text, "box") == []


def test_words_stay_inside_the_picture() -> None:
    buffers = [Buffer("x" * 500, 0, 10**18, 2**50)]
    text = arena.render(buffers, pack(buffers), title="y" * 500)
    assert max(map(len, re.findall(r"<text[^>]*>([^<]*)", text))) <= 130
