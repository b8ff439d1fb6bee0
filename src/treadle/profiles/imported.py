"""An imported run: the schedule that ran, its Program and the measured steps."""

from __future__ import annotations

from dataclasses import dataclass

from treadle.ir import Schedule
from treadle.ir.program import Program
from treadle.ir.steps import Steps
from treadle.profiles.recording import Remark


@dataclass(frozen=True, eq=False)
class Imported:
    """What was made of a run's profile.

    `named` says that the schedule is one that Treadle generates; its name is then that one's. `remarks` are what could
    not be read or was not as expected.
    """

    form: str
    schedule: Schedule
    named: bool
    steps: Steps
    remarks: tuple[Remark, ...]

    @property
    def program(self) -> Program:
        """The Program whose ops were measured."""
        return self.steps.program
