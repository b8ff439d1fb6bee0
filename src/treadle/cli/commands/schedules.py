"""`treadle schedules`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.markup import escape
from rich.table import Table

from treadle.cli.common_options import Json
from treadle.cli.output import print_json
from treadle.cli.terminal import out, suggest
from treadle.schedules import known

if TYPE_CHECKING:
    from treadle.cli.printed import SchedulesJson
    from treadle.schedules.family import Family


def schedules(as_json: Json = False) -> None:
    """Lists the schedules: what each is, the sizes it takes, its bubble, its memory, and the trainers that run it."""
    if as_json:
        print_json("schedules", _as_dict(known().values()))
        return
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for family in known().values():
        lines = {
            "": f"[bold]{escape(family.summary)}[/]",
            "sizes": escape(family.demands),
            "bubble": escape(family.bubble),
            "memory": escape(family.memory),
            "run by": escape(_trainers_text(family)),
            "source": f"[dim]{escape(family.source)}[/]",
        }
        for line, (label, content) in enumerate(lines.items()):
            table.add_row(family.name if line == 0 else "", label, content)
    out.print(table)
    out.print(
        "P ranks, V chunks on each, M micro-batches, rank r. bubble: idle time of a rank; F, B = I + W, FB are the "
        "times of a forward, of a backward, its dgrad and its wgrad, of an overlapped pair, over all chunks of a rank. "
        "memory: activations held at most.",
        style="dim",
    )
    suggest("treadle show interleaved-overlap --pp 4 -m 8")


def _trainers_text(family: Family) -> str:
    """Return the public trainers that run a schedule, in a line."""
    return ", ".join(family.trainers) or "no public trainer: plan takes it only where --schedule names it"


def _as_dict(families: Iterable[Family]) -> SchedulesJson:
    return {
        "schedules": [
            {
                "name": family.name,
                "summary": family.summary,
                "demands": family.demands,
                "bubble": family.bubble,
                "memory": family.memory,
                "trainers": list(family.trainers),
                "source": family.source,
            }
            for family in families
        ]
    }
