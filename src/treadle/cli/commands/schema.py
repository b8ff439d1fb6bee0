"""`treadle schema`."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from treadle.cli.output import KINDS
from treadle.cli.output import schema as schema_of
from treadle.cli.terminal import out, plain, suggest
from treadle.fields.nearest import did_you_mean


def schema(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="The kind of output, such as verify; a list if left out.")
    ] = None,
) -> None:
    """Lists the kinds of JSON that commands print, or prints the JSON schema of one."""
    if name is not None:
        plain(json.dumps(schema_of(_known(name)), indent=1) + "\n")
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("name", "version", "what it is"):
        table.add_column(column)
    for kind, found in KINDS.items():
        table.add_row(f"[bold]{kind}[/]", str(found.version), escape(found.title))
    out.print(table)
    suggest("treadle schema verify")


def _known(name: str) -> str:
    """The kind that a name stands for; it may begin with `treadle-`, as the first key of an output does."""
    kind = name.removeprefix("treadle-")
    if kind not in KINDS:
        raise ValueError(f"no JSON output is called {name!r}; {did_you_mean(kind, KINDS)}")
    return kind
