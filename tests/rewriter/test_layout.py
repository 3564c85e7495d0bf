"""Long statements are wrapped as formatters do, and keep their meaning."""

from __future__ import annotations

import ast
import textwrap

import pytest

from rewriter.test_edits import TEXT, rewrite
from torchtrim.rewriter.edits import patch
from torchtrim.rewriter.fix import TextEdit
from torchtrim.rewriter.layout import width_of, wrapped
from torchtrim.source.source import SourceFile

LONG = [
    "chosen = ((labels.flatten().sort().values.diff() != 0).sum() + (labels.numel() > 0) - 1) < LEAST",
    "return torch.where(chosen, 0.0 * scores.sum(), F.cross_entropy(scores.flatten(0, -2), labels))",
    "loader = DataLoader(dataset, batch_size=args.batch_size, num_workers=args.num_workers, pin_memory=True)",
    "a, b = torch.stack((penalty.reshape(()), (real_predict - fake_predict).reshape(()), x)).tolist()",
    "pairs = [(first, second, third) for first, second in zip(some_names, other_names) for third in thirds]",
    "call(lambda first, second: first + second, 'a, (b', {'key': [1, 2, 3], 'other': (4,)}, *rest, **words)",
    "one = (a_name_that_is_long_enough_to_need_wrapping_at_sixty_columns_or_even_fewer_of_them,)",
    "x[mask_of_some_length, other_index] = -first_value * (second_value - third_value) + fourth_value",
]


@pytest.mark.parametrize("statement", LONG)
@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_wrapped_statement_means_the_same(statement: str, width: int) -> None:
    lines = wrapped(f"    {statement}", width)
    assert ast.dump(ast.parse(textwrap.dedent("\n".join(lines)))) == ast.dump(ast.parse(statement))
    assert all(line.startswith("    ") for line in lines)


@pytest.mark.parametrize("statement", LONG[:4])
def test_calls_and_sums_fit_the_width(statement: str) -> None:
    lines = wrapped(statement, 60)
    assert len(lines) > 2
    assert max(map(len, lines)) <= 60


def test_one_part_stands_in_a_line() -> None:
    line = "loader = DataLoader(dataset, batch_size=args.batch_size, shuffle=True)"
    assert wrapped(line, 40) == [
        "loader = DataLoader(",
        "    dataset,",
        "    batch_size=args.batch_size,",
        "    shuffle=True,",
        ")",
    ]


@pytest.mark.parametrize(
    "line",
    [
        "short = f(x)",
        "x = f(aaaaaaaaaaaaaaaaaaaaaa, b)  # why",
        "elif f(aaaaaaaaaaaaaaaaaa, b):",
        "x = call(aaaaaaaaaaaaaaaaaaa,",
        "x = '''aaaaaaaaaaaaaaaaaaaa",
    ],
)
def test_other_lines_stay(line: str) -> None:
    assert wrapped(line, 20) == [line]


def test_a_line_of_arguments_becomes_one_for_each() -> None:
    line = "        [f(x, y) for x in found], dtype=torch.long, device=device"
    assert wrapped(line, 40) == [
        "        [f(x, y) for x in found],",
        "        dtype=torch.long,",
        "        device=device,",
    ]


def test_the_head_of_a_block_is_wrapped() -> None:
    line = "    if (first_value + second_value - third_value) < LIMIT:"
    assert wrapped(line, 40) == [
        "    if (",
        "        first_value",
        "        + second_value",
        "        - third_value",
        "    ) < LIMIT:",
    ]


def test_conditions_and_sums_are_put_in_brackets() -> None:
    assert wrapped("if (x.dim(), y.dim()) == (2, 1) and x.dtype == torch.float32:", 40) == [
        "if (",
        "    (x.dim(), y.dim()) == (2, 1)",
        "    and x.dtype == torch.float32",
        "):",
    ]
    assert wrapped("    total = first.sum() + (second != third).any() - LEAST", 40) == [
        "    total = (",
        "        first.sum()",
        "        + (second != third).any()",
        "        - LEAST",
        "    )",
    ]


def test_the_width_is_that_of_the_longest_line_within_limits() -> None:
    assert width_of("x = 1\n") == 100
    assert width_of(f"x = '{'a' * 100}'\n# {'b' * 115}\n") == 106
    assert width_of(f"x = '{'a' * 300}'\n") == 120


def test_regions_follow_wrapped_lines() -> None:
    source = SourceFile("case.py", TEXT)
    long = f"b = call({', '.join(['argument'] * 14)})"
    one, other = rewrite(source, TextEdit(6, 11, long)), rewrite(source, TextEdit(18, 23, "d = 5"))
    found = patch(source, [one, other])
    assert found.text.splitlines()[1:17] == ["b = call(", *["    argument,"] * 14, ")"]
    assert found.regions == (((2, 17),), ((19, 19),))
