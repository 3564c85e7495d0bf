"""`torchtrim explain`: the page of a rule or a technique, or the meaning of a word."""

from __future__ import annotations

import json
import sys

import click

from torchtrim.errors import UsageError


@click.command()
@click.argument("code", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the pages as JSON.")
def command(code: str | None, as_json: bool) -> None:
    """Show the page of a rule, such as TT201, or of a technique, such as recompute, or explain a word.

    Any word of the output has a meaning here: BITWISE, peak, lever. Without CODE, list all rules and words.
    """
    from torchtrim.api import all_rules, explain, rule, technique_names, technique_page
    from torchtrim.core.glossary import GLOSSARY, meaning

    if code is not None and code.lower() in technique_names():
        page = technique_page(code.lower())
        _show(page) if not as_json else click.echo(
            json.dumps([{"name": code.lower(), "page": page}])
        )
        return
    if code is not None and (found := meaning(code)) is not None:
        word, text = found
        click.echo(json.dumps([{"name": word, "page": text}]) if as_json else f"{word}: {text}")
        return
    _check_known(code)
    chosen = list(all_rules()) if code is None else [rule(code.upper())]
    if as_json:
        facts = ("code", "name", "summary", "page")
        click.echo(json.dumps([{f: getattr(r, f) for f in facts} for r in chosen], indent=2))
    elif code is None:
        for one in chosen:
            click.echo(f"{one.code}  {one.name}: {one.summary}")
        click.echo(f"Words: {', '.join(GLOSSARY)}")
    else:
        _show(explain(code.upper()))


def _check_known(code: str | None) -> None:
    """Raise `UsageError` with the nearest names for a word that is none."""
    from torchtrim.api import all_rules, technique_names
    from torchtrim.core.glossary import GLOSSARY
    from torchtrim.core.words import did_you_mean

    names = [name for one in all_rules() for name in (one.code, one.name)]
    if code is None or code.upper() in names or code.lower() in names:
        return
    question = did_you_mean(code, [*GLOSSARY, *names, *technique_names()])
    raise UsageError(
        f"{code!r} is not a rule, technique or word of torchtrim.{question} "
        "`torchtrim explain` lists rules and words."
    )


def _show(page: str) -> None:
    if not sys.stdout.isatty():
        click.echo(page)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(page))
