"""The target of a command: a schedule by name and size, or a schedule, a program or a trace from a file."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from treadle.api import load_save
from treadle.cli.terminal import note, working
from treadle.ir import Schedule
from treadle.schedules import family, is_known

if TYPE_CHECKING:
    from treadle.ir.program import Program
    from treadle.ir.trace import Trace
    from treadle.step import Step

Loaded: TypeAlias = "Schedule | Program | Trace"
"""A target as it was generated or read."""

_UNNAMED = "custom"
"""The name of a schedule whose file gives it none."""

_NAME = typer.Argument(
    metavar="NAME|FILE",
    help="A schedule's name; a file: schedule (text, torch-csv, json), program (npz), trace (json, npz); a directory: "
    "what plan --files wrote, the profile of a run, or its traces; or - for a schedule on stdin.",
)
PLACEMENT = typer.Option(
    "--placement", help="For rows without a '# placement' line: loop, v, bidirectional or a table: 0,2/1,3."
)
Pp = Annotated[int | None, typer.Option("--pp", help="Ranks of the pipeline.")]
Vpp = Annotated[int | None, typer.Option("--vpp", help="Chunks on each rank, where the schedule leaves a choice.")]
Microbatches = Annotated[int | None, typer.Option("--microbatches", "-m", help="Micro-batches in a step.")]


@dataclass(frozen=True)
class Target:
    """The target as the user named it, before it is read or generated."""

    name: Annotated[str, _NAME]
    pp: Pp = None
    vpp: Vpp = None
    microbatches: Microbatches = None
    placement: Annotated[str | None, PLACEMENT] = None

    def load(self) -> Loaded:
        """Generate the schedule, or read the file."""
        return self._generate() if self.is_name() else self._read()

    @cached_property
    def plan(self) -> Step | None:
        """The step of the plan, if a directory is named that `treadle plan --files` wrote."""
        if self.is_name() or not Path(self.name).is_dir():
            return None
        from treadle.planner.plan_directory import is_plan, read_plan

        return read_plan(self.name) if is_plan(Path(self.name)) else None

    def schedule(self) -> Schedule:
        """The schedule, or a ValueError where the file holds something else."""
        return self.checked_schedule(self.load())

    def checked_schedule(self, loaded: Loaded) -> Schedule:
        """Return the loaded schedule, or raise a ValueError if it is something else."""
        if not isinstance(loaded, Schedule):
            raise ValueError(f"{self.name} is a {type(loaded).__name__.lower()}; this needs a schedule")
        return loaded

    def __str__(self) -> str:
        options = (("--pp", self.pp), ("--vpp", self.vpp), ("-m", self.microbatches), ("--placement", self.placement))
        given = (f"{option} {shlex.quote(str(value))}" for option, value in options if value is not None)
        return " ".join([shlex.quote(self.name), *given])

    def is_name(self) -> bool:
        """Return True for a schedule's name, False for a file."""
        if self.name == "-" or is_known(self.name):
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

    def _read(self) -> Loaded:
        source = "<stdin>" if self.name == "-" else self.name
        with working(f"reading {source}"):
            if self.name == "-":
                loaded: Loaded = load_save.loads(sys.stdin.read(), source, placement=self.placement)
            elif self.plan is not None:
                loaded = self._planned(self.plan)
            elif Path(self.name).is_dir():
                loaded = _typical_step(Path(self.name))
            else:
                loaded = load_save.load(self.name, placement=self.placement)
                _note_plan(Path(self.name))
        if isinstance(loaded, Schedule):
            self._check_size(loaded, source)
        return loaded

    def _planned(self, plan: Step) -> Schedule:
        if self.placement is not None:
            raise ValueError(f"{self.name} has its placement, got --placement {self.placement}; leave the option out")
        assert isinstance(plan.target, Schedule)
        return plan.target

    def _check_size(self, schedule: Schedule, source: str) -> None:
        given = (("--pp", self.pp), ("--vpp", self.vpp), ("--microbatches", self.microbatches))
        holds = (schedule.pp, schedule.vpp, schedule.num_microbatches)
        for (option, value), held in zip(given, holds, strict=True):
            if value is not None and value != held:
                raise ValueError(f"{source} has {option[2:]} {held}, got {option} {value}; leave the option out")


def label(targets: Sequence[Target], loaded: Sequence[Loaded]) -> list[str]:
    """Return the names of what was loaded: that of a schedule in its file; all as the user named them if two share one.

    A file without a name is named as the user did.
    """
    typed = [target.name for target in targets]
    own = [each.name if isinstance(each, Schedule) and each.name != _UNNAMED else "" for each in loaded]
    names = [name or given for name, given in zip(own, typed, strict=True)]
    return names if len(set(names)) == len(names) else typed


def _note_plan(path: Path) -> None:
    """Note that a schedule is of a plan, whose costs and layout the file alone does not bring."""
    if path.name == "schedule.txt" and path.with_name("plan.toml").is_file():
        note(f"{path} is of a plan; name {path.parent} instead to have its costs, layout and mesh too")


def _typical_step(directory: Path) -> Trace:
    """Return the typical step of the run whose traces or profile a directory holds."""
    from treadle.cli.measured_steps import load_steps

    return load_steps([directory]).trace()
