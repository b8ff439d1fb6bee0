"""`treadle schema`."""

from __future__ import annotations

import difflib
import json
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from treadle.cli.output import VERSIONS, schema_text
from treadle.cli.terminal import out, plain, suggest


def schema(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="The kind of output, such as verify; a list if left out.")
    ] = None,
) -> None:
    """Lists the kinds of JSON that commands print, or prints the JSON schema of one."""
    if name is not None:
        plain(schema_text(_known(name)))
        return
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("name", "version", "what it is"):
        table.add_column(column)
    for kind, version in VERSIONS.items():
        table.add_row(f"[bold]{kind}[/]", str(version), escape(json.loads(schema_text(kind))["title"]))
    out.print(table)
    suggest("treadle schema verify")


def _known(name: str) -> str:
    """The kind that a name stands for; it may begin with `treadle-`, as the first key of an output does."""
    kind = name.removeprefix("treadle-")
    if kind not in VERSIONS:
        close = difflib.get_close_matches(kind, VERSIONS, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(VERSIONS)}"
        raise ValueError(f"no JSON output is called {name!r}; {hint}")
    return kind
