"""Fixes of repeats."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import pytest
import torch

import draws
from fixes import proving
from torchtrim.fixes.repeats import COUNTED_RANGE, KNOWN_REPEATS, REPEATED_LIST
from torchtrim.source.facts import FixRefused, StaticValue

LIST_HEAD = "import torch\ndef function(lengths, size):\n"


code_of = partial(proving.code_of, LIST_HEAD)


def make_list(rng: random.Random) -> Iterator[proving.Inputs]:
    """Lengths from none to all of a row."""
    many, size = rng.choice((1, 2, 5)), rng.choice((0, 1, 6))
    kind = rng.choice((torch.int64, torch.int32, torch.uint8))
    for _ in range(proving.DRAWS):
        yield {"lengths": proving.integral(rng, (many,), kind, 0, size + 1), "size": size}


BODIES = [
    "return torch.tensor([[False] * n + [True] * (size - n) for n in lengths], dtype=torch.bool)",
    "return ~torch.tensor(\n    [[True] * k + [False] * (size - k) for k in lengths.clone()],\n"
    "    dtype=torch.bool,\n    device=lengths.device,\n)",
]


@pytest.mark.parametrize("body", BODIES)
def test_repeated_list_agrees_where_lengths_are_in_range(body: str) -> None:
    code = code_of(body)
    for number in draws.some(range(125)):
        cases = list(make_list(random.Random(number)))
        rewrite = proving.fixed(REPEATED_LIST, code, cases[0])
        assert "would make the original's rows longer" in rewrite.risk
        assert not rewrite.open_needs
        after = proving.text_of(rewrite)
        for draw in cases:
            assert proving.agree(rewrite, code, after, draw)


LOOP = """mask = torch.Tensor([]).to(dtype=torch.bool)
for i in range(len(lengths)):
    mask = torch.cat(
        [mask, torch.Tensor([False] * lengths[i] + [True] * (size - lengths[i])).to(dtype=torch.bool)]
    )
return mask"""


@pytest.mark.parametrize(
    ("body", "others", "why"),
    [
        (LOOP, {}, "the host reads each row"),
        (BODIES[0], {"lengths": [1, 2]}, "one-dimensional"),
        (BODIES[0].replace("True", "2"), {}, "not True and False"),
    ],
)
def test_repeated_list_is_refused(body: str, others: proving.Inputs, why: str) -> None:
    proving.refuses(
        REPEATED_LIST, code_of(body), {"lengths": torch.tensor([1, 2]), "size": 3, **others}, why
    )


def test_repeated_list_is_not_safe_without_evidence() -> None:
    assert not proving.unseen(REPEATED_LIST, code_of(BODIES[0])).safe


def test_repeated_list_waits_no_more() -> None:
    inputs = {"lengths": torch.tensor([1, 2]), "size": 3}
    body = BODIES[0].replace("torch.bool", "torch.bool, device=lengths.device")
    before, after = proving.syncs_go(REPEATED_LIST, code_of(body), inputs)
    assert before >= 4
    assert after == 0


def make_known(rng: random.Random) -> Iterator[proving.Inputs]:
    rows, dtype = rng.randint(0, 4), rng.choice((torch.float32, torch.bfloat16, torch.int64))
    for _ in range(proving.DRAWS):
        x = proving.integral(rng, (rows, 2), torch.int64).to(dtype)
        yield {"x": x, "n": [rng.choice((0, 1, 3)) for _ in range(rows)]}


CALLS = (
    "torch.repeat_interleave(x, repeats, dim=0)",
    "x.repeat_interleave(\n        repeats,\n        dim=0,\n    )",
    "torch.repeat_interleave(x * 2, repeats, dim=-2)",
    "torch.repeat_interleave(torch.arange(len(x)), repeats)",
)
KNOWN_HEAD = """
import torch
def function(x, n):
    counts = [one + 1 for one in n]
    repeats = torch.tensor(counts, dtype=torch.long).to(x.device)
"""


@pytest.mark.parametrize("call", CALLS)
def test_known_repeats_is_sound(call: str) -> None:
    assert proving.prove(
        KNOWN_REPEATS, f"{KNOWN_HEAD}    return {call}, sum(counts)\n", make_known, structures=64
    ).reaches(256)


@pytest.mark.parametrize(
    "line",
    [
        "counts.append(1)",
        "counts[0] += 1",
        "repeats += 1",
        "counts = [2 for _ in n]",
        "work(counts)",
        "repeats = repeats * 2",
    ],
)
def test_counts_that_may_have_changed_are_refused(line: str) -> None:
    code = f"def work(n):\n    pass\n{KNOWN_HEAD}    {line}\n    return x.repeat_interleave(repeats, dim=0)\n"
    proving.refuses(
        KNOWN_REPEATS, code, {"x": torch.ones(2, 2), "n": [1, 2]}, "write `output_size=n`"
    )


def test_an_argument_is_refused() -> None:
    code = "import torch\ndef function(x, counts):\n    return torch.repeat_interleave(x, counts)\n"
    proving.refuses(
        KNOWN_REPEATS,
        code,
        {"x": torch.ones(2), "counts": torch.tensor([1, 2])},
        "the sum of `counts`",
    )


def test_known_repeats_waits_no_more() -> None:
    code = f"{KNOWN_HEAD}    return {CALLS[0]}\n"
    before, after = proving.syncs_go(KNOWN_REPEATS, code, {"x": torch.ones(2, 2), "n": [1, 2]})
    assert before - after == 2


SELECTED = """mask = x > 0
chosen = x[mask]
rows = torch.arange(len(x)).repeat_interleave(mask.sum(dim=1))
return chosen, rows
"""


def make_selected(rng: random.Random) -> Iterator[proving.Inputs]:
    width = rng.choice((1, 3))
    for _ in range(proving.DRAWS):
        yield {"x": proving.floating(rng, (rng.choice((1, 4)), width), torch.float32)}


def test_counts_of_a_mask_add_up_to_what_it_selects() -> None:
    code = proving.code_of("import torch\ndef function(x):\n", SELECTED)
    assert proving.prove(KNOWN_REPEATS, code, make_selected, structures=40).reaches(160)


@pytest.mark.parametrize(
    "line",
    ["mask[0] = True", "mask = ~mask", "chosen = chosen[1:]", "x.keep(mask)"],
)
def test_a_mask_or_selection_that_may_change_is_refused(line: str) -> None:
    body = SELECTED.replace("rows =", f"{line}\nrows =")
    code = proving.code_of("import torch\ndef function(x):\n", body)
    with pytest.raises(FixRefused, match="may not know the length"):
        proving.unseen(KNOWN_REPEATS, code)


def test_the_size_of_a_tensor_beside_the_repeats_is_for_a_person_to_confirm() -> None:
    body = "m = m.repeat_interleave(count, dim=d)\nreturn x - m"
    code = proving.code_of("import torch\ndef function(x, m, count, d):\n", body)
    rewrite = proving.unseen(KNOWN_REPEATS, code)
    assert [edit.text for edit in rewrite.edits] == [", output_size=x.size(d)"]
    assert "adds up to" in rewrite.advice


RANGES = {
    "repeats of counts": """
    seg = torch.repeat_interleave(counts)
    return torch.arange(counts.sum(), device=x.device) - seg
""",
    "through names": """
    total = counts.sum()
    table = counts.view(-1, 1).t()
    lengths = table.t().reshape(-1)
    seg = torch.arange(lengths.shape[0], device=x.device).repeat_interleave(lengths)
    starts = lengths.cumsum(0) - lengths
    return torch.arange(total, device=x.device) - starts[seg]
""",
    "read": """
    chosen = torch.repeat_interleave(torch.arange(len(counts)), counts, dim=0)
    return torch.arange(int(torch.sum(counts))), x[chosen]
""",
    "rows": """
    rows = torch.repeat_interleave(x, counts, dim=0)
    return torch.arange(counts.sum())[:, None] * rows
""",
}


def make_counts(rng: random.Random) -> Iterator[proving.Inputs]:
    kind = rng.choice((torch.int64, torch.int32))
    for draw in range(proving.DRAWS):
        many = rng.choice((0, 1, 4)) if draw else 3
        x = proving.floating(rng, (many, 2), torch.float32)
        yield {"x": x, "counts": proving.integral(rng, (many,), kind, 0, 3)}


@pytest.mark.parametrize("name", RANGES)
def test_counted_range_is_sound(name: str) -> None:
    code = f"import torch\ndef function(x, counts):{RANGES[name]}"
    one_for_all = name == "rows"
    proof = proving.prove(COUNTED_RANGE, code, make_counts, structures=40, suggested=one_for_all)
    assert proof.reaches(100)
    tensor = StaticValue(kind="tensor")
    assert bool(proving.unseen(COUNTED_RANGE, code, R=tensor).risk) == one_for_all


def test_counted_range_waits_less() -> None:
    code = f"import torch\ndef function(x, counts):{RANGES['through names']}"
    inputs = {"x": torch.ones(2), "counts": torch.tensor([2, 0, 1])}
    before, after = proving.syncs_go(COUNTED_RANGE, code, inputs)
    assert before - after == 1
    text = proving.text_of(proving.unseen(COUNTED_RANGE, code, R=StaticValue(kind="tensor")))
    assert "torch.arange(seg.shape[0], device=x.device)" in text
    assert "total" not in text


@pytest.mark.parametrize(
    "line",
    ["counts += 1", "counts[0] = 2", "counts = counts * 2", "seg = seg[1:]", "work(counts)"],
)
def test_a_range_over_counts_that_may_have_changed_is_refused(line: str) -> None:
    body = f"seg = torch.repeat_interleave(counts)\n{line}\nreturn seg, torch.arange(counts.sum())"
    code = proving.code_of("import torch\ndef function(work, counts):\n", body)
    with pytest.raises(FixRefused, match="no `repeat_interleave`"):
        proving.unseen(COUNTED_RANGE, code, R=StaticValue(kind="tensor"))
