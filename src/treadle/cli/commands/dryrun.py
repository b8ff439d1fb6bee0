"""`treadle dryrun`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from treadle.cli.common_options import Json, spread_options
from treadle.cli.output import print_json
from treadle.cli.target import Target
from treadle.cli.terminal import out, suggest, working
from treadle.host.extras import brought_by
from treadle.ir.show import show_bytes
from treadle.lowering.running import disagreements
from treadle.passes.mesh import spread

if TYPE_CHECKING:
    from treadle.cli.printed import DryrunJson
    from treadle.runtime.rank_dryrun import Rehearsal


@spread_options
def dryrun(
    target: Target,
    world: Annotated[
        int | None, typer.Option(help="Ranks in the world: a multiple of --pp. One pipeline if left out.")
    ] = None,
    rank: Annotated[int, typer.Option(help="The rank to be.")] = 0,
    width: Annotated[int, typer.Option(help="Width of the model that is run.")] = 1024,
    layers: Annotated[int, typer.Option(help="Its layers on each stage.")] = 1,
    tokens: Annotated[int, typer.Option(help="Tokens of a micro-batch.")] = 4096,
    as_json: Json = False,
) -> None:
    """Runs a step as one rank of a simulated world, without its memory, and reports what the rank did.

    Exits with 1 if that differs from the program that was verified.
    """
    with brought_by("run", needed_by="a dry run"):
        from treadle.runtime.rank_dryrun import Toy, differences, rehearse
    for option, value in (("--width", width), ("--layers", layers), ("--tokens", tokens)):
        if value < 1:
            raise ValueError(f"{option} is a whole number from 1, got {value}")
    schedule = target.schedule()
    size = world if world is not None else schedule.pp
    with working(f"running a step as rank {rank} of {size}"):
        done = rehearse(schedule, size, rank, Toy(width, layers, tokens))
    with working(f"comparing {size} ranks"):
        everyone = spread(done.program, ep=1, dp=size // schedule.pp)
        found = [*differences(done), *disagreements(everyone)]
    if as_json:
        print_json("dryrun", _as_dict(done, size, rank, found))
    else:
        _print(done, size, rank, found)
        suggest(f"treadle verify {target}")
    raise typer.Exit(1 if found else 0)


def _as_dict(done: Rehearsal, world: int, rank: int, found: list[str]) -> DryrunJson:
    return {
        "world": world,
        "rank": rank,
        "pp_rank": done.pp_rank,
        "dp_rank": done.dp_rank,
        "channels": {
            f"{a}>{b}": {"messages": s.num_messages, "bytes": s.num_bytes} for (a, b), s in done.channels.items()
        },
        "groups": done.groups,
        "communicators": done.num_communicators,
        "parameter_bytes": done.parameter_bytes,
        "gradient_bytes": done.gradient_bytes,
        "peak_saved_bytes": done.peak_saved_bytes,
        "peak_buffer_bytes": done.peak_buffer_bytes,
        "peak_bytes": done.peak_bytes,
        "peak_at": done.peak_at,
        "disagreements": found,
    }


def _print(done: Rehearsal, world: int, rank: int, found: list[str]) -> None:
    out.print(f"[bold]rank {rank} of {world}[/]: place {done.pp_rank} along pp, {done.dp_rank} along dp")
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("channel", "messages", "bytes"):
        table.add_column(column, justify="left" if column == "channel" else "right")
    for (source, target), sent in sorted(
        done.channels.items(), key=lambda item: (sum(item[0]), item[0][0] != done.pp_rank)
    ):
        way = f"to {target}" if source == done.pp_rank else f"from {source}"
        table.add_row(way, str(sent.num_messages), show_bytes(sent.num_bytes))
    out.print(table)
    groups = ", ".join(f"{name} of {size}" for name, size in done.groups.items())
    out.print(f"communicators  {done.num_communicators}: {len(done.channels)} channels, {groups}")
    parts = (
        ("parameters", done.parameter_bytes),
        ("gradients", done.gradient_bytes),
        ("saved for backward, at most", done.peak_saved_bytes),
        ("receive buffers, at most", done.peak_buffer_bytes),
    )
    out.print(f"memory         {', '.join(f'{name} {show_bytes(size)}' for name, size in parts)}", soft_wrap=True)
    out.print(f"peak           {show_bytes(done.peak_bytes)} in all, at {done.peak_at}")
    if found:
        for line in found:
            out.print(f"[red]differs[/]  {line}", soft_wrap=True)
    else:
        out.print(f"[green]as verified[/]    what the rank did, and the lists of all {world} ranks")
