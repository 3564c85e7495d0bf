"""Commands shown to the user: complete, quoted for a shell, and safe from paths that look like options.

All commands on a script come from `command`: each has the script's arguments and the options to repeat.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torchtrim.records.plan import Plan

_WORD = re.compile(r"""(?:'[^']*'|"[^"]*"|[^ '"])+""")


def path_argument(path: str) -> str:
    """Return the path as an argument that is not parsed as an option, even if it starts with a dash."""
    return f"./{path}" if path.startswith("-") else path


def quoted(path: str) -> str:
    """Return the path quoted as one shell word."""
    return shlex.quote(path_argument(path))


def from_here(path: Path) -> Path:
    """Return the path relative to the current folder if it is inside."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def shell_words(command: str) -> list[str]:
    """Split a command line into words, still quoted; a line may break between them."""
    return _WORD.findall(command)


class Called(NamedTuple):
    """How torchtrim was called: its own name, the words that name the script, and the script's arguments.

    `repeated` returns the given options that a verb takes too, each as its words. `memory`: the budget.
    """

    name: tuple[str, ...] = ("torchtrim",)
    script: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    repeated: Callable[[str], Sequence[tuple[str, ...]]] = lambda _: ()
    memory: str = ""


_ALONE = Called()
_called: ContextVar[Called] = ContextVar("called")


def remember(how: Called | None) -> None:
    """Set how torchtrim was called, for all commands from now on; None: by no verb."""
    _called.set(how or _ALONE)


def plain_command(*words: str) -> str:
    """Return a command without a script."""
    return shlex.join([*_called.get(_ALONE).name, *words])


def command(
    verb: str,
    *more: str,
    script: str = "SCRIPT",
    args: Sequence[str] = (),
    how: Called | None = None,
) -> str:
    """Return a command on the script that torchtrim was called with, else on `script` with `args`.

    `how`: how torchtrim was called, by default as the running verb was.
    """
    how = how or _called.get(_ALONE)
    named = [*how.script] or [path_argument(script)]
    repeated = [word for words in how.repeated(verb) if words[0] not in more for word in words]
    given = how.args if how.script else args
    words = [*how.name, verb, *named, *more, *repeated, *(["--", *given] if given else [])]
    return shlex.join(words)


def fitting(*more: str, script: str = "SCRIPT") -> str:
    """Return the command that fits the script into the budget that torchtrim was called with, else 60 %."""
    memory = _called.get(_ALONE).memory or "60%"
    return command("optimize", "--memory", memory, *more, script=script)


def plan_again(plan: Plan, script: str = "", args: Sequence[str] = (), *, device: str = "") -> str:
    """Return the command that makes such a plan anew, with its budget and terms, for its device or another.

    A CPU keeps in files what a GPU's plan keeps in pinned memory.
    """
    proof = plan.certified
    named, given = script or plan.script, args or (proof.args if proof is not None else None) or ()
    verb, words = "optimize", ["--memory", plan.asked or str(plan.budget_bytes)]
    if plan.pipeline is not None:
        verb, words = "plan", [*words, "--stages", str(plan.pipeline.processes)]
    if plan.memory_kind != "allocated":
        words += ["--memory-kind", plan.memory_kind]
    if plan.is_of_calls:
        words += ["--mode", "inference"]
    asked = [one.name for one in plan.techniques if one.equivalence == "SEMANTIC"]
    if asked:
        words += ["--allow", f"semantic={','.join(dict.fromkeys(asked))}"]
    elif any(one.equivalence == "ROUNDING" for one in plan.techniques):
        words += ["--allow", "rounding"]
    if device == "cpu" and plan.predicted.host_bytes:
        words += ["--host-memory", str(plan.predicted.host_bytes)]
    kind, _, model = (device or plan.predicted.device).partition(" ")
    if kind:
        words += ["--device", model or kind.partition(":")[0]]
    return command(verb, *words, script=named, args=given)
