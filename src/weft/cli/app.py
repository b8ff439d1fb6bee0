"""The commands by name, with an example each. Every command reads its target, calls the library, and prints."""

from __future__ import annotations

from typing import Annotated

import typer

import weft
from weft.cli.commands.compare import compare
from weft.cli.commands.draw import draw
from weft.cli.commands.dryrun import dryrun
from weft.cli.commands.explain import explain
from weft.cli.commands.schedules import schedules
from weft.cli.commands.show import show
from weft.cli.commands.simulate import simulate
from weft.cli.commands.update import update
from weft.cli.commands.verify import verify
from weft.cli.terminal import plain

app = typer.Typer(
    name="weft",
    help="Distributed training schedules as data: list, show, verify, simulate, draw, compare and rehearse them.",
    epilog="Start with: weft schedules",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        plain(f"weft {weft.__version__}\n")
        raise typer.Exit


app.command(epilog="Example: weft schedules --json")(schedules)
app.command(
    epilog="Examples: weft show dualpipe --pp 8 -m 20   |   "
    "weft show zb-v --pp 4 -m 8 --format torch-csv > zbv.csv   |   "
    "weft show interleaved-overlap --pp 4 -m 8 --lower --layers 1 --moe --rank 3   |   "
    "weft show update --devices 4 --rounds 2"
)(show)
app.command(
    epilog="Examples: weft verify dualpipe --pp 8 -m 20   |   weft verify mine.txt --ring 2   |   "
    "weft verify 1f1b --pp 4 -m 8 --layers 4 --moe --costs deepseek-v3-h800 --memory-limit 4GB"
)(verify)
app.command(
    epilog="Examples: weft simulate dualpipe --pp 8 -m 20   |   "
    "weft simulate interleaved-overlap --pp 4 -m 16 --layers 1 --moe --costs deepseek-v3-h800 -o trace.json"
)(simulate)
app.command(
    epilog="Examples: weft compare 1f1b zb-h1 dualpipe --pp 4 -m 16   |   "
    "weft compare predicted.json measured/ --fit fitted.toml"
)(compare)
app.command(
    epilog="Examples: weft draw 1f1b --pp 4 -m 8   |   "
    "weft draw dualpipe --pp 8 -m 20 --palette dualpipe -o fig.pdf   |   "
    "weft draw interleaved-overlap --pp 4 -m 16 --layers 2 --moe --costs deepseek-v3-h800 -o page.html   |   "
    "weft draw update --devices 4 --rounds 2 -o update.svg"
)(draw)
app.command(
    epilog="Examples: weft dryrun dualpipe --pp 8 -m 64 --world 256 --rank 37   |   "
    "weft dryrun mine.txt --width 4096 --layers 2"
)(dryrun)
app.command(
    epilog="Examples: weft update --from checkpoint/ --to /run/engine   |   "
    "torchrun --no-python --nproc-per-node 4 weft update --from trainer:source --to /run/engine   |   "
    "weft update --recover --to /run/engine"
)(update)
app.command(epilog="Example: weft explain W201")(explain)
