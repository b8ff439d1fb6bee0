"""`treadle costs`: check a costs file, show costs, print the schema."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from treadle.cli.app import COMMANDS, make_typer
from treadle.cli.common_options import Json
from treadle.cli.output import print_json
from treadle.cli.terminal import out, plain, suggest
from treadle.cli.wording import as_typed
from treadle.costs import PRESETS, dump, lacks, load_costs, parse, read, schema
from treadle.fields.input_files import read_text

if TYPE_CHECKING:
    from treadle.cli.printed import CostsCheckJson

costs = make_typer("costs", help=COMMANDS["costs"].about, no_args_is_help=True)


@costs.command(epilog="Example: treadle costs check mine.toml")
def check(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="A costs file (TOML).")], as_json: Json = False
) -> None:
    """Lists every problem of a costs file with line and field, and what it lacks for which options.

    Exits with 0 if the file is right, 1 if not.
    """
    text = read_text(path)
    _, problems = read(text)
    checked = parse(text, str(path)) if not problems else None
    lacking = lacks(checked) if checked is not None else ()
    if as_json:
        body: CostsCheckJson = {
            "file": str(path),
            "right": not problems,
            "problems": [problem.as_dict() for problem in problems],
            "lacks": [{"names": list(lack.names), "effect": as_typed(lack.effect)} for lack in lacking],
        }
        print_json("costs-check", body)
        raise typer.Exit(1 if problems else 0)
    for problem in problems:
        out.print(f"[bold red]wrong[/] {escape(problem.at(str(path)))}", soft_wrap=True)
    if checked is None:
        raise typer.Exit(1)
    out.print(f"[green]right:[/] {escape(str(path))}, costs {escape(repr(checked.name))}", soft_wrap=True)
    for lack in lacking:
        out.print(escape(as_typed(str(lack))), soft_wrap=True)
    suggest(f"treadle simulate 1f1b --pp 4 -m 8 --costs {shlex.quote(str(path))}")


@costs.command(epilog="Example: treadle costs show deepseek-v3-h800 > mine.toml")
def show(
    name: Annotated[
        str, typer.Argument(metavar="PRESET|FILE", help=f"unit, {', '.join(PRESETS)}, or the path of a TOML file.")
    ],
) -> None:
    """Prints costs as TOML, with a comment on each entry: a file to start from."""
    shown = load_costs(name)
    source = "built in" if name == "unit" else "a preset of treadle" if name in PRESETS else name
    told = "; `about` has the source of its numbers" if shown.about else ""
    plain(f"# Source: {source}{told}\n{dump(shown, comments=True)}")
    suggest(f"treadle simulate 1f1b --pp 4 -m 8 --costs {name}")


@costs.command("schema", epilog="Example: treadle costs schema > costs.schema.json")
def print_schema() -> None:
    """Prints the JSON schema of costs files, for editors and other programs."""
    plain(json.dumps(schema(), indent=1) + "\n")
