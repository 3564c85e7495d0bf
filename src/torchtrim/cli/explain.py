"""`torchtrim explain`: a rule's page."""

from __future__ import annotations

import sys

import click


@click.command()
@click.argument("code", required=False)
def command(code: str | None) -> None:
    """Show the page of a rule, such as TT201; without a code, list all rules."""
    from rich.console import Console
    from rich.markdown import Markdown

    from torchtrim.rules.registry import all_rules, explain

    if code is None:
        for rule in all_rules():
            click.echo(f"{rule.code}  {rule.name}: {rule.summary}")
        return
    page = explain(code.upper())
    if sys.stdout.isatty():
        Console().print(Markdown(page))
    else:
        click.echo(page)
