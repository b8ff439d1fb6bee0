"""The forms a schedule is written in, by name. A new one is a file beside these and a line here."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any, NamedTuple

from treadle.ir import Schedule, text


class Format(NamedTuple):
    """A text form of schedules. `module` has its functions, and is imported when the form is used."""

    module: str

    def dump(self, schedule: Schedule, **options: Any) -> str:
        """Write a schedule in this form. Options are those of the form's function."""
        written: str = self._functions.dump(schedule, **options)
        return written

    def parse(self, content: str, source: str) -> Schedule:
        """Read a schedule in this form. Errors name `source`."""
        read: Schedule = self._functions.parse(content, source)
        return read

    @property
    def _functions(self) -> Any:
        return import_module(self.module)


FORMATS: dict[str, Format] = {
    "text": Format("treadle.ir.text"),
    "torch-csv": Format("treadle.files.torch_csv"),
    "torch-comms": Format("treadle.files.torch_comms"),
    "json": Format("treadle.files.json_form"),
}

_TEXT_LINE = re.compile(r"^(#|[0-9]+:|[Rr]ank|\(?[FBIW][0-9])", re.MULTILINE)
"""Beginnings of lines that torch's CSV does not have: its entries begin with a stage."""


def format_of(content: str) -> str:
    """The name of the form that a file's content is in, told by how its lines begin."""
    if content.lstrip().startswith(("{", "[")):
        return "json"
    return "text" if _TEXT_LINE.search(content) else "torch-csv"


def parse_any(content: str, source: str = "<text>", *, placement: str | None = None) -> Schedule:
    """Read a schedule in any of the forms. `placement` is for rows in the text form that do not name one."""
    if not content.strip():
        raise ValueError(f"{source}: empty; a schedule has a row such as '0: F0.0 B0.0' for each rank")
    name = format_of(content)
    if name == "text":
        return text.parse(content, source, placement=placement)
    if placement is not None:
        raise ValueError(
            f"{source}: placement {placement!r} was given for a file in the {name} form, which says its own; "
            "leave the placement out, or give rows in the text form"
        )
    return FORMATS[name].parse(content, source)


__all__ = ["FORMATS", "Format", "format_of", "parse_any"]
