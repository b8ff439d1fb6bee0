"""The commands by name, each with its first sentence and an example. A command is imported when it is used.

Every command reads its target, calls the library, and prints.
"""

from __future__ import annotations

import re
from importlib import import_module
from keyword import iskeyword
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

import treadle


class CommandHelp(NamedTuple):
    """What the list of commands says of one: the first sentence of its docstring, and the end of its help."""

    about: str
    examples: str


COMMANDS = {
    "schedules": CommandHelp(
        "Lists the schedules: what each is, the sizes it takes, its bubble, its memory, and the trainers that run it.",
        "Example: treadle schedules --json",
    ),
    "show": CommandHelp(
        "Prints a schedule, a row a rank, in a form that every command reads; or what it is lowered to.",
        "Examples: treadle show dualpipe --pp 8 -m 20   |   "
        "treadle show zb-v --pp 4 -m 8 --format torch-csv > zbv.csv   |   "
        "treadle show interleaved-overlap --pp 4 -m 8 --lower --layers 1 --moe --rank 3",
    ),
    "verify": CommandHelp(
        "Checks that a schedule or program finishes, with the right data, within limits. Exits with 0 if so, 1 if not.",
        "Examples: treadle verify dualpipe --pp 8 -m 20   |   treadle verify mine.txt --ring 2   |   "
        "treadle verify 1f1b --pp 4 -m 8 --layers 4 --moe --costs deepseek-v3-h800 --memory-limit 4GB",
    ),
    "simulate": CommandHelp(
        "Predicts a step: how long, where it idles, what is hidden, what it holds, what is on the critical path.",
        "Examples: treadle simulate dualpipe --pp 8 -m 20   |   "
        "treadle simulate interleaved-overlap --pp 4 -m 16 --layers 1 --moe --costs deepseek-v3-h800 -o trace.json",
    ),
    "compare": CommandHelp(
        "Compares schedules, programs or traces with the first one; two traces of one program op by op.",
        "Examples: treadle compare 1f1b interleaved dualpipev --pp 4 -m 16   |   "
        "treadle compare 1f1b interleaved:vpp=2 interleaved:vpp=4 --pp 4 -m 16 --model-layers 64   |   "
        "treadle compare predicted.json measured/ --fit fitted.toml",
    ),
    "import": CommandHelp(
        "Reads a profile of any trainer's run: which schedule it ran, when each op ran, what an op costs.",
        "Examples: treadle import profile/ -o trace.json.gz --fit fitted.toml   |   "
        "treadle import rank*_trace.json.gz --json   |   treadle import profile/ --schedule ran.txt",
    ),
    "why": CommandHelp(
        "Finds why a run is slow: which worker, stage, kind of op or unequal data, by simulating it without them.",
        "Examples: treadle why trace.json.gz   |   treadle why profile/ -o why.html   |   "
        "treadle why timeline.json.gz --steps 16-39,403- --json",
    ),
    "hang": CommandHelp(
        "Finds why a run hangs, in its Flight Recorder dumps: which rank stopped at which op, who waits for whom.",
        "Examples: treadle hang dumps/ --schedule 1f1b --pp 4 -m 4   |   "
        "treadle hang dumps/ --schedule 1f1b --pp 4 -m 4 --communicators group --json",
    ),
    "balance": CommandHelp(
        "Cuts a model into stages so that the slowest stage is the fastest possible, and weighs other cuts beside it.",
        "Examples: treadle balance --model qwen3-30b-a3b --cluster h100:64 --pp 4 --vpp 2 --ep 8   |   "
        "treadle balance --pp 16 --vpp 2 --costs deepseek-v3-model   |   "
        "treadle balance --pp 4 --model-layers 30 --costs mine.toml --schedule 1f1b -m 16   |   "
        "treadle balance --pp 4 --costs mine.toml --layout 'Et*4|(t*5|)*2t*3L'",
    ),
    "plan": CommandHelp(
        "Picks schedule and parallelism for a model on a cluster: step time, memory by part, and the alternatives.",
        "Examples: treadle plan --model kimi-k2 --cluster h800:2048   |   "
        "treadle plan --model config.json --cluster ours.toml --tokens-per-batch 4194304 -o plan.html   |   "
        "treadle plan --model qwen3-30b-a3b --cluster h100:32 --trainable --files plan/",
    ),
    "calibrate": CommandHelp(
        "Fits a cluster's constants to runs that you measured, so that plans for it fit them too.",
        "Examples: treadle calibrate --cluster h800:256 --measured runs.csv -o ours.toml   |   "
        "treadle plan --model qwen3-30b-a3b --cluster ours.toml",
    ),
    "synthesize": CommandHelp(
        "Finds an order of cells that is no slower than any schedule here, and bounds how much faster one could be.",
        "Examples: treadle synthesize --pp 4 -m 8 --max-activations 3 -o tight.txt   |   "
        "treadle synthesize --pp 8 -m 32 --costs mine.toml --time-limit 120 -o mine.txt",
    ),
    "draw": CommandHelp(
        "Draws schedules, programs or traces: on the terminal, as a figure for a paper, or as a page to explore.",
        "Examples: treadle draw 1f1b --pp 4 -m 8   |   "
        "treadle draw 1f1b zb-h1 --pp 4 -m 8 --width column -o fig.pdf   |   "
        "treadle draw interleaved-overlap --pp 4 -m 16 --layers 2 --moe --costs deepseek-v3-h800 -o page.html",
    ),
    "dryrun": CommandHelp(
        "Runs a step as one rank of a simulated world, without its memory, and reports what the rank did.",
        "Examples: treadle dryrun dualpipe --pp 8 -m 64 --world 256 --rank 37   |   "
        "treadle dryrun mine.txt --width 4096 --layers 2",
    ),
    "selfcheck": CommandHelp(
        "Checks this machine: lanes, gradients of all schedules, overlap, offload, a weight update. Exits with 0 or 1.",
        "Examples: treadle selfcheck --quick   |   treadle selfcheck --ranks 8 -o report.json",
    ),
    "update": CommandHelp(
        "Pushes new weights to running engines: all workers serve them, or none does.",
        "Examples: treadle update --from checkpoint/ --to /run/engine   |   "
        "torchrun --no-python --nproc-per-node 4 treadle update --from trainer:source --to /run/engine   |   "
        "treadle update --recover --to /run/engine",
    ),
    "agent": CommandHelp(
        "Speaks for an inference worker in the updates that others call, until Ctrl-C.",
        "Example: treadle agent --to /run/engine --worker 3 --at trainer-0:29600",
    ),
    "simulate-update": CommandHelp(
        "Predicts a weight update: how long it takes, and how much of copies and reloads broadcasts hide.",
        "Examples: treadle simulate-update --devices 4 --rounds 2 -o update.npz   |   treadle draw update.npz   |   "
        "treadle simulate-update --devices 16 --size 1029GB --bucket 8GiB --broadcast-rate 75GB",
    ),
    "costs": CommandHelp(
        "Costs files: how long ops take. Measure a layer, check a file, show one with comments, print the JSON schema.",
        "Example: treadle costs check mine.toml",
    ),
    "explain": CommandHelp(
        "Says what a finding means, why it matters, and the way out.",
        "Example: treadle explain T201",
    ),
    "schema": CommandHelp(
        "Lists the kinds of JSON that commands print, or prints the JSON schema of one.",
        "Examples: treadle schema   |   treadle schema verify > verify.schema.json",
    ),
}


def make_command(name: str) -> Any:
    """Import a command: the function `name` of `treadle.cli.commands.name`, or the Typer app of that name.

    A name that is a word of Python's own has `_` after it there.
    """
    place = f"{name}_" if iskeyword(name) else name.replace("-", "_")
    made: Any = getattr(import_module(f"treadle.cli.commands.{place}"), place)
    if not isinstance(made, typer.Typer):
        function, made = made, make_typer(name)
        made.command(epilog=COMMANDS[name].examples, cls=Command)(function)
    command = typer.main.get_command(made)
    command.name = name
    return command


def make_typer(name: str, *, rich: bool = True, **options: Any) -> typer.Typer:
    """Make an app with the settings that all commands share."""
    return typer.Typer(
        name=name,
        add_completion=False,
        rich_markup_mode="rich" if rich else None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        **options,
    )


_COUNT = "the number of GPUs follows the cluster's name, as in --cluster h100:512"
_MEANT = {
    **dict.fromkeys(("--mb", "--micro-batches", "--num-microbatches", "--num-micro-batches"), "--microbatches"),
    **dict.fromkeys(("--gpus", "--num-gpus", "--world-size"), "--cluster"),
}
"""Options by other names that are typed for them."""


class Command(TyperCommand):
    """A command that names the option which is meant where a name from elsewhere, or one dash too few, is typed."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments.

        Raises:
            ValueError: an option that there is under another name.

        """
        known = {option for parameter in self.params for option in parameter.opts}
        for word in (arg.partition("=")[0] for arg in args):
            if word in known:
                continue
            meant = f"-{word}" if re.fullmatch(r"-[a-z][a-z-]+", word) else _MEANT.get(word)
            if meant in known:
                raise ValueError(f"there is no {word}; {_COUNT if meant == '--cluster' else f'write {meant}'}")
        return super().parse_args(ctx, args)


class Commands(TyperGroup):
    """The commands. A list of them needs none; using one imports it."""

    _listing = False

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names, in the order of use."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, or its entry in a list."""
        if cmd_name not in COMMANDS:
            return None
        if self._listing:
            return TyperCommand(cmd_name, short_help=COMMANDS[cmd_name].about)
        return make_command(cmd_name)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the list."""
        self._listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self._listing = False


app = make_typer(
    "treadle",
    rich=False,  # the list of commands in plain text: rich takes longer to import than to read it
    cls=Commands,
    help="Plans a distributed training step, finds why a run is slow, and verifies, simulates, compares, draws and "
    "rehearses its schedule, which is data. Reads profiles of other trainers, and updates the weights of engines.",
    epilog="Start with: treadle plan --help, treadle why --help or treadle schedules",
    no_args_is_help=True,
)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(f"treadle {treadle.__version__}")
        raise typer.Exit
