"""Reading a costs file: every problem with its line and its field, or the entries in ticks and bytes."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from treadle.costs.format import FILE, NUMBERED, SECTIONS
from treadle.fields.input_files import line_of, toml_line, toml_lines
from treadle.fields.kinds import FieldPath, Wrong, joined

if TYPE_CHECKING:
    from treadle.costs.printed_problems import ProblemJson


@dataclass(frozen=True)
class Problem:
    """Something wrong in a costs file. `line` is 0 where it is not known; `field` is "" for the whole file."""

    line: int
    field: str
    message: str

    def at(self, source: str) -> str:
        """The problem as a line of text: `mine.toml:7: [cells] f is a number from 0, got -3`."""
        place = f"{source}:{self.line}" if self.line else source
        return f"{place}: {self.field} {self.message}" if self.field else f"{place}: {self.message}"

    def as_dict(self) -> ProblemJson:
        """Return a dict for JSON."""
        return {"line": self.line or None, "field": self.field, "message": self.message}


def read(text: str) -> tuple[dict[str, Any], list[Problem]]:
    """Read TOML into a table, and list all that is wrong with it."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        return {}, [Problem(toml_line(error, text), "", f"not TOML: {error}")]
    lines = toml_lines(text)
    wrong = list(FILE.wrong(table)) or list(_contradictions(table))
    problems = [_problem(where, message, lines) for where, message in wrong]
    return table, sorted(problems, key=lambda problem: problem.line)


def _problem(where: FieldPath, message: str, lines: Mapping[FieldPath, int]) -> Problem:
    section, *key = where
    if section in NUMBERED and key:
        section, key = f"{section}.{key[0]}", key[1:]
    named = f"[{section}]" if key or section.partition(".")[0] in (*SECTIONS, *NUMBERED) else section
    return Problem(line_of(where, lines), f"{named} {joined(tuple(key))}".rstrip(), message)


def _contradictions(table: Mapping[str, Any]) -> Iterator[Wrong]:
    """List what is wrong between entries that are right each by itself."""
    model, of_mb = table.get("model", {}), table.get("microbatch", {})
    if model.get("dense", 0) > model.get("layers", 0):
        yield ("model", "dense"), f"is at most layers, {model['layers']}, got {model['dense']}"
    if "factors" in of_mb and "lengths" in of_mb:
        yield ("microbatch", "lengths"), "stands beside factors; give one of the two"
    for key, other in (("saved_factors", "factors"), ("reference", "lengths"), ("quadratic", "lengths")):
        if key in of_mb and other not in of_mb:
            yield ("microbatch", key), f"goes with {other}, which is not given"
    if len(of_mb.get("saved_factors", of_mb.get("factors", ()))) != len(of_mb.get("factors", ())):
        got, wanted = len(of_mb["saved_factors"]), len(of_mb.get("factors", ()))
        yield ("microbatch", "saved_factors"), f"has as many numbers as factors, {wanted}, got {got}"
