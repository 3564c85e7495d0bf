"""`torchtrim explain`: the page of a rule or a technique."""

from __future__ import annotations

import json
import sys

import click


@click.command()
@click.argument("code", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the pages as JSON.")
def command(code: str | None, as_json: bool) -> None:
    """Show the page of a rule, such as TT201, or of a technique, such as recompute.

    Without a code, list all rules.
    """
    from torchtrim.api import all_rules, explain, rule, technique_names, technique_page

    if code is not None and code.lower() in technique_names():
        page = technique_page(code.lower())
        _show(page) if not as_json else click.echo(
            json.dumps([{"name": code.lower(), "page": page}])
        )
        return
    chosen = list(all_rules()) if code is None else [rule(code.upper())]
    if as_json:
        facts = ("code", "name", "summary", "page")
        click.echo(json.dumps([{f: getattr(r, f) for f in facts} for r in chosen], indent=2))
    elif code is None:
        for one in chosen:
            click.echo(f"{one.code}  {one.name}: {one.summary}")
    else:
        _show(explain(code.upper()))


def _show(page: str) -> None:
    if not sys.stdout.isatty():
        click.echo(page)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(page))
