"""`treadle costs`: check a costs file, show costs, measure a layer, print the schema."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from treadle.cli.app import COMMANDS, make_typer
from treadle.cli.common_options import Json
from treadle.cli.output import print_json
from treadle.cli.terminal import note, out, plain, suggest, working, wrote
from treadle.cli.wording import as_typed
from treadle.cli.writable import check_file
from treadle.costs import PRESETS, dump, lacks, load_costs, parse, read, schema
from treadle.fields.input_files import read_text
from treadle.host.extras import brought_by

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


@costs.command(
    epilog="Example: treadle costs measure my_layers.py:Block --input 1,4096,2048 --layers 48 -o measured.toml"
)
def measure(
    layer: Annotated[
        str, typer.Argument(metavar="FILE.py:NAME", help="A module, or a class or function that makes one.")
    ],
    shape: Annotated[str, typer.Option("--input", help="Shape of a micro-batch's activation: 1,4096,2048.")],
    layers: Annotated[int, typer.Option(help="How many such layers the model has.", min=1)],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write a costs file: .toml.")] = None,
    device: Annotated[str | None, typer.Option(help="Default: cuda if torch finds a GPU, else cpu.")] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float32, ... Default: as the layer makes it.")] = None,
    steps: Annotated[int, typer.Option(help="Steps of four micro-batches that count.", min=1)] = 10,
) -> None:
    """Measures a layer on this device: forward, dgrad, wgrad, whole backward, saved bytes.

    The layer takes one tensor and returns one. Embedding, head and messages are not measured.
    """
    with brought_by("run", needed_by="measuring a layer"):
        import torch

        from treadle.runtime.layer_costs import WARM_UP, load_layer, measure_layer
    if output is not None:
        if output.suffix != ".toml":
            raise ValueError(f"a costs file ends in .toml, got {str(output)!r}")
        check_file(output)
    sizes = _sizes(shape)
    if device not in (None, "cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"--device is cpu, or cuda where torch finds a GPU, got {device!r}")
    where = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    kind = getattr(torch, dtype, None) if dtype is not None else None
    if dtype is not None and not (isinstance(kind, torch.dtype) and kind.is_floating_point):
        raise ValueError(f"--dtype is a floating type of torch, such as bfloat16 or float32, got {dtype!r}")
    made = load_layer(layer).to(device=where, dtype=kind)
    with working("measuring") as advance:
        times = measure_layer(made, sizes, steps, lambda done: advance(done + 1, WARM_UP + steps))
    if times.i is None:
        note("its backward does not split into dgrad and wgrad: only the whole backward is known")
    about = f"{layer}, input {'x'.join(map(str, sizes))}, {where}: medians of {steps} steps of `treadle costs measure`"
    text = dump(times.costs(layer.rpartition(":")[2], layers, about), comments=True)
    if output is None:
        plain(text)
    else:
        output.write_text(text, encoding="utf-8")
        wrote(output)
        suggest(f"treadle simulate 1f1b --pp 4 -m 8 --costs {shlex.quote(str(output))}")


def _sizes(shape: str) -> list[int]:
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", shape):
        raise ValueError(f"--input is a shape, whole numbers from 1 divided by commas: 1,4096,2048, got {shape!r}")
    return [int(size) for size in shape.split(",")]


@costs.command("schema", epilog="Example: treadle costs schema > costs.schema.json")
def print_schema() -> None:
    """Prints the JSON schema of costs files, for editors and other programs."""
    plain(json.dumps(schema(), indent=1) + "\n")
