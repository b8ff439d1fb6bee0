"""The schedule a command is about: a name with its size, a file, or what comes on stdin."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from weft import api
from weft.cli.terminal import working
from weft.ir import Schedule
from weft.schedules import family, known

Name = Annotated[
    str,
    typer.Argument(metavar="NAME|FILE", help="A schedule's name, a file (text, torch-csv or json), or - for stdin."),
]
Pp = Annotated[int | None, typer.Option("--pp", help="Ranks of the pipeline.")]
Vpp = Annotated[int | None, typer.Option("--vpp", help="Chunks on each rank, where the schedule leaves a choice.")]
Microbatches = Annotated[int | None, typer.Option("--microbatches", "-m", help="Micro-batches in a step.")]
PlacementName = Annotated[
    str | None,
    typer.Option(help="For rows without a '# placement' line: loop, v, bidirectional or a table such as 0,2/1,3."),
]
Json = Annotated[bool, typer.Option("--json", help="JSON for programs to read.")]


@dataclass(frozen=True)
class Target:
    """What the user named, before it is read or generated."""

    name: str
    pp: int | None
    vpp: int | None
    microbatches: int | None
    placement: str | None = None

    def schedule(self) -> Schedule:
        """The schedule, generated or read."""
        return self._generate() if self._is_name() else self._read()

    def __str__(self) -> str:
        options = (
            ("--pp", self.pp),
            ("--vpp", self.vpp),
            ("-m", self.microbatches),
            ("--placement", self.placement),
        )
        return " ".join([self.name, *(f"{option} {value}" for option, value in options if value is not None)])

    def _is_name(self) -> bool:
        if self.name == "-" or self.name in known():
            return self.name != "-"
        looks_like_a_file = Path(self.name).exists() or Path(self.name).suffix or "/" in self.name
        return not looks_like_a_file

    def _generate(self) -> Schedule:
        chosen = family(self.name)
        if self.pp is None or self.microbatches is None:
            absent = [o for o, v in (("--pp", self.pp), ("--microbatches", self.microbatches)) if v is None]
            raise ValueError(f"{self.name} needs {' and '.join(absent)}, for example: {self.name} --pp 4 -m 8")
        if self.placement is not None:
            raise ValueError(f"{self.name} brings its own placement; --placement is for files of rows")
        size = chosen.size(self.pp, self.vpp, self.microbatches)
        with working(f"generating {self.name}") as advance:
            return chosen.generate(size, advance)

    def _read(self) -> Schedule:
        source = "<stdin>" if self.name == "-" else self.name
        text = sys.stdin.read() if self.name == "-" else Path(self.name).read_text(encoding="utf-8")
        with working(f"reading {source}"):
            schedule = api.loads(text, source, placement=self.placement)
        given = (("--pp", self.pp), ("--vpp", self.vpp), ("--microbatches", self.microbatches))
        holds = (schedule.pp, schedule.vpp, schedule.num_microbatches)
        for (option, value), held in zip(given, holds, strict=True):
            if value is not None and value != held:
                raise ValueError(f"{source} has {option[2:]} {held}, got {option} {value}; leave the option out")
        return schedule
