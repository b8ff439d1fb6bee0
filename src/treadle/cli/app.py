"""The commands by name, with an example each. Every command reads its target, calls the library, and prints."""

from __future__ import annotations

from typing import Annotated

import typer

import treadle
from treadle.cli.commands.compare import compare
from treadle.cli.commands.costs import costs
from treadle.cli.commands.draw import draw
from treadle.cli.commands.dryrun import dryrun
from treadle.cli.commands.explain import explain
from treadle.cli.commands.schedules import schedules
from treadle.cli.commands.show import show
from treadle.cli.commands.simulate import simulate
from treadle.cli.commands.update import update
from treadle.cli.commands.verify import verify
from treadle.cli.terminal import plain

app = typer.Typer(
    name="treadle",
    help="Distributed training schedules as data: list, show, verify, simulate, draw, compare and rehearse them.",
    epilog="Start with: treadle schedules",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        plain(f"treadle {treadle.__version__}\n")
        raise typer.Exit


app.command(epilog="Example: treadle schedules --json")(schedules)
app.command(
    epilog="Examples: treadle show dualpipe --pp 8 -m 20   |   "
    "treadle show zb-v --pp 4 -m 8 --format torch-csv > zbv.csv   |   "
    "treadle show interleaved-overlap --pp 4 -m 8 --lower --layers 1 --moe --rank 3   |   "
    "treadle show update --devices 4 --rounds 2"
)(show)
app.command(
    epilog="Examples: treadle verify dualpipe --pp 8 -m 20   |   treadle verify mine.txt --ring 2   |   "
    "treadle verify 1f1b --pp 4 -m 8 --layers 4 --moe --costs deepseek-v3-h800 --memory-limit 4GB"
)(verify)
app.command(
    epilog="Examples: treadle simulate dualpipe --pp 8 -m 20   |   "
    "treadle simulate interleaved-overlap --pp 4 -m 16 --layers 1 --moe --costs deepseek-v3-h800 -o trace.json"
)(simulate)
app.command(
    epilog="Examples: treadle compare 1f1b interleaved dualpipev --pp 4 -m 16   |   "
    "treadle compare 1f1b interleaved:vpp=2 interleaved:vpp=4 --pp 4 -m 16 --model-layers 64   |   "
    "treadle compare predicted.json measured/ --fit fitted.toml"
)(compare)
app.command(
    epilog="Examples: treadle draw 1f1b --pp 4 -m 8   |   "
    "treadle draw dualpipe --pp 8 -m 20 --palette dualpipe -o fig.pdf   |   "
    "treadle draw interleaved-overlap --pp 4 -m 16 --layers 2 --moe --costs deepseek-v3-h800 -o page.html   |   "
    "treadle draw update --devices 4 --rounds 2 -o update.svg"
)(draw)
app.command(
    epilog="Examples: treadle dryrun dualpipe --pp 8 -m 64 --world 256 --rank 37   |   "
    "treadle dryrun mine.txt --width 4096 --layers 2"
)(dryrun)
app.command(
    epilog="Examples: treadle update --from checkpoint/ --to /run/engine   |   "
    "torchrun --no-python --nproc-per-node 4 treadle update --from trainer:source --to /run/engine   |   "
    "treadle update --recover --to /run/engine"
)(update)
app.add_typer(costs, name="costs")
app.command(epilog="Example: treadle explain T201")(explain)
