"""Reading a costs file: every problem with its line and its field, or the entries in ticks and bytes."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treadle.costs.format import LIMIT, MOST_LAYERS, SECTIONS, TEXTS, UNITS, Key, KeyKind


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

    def as_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        return {"line": self.line or None, "field": self.field, "message": self.message}


def read(text: str) -> tuple[dict[str, Any], list[Problem]]:
    """Read TOML into a table, and list all that is wrong with it."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"\(at line (\d+), column \d+\)", str(error))
        line = int(found[1]) if found is not None else text.count("\n") + 1
        return {}, [Problem(line, "", f"not TOML: {error}")]
    lines = _lines(text)
    problems = [_problem(where, message, lines) for where, message in _wrong(table)]
    return table, sorted(problems, key=lambda problem: problem.line)


def _problem(where: tuple[str, ...], message: str, lines: Mapping[tuple[str, ...], int]) -> Problem:
    known = next((lines[where[:n]] for n in range(len(where), 0, -1) if where[:n] in lines), 0)
    section, *key = where
    return Problem(known, " ".join([f"[{section}]" if key or section in SECTIONS else section, *key]), message)


def _wrong(table: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """List what is wrong, with the path of its key."""
    for name, value in table.items():
        if name in SECTIONS:
            yield from _wrong_section(name, value)
        elif name not in TEXTS:
            yield (name,), _unknown((*TEXTS, *(f"[{section}]" for section in SECTIONS)), name)
        elif not isinstance(value, str):
            yield (name,), f"is a text, got {_shown(value)}"
        elif name == "unit" and value not in UNITS:
            yield (name,), f"is {' or '.join(UNITS)}, got {value!r}"


def _wrong_section(name: str, entries: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    section = SECTIONS[name]
    if not isinstance(entries, dict):
        yield (name,), f"is a section with a number for each of {', '.join(section.names)}, got {_shown(entries)}"
        return
    for key in section.required:
        if key not in entries:
            yield (name,), f"lacks {key}: {section.key(key).meaning}"
    for key, value in entries.items():
        if key not in section.names:
            yield (name, key), _unknown(section.names, key)
        elif not _fits(section.key(key), value):
            allowed = f"a whole number from 1 to {MOST_LAYERS}"
            allowed = allowed if section.key(key).kind is KeyKind.COUNT else f"a number from 0, below {LIMIT:g}"
            yield (name, key), f"is {allowed}, got {_shown(value)}"


def _fits(key: Key, value: Any) -> bool:
    if isinstance(value, bool):
        return False
    if key.kind is KeyKind.COUNT:
        return isinstance(value, int) and 1 <= value <= MOST_LAYERS
    return isinstance(value, int | float) and 0 <= value < LIMIT


def _unknown(allowed: Sequence[str], name: str) -> str:
    close = difflib.get_close_matches(name, [word.strip("[]") for word in allowed], 1)
    hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(allowed)}"
    return f"is not known; {hint}"


def _shown(value: Any) -> str:
    text = "a section" if isinstance(value, dict) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


_KEY = r"(?:[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*')"
_PATH = rf"{_KEY}(?:\s*\.\s*{_KEY})*"
_HEADER = re.compile(rf"\s*\[\[?\s*({_PATH})\s*\]")
_ENTRY = re.compile(rf"\s*({_PATH})\s*=")


def _lines(text: str) -> dict[tuple[str, ...], int]:
    """Find the line of each section and key. Texts over several lines are skipped, not looked into."""
    found: dict[tuple[str, ...], int] = {}
    section: tuple[str, ...] = ()
    inside = ""
    for number, line in enumerate(text.splitlines(), 1):
        if inside:
            inside = "" if inside in line else inside
            continue
        header, entry = _HEADER.match(line), _ENTRY.match(line)
        if header is not None:
            section = _path(header[1])
            found.setdefault(section, number)
        elif entry is not None:
            found.setdefault((*section, *_path(entry[1])), number)
            value = line[entry.end() :].strip()
            inside = next((q for q in ('"""', "'''") if value.startswith(q) and q not in value[3:]), "")
    return found


def _path(text: str) -> tuple[str, ...]:
    return tuple(part.strip("\"'") for part in re.findall(_KEY, text))
