"""Scripts drawn from people's habits run under torchtrim as they run plain."""

from __future__ import annotations

import ast
import random
import subprocess
import sys
from pathlib import Path

import pytest
from bench.habits.judging import shows_ours
from bench.habits.script import PLAIN, Habits, drawn, simpler, text_of

import draws

ROOT = Path(__file__).parents[1]
CLEAN = range(61_001, 61_037), range(61_038, 61_068)
"""Seeds without a fault that is known. `bench.habits` draws others, of which some may still show one."""


def seeds(count: int) -> range:
    first = draws.seed() % 2**31
    return range(first, first + count)


def test_every_script_compiles_and_is_the_same_for_its_seed() -> None:
    for seed in seeds(draws.count(1_000)):
        text = text_of(drawn(seed))
        ast.parse(text)
        assert text == text_of(drawn(seed))


def test_checkpointed_blocks_are_all_that_a_person_changes() -> None:
    habits = Habits()
    plain, each, second = (text_of(habits, every).splitlines() for every in (0, 1, 2))
    assert sum(a != b for a, b in zip(plain, each, strict=True)) == 1
    assert sum(a != b for a, b in zip(plain, second, strict=True)) == 1


@pytest.mark.slow
def test_what_plain_runs_show() -> None:
    """A checkpoint that appends again keeps something else; an error may have the code of a habit's end.

    In a process of its own, as below."""
    code = """
import sys, tempfile
from pathlib import Path
from bench.habits.judging import Case
from bench.habits.judging import shows_ours
from bench.habits.script import PLAIN, Habits

root = Path(tempfile.mkdtemp())
ends = "falls off its end", "os._exit(0)"
names = "a tensor", "a mutable default"
cases = [{"inner_takes": name, "end": end} for name in names for end in ends]
cases += [{"block": name, "update": "two backwards", "launch": "a guarded main"}
          for name in ("mlp of rows", "lists of its own")]
for number, case in enumerate(cases):
    habits = Habits(one={**PLAIN, **case})
    plain, each = (Case(habits, root / f"{number} {n}", n) for n in (0, 1))
    print(plain.plain().output == each.plain().output, plain.kept() == each.kept())
for block in "mlp of rows", "complex":  # Adafactor supports no complex parameters
    one = {**PLAIN, "block": block, "optimizer": "adafactor", "end": "raises"}
    case = Case(Habits(one=one), root / block)
    print(case.is_sound(case.plain()))
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    words = ended.stdout.split()
    same, other = ["True", "True"], ["True", "False"]
    sound = ["True", "False"]
    assert words == [*same * 2, *other * 2, *same, *other, *sound], (
        f"{ended.stdout}{ended.stderr[-2000:]}"
    )


def test_a_script_that_raises_shows_no_fault_of_ours() -> None:
    ours = '  File "/x/torchtrim/runner/worker.py", line 305, in run_to_crash\n'
    script = '  File "/tmp/1/train.py", line 76, in main\n'
    begin = "Traceback (most recent call last):\n"
    assert not shows_ours(f"{begin}{ours}{script}RuntimeError: in the loop\n")
    assert shows_ours(f"{begin}{ours}RuntimeError\n")
    assert shows_ours(f"{begin}{script}{ours}RuntimeError\n")
    assert shows_ours(f"{begin}{script}ValueError\n\n{begin}{ours}{script}{ours}KeyError\n")


def test_simpler_scripts_have_one_habit_less() -> None:
    habits = drawn(draws.seed())
    special = sum(name != PLAIN[kind] for kind, name in habits.one.items())
    fewer = list(simpler(habits))
    assert len(fewer) >= special
    assert habits not in fewer


@pytest.mark.parametrize(
    ("scripts", "of"),
    [
        pytest.param(1, CLEAN[0], id="quick"),
        pytest.param(20, CLEAN[0], marks=pytest.mark.slow, id="first"),
        pytest.param(20, CLEAN[1], marks=pytest.mark.slow, id="second"),
    ],
)
def test_scripts_behave_as_they_do_without_torchtrim(scripts: int, of: range) -> None:
    """Forks of a process of its own run them: this one has run operators, whose threads no fork has."""
    first = random.Random(draws.seed()).choice(of[: len(of) - scripts + 1])
    words = [sys.executable, "-m", "bench.habits", str(scripts), str(first), "--no-save"]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ", 0 with faults" in ended.stdout, f"{ended.stdout}\n{ended.stderr[-2000:]}"
