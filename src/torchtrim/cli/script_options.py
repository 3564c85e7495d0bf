"""Options in the wrong place: torchtrim's among the script's arguments, or the script's among torchtrim's."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import click

from torchtrim.core.words import did_you_mean
from torchtrim.errors import UsageError
from torchtrim.records.commands import plain_command
from torchtrim.records.files import read_head

_MOST_BYTES = 2**22  # Arbitrary; bounds what a hostile file makes us read.


class Words(NamedTuple):
    """The words of a command line: a verb's own, the script or module, and all others in their order."""

    own: list[str]
    script: str
    others: list[str]

    def moved(self, verb: str) -> str:
        """Return the command with the others after `--`."""
        return plain_command(verb, *self.own, self.script, "--", *self.others)


def words_of(command: click.Command, words: Sequence[str]) -> Words:
    """Separate the options that a verb has, with their values, from the script and all other words.

    Words after `--` are the script's.
    """
    own, others, plain = list[str](), list[str](), list[str]()
    end = words.index("--") if "--" in words else len(words)
    left = iter(words[:end])
    for word in left:
        option = _option_of(command, word)
        if option is None:
            others.append(word)
            plain += [] if word.startswith("-") else [word]
            continue
        own.append(word)
        if not option.is_flag and "=" not in word:
            own += [value for value in [next(left, "")] if value]
    if "-m" in own:
        own.remove("-m")
        own.append("-m")
        likely = [word for before, word in pairwise(words[:end]) if before == "-m"]
    else:
        likely = [word for word in plain if Path(word).is_file() or word.endswith(".py")]
    script = next((word for word in [*likely, *plain] if word in others), "")
    if script:
        others.remove(script)
    return Words(own, script, [*others, *words[end + 1 :]])


def unknown_option(
    command: click.Command, verb: str, name: str, words: Sequence[str]
) -> UsageError:
    """Return the error for an option that a verb lacks: it is misspelt, or the script's own."""
    question = did_you_mean(name, _flags(command), most=1)
    moved = words_of(command, words).moved(verb)
    return UsageError(
        f"{verb} has no option {name}.{question} The script's own options follow `--`: {moved}"
    )


def check_passed(command: click.Command, verb: str, words: Sequence[str]) -> None:
    """Check the options of a verb that passes unknown ones to the script, given without `--`.

    Raises `UsageError` for one of another verb that the script does not name, and for one of this verb that
    stands after the script and that the script names too.
    """
    if "--" in words:
        return
    parts = words_of(command, words)
    named = _options_in(Path(parts.script))
    for option in {word.partition("=")[0] for word in parts.others} & _flags_of_all():
        if option not in named:
            raise UsageError(
                f"{verb} has no option {option}, and {parts.script or 'the script'} does not name it. If the "
                f"script takes it: {parts.moved(verb)}"
            )
    after = words[words.index(parts.script) + 1 :] if parts.script else ()
    for option in {word.partition("=")[0] for word in after} & _flags(command) & named:
        raise UsageError(
            f"both {verb} and {parts.script} have {option}. Put torchtrim's before the script, and the "
            "script's after `--`."
        )


def _option_of(command: click.Command, word: str) -> click.Option | None:
    flag = word.partition("=")[0]
    options = (one for one in command.params if isinstance(one, click.Option))
    return next((one for one in options if flag in (*one.opts, *one.secondary_opts)), None)


def _flags(command: click.Command) -> set[str]:
    options = (one for one in command.params if isinstance(one, click.Option))
    return {flag for one in options for flag in one.opts if flag.startswith("--")}


def _flags_of_all() -> set[str]:
    """Return the options of all verbs."""
    names = (one.name for one in pkgutil.iter_modules([str(Path(__file__).parent / "verbs")]))
    every = (importlib.import_module(f"{__package__}.verbs.{name}").command for name in names)
    return {flag for command in every for flag in _flags(command)}


def _options_in(script: Path) -> set[str]:
    """Return the words of a script that look like options; for a module or without a file, none."""
    try:
        text = read_head(script, _MOST_BYTES).decode(errors="replace")
    except (OSError, ValueError):
        return set()
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text))
