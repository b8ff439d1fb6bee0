"""Reading a costs file: every problem with its line and its field, or the entries in ticks and bytes."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from treadle.costs.format import (
    LIMIT,
    MOST_FACTOR,
    MOST_LAYERS,
    NUMBER,
    NUMBERED,
    SECTIONS,
    TEXTS,
    UNITS,
    Key,
    KeyKind,
    Section,
)


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
    wrong = list(_wrong(table)) or list(_contradictions(table))
    problems = [_problem(where, message, lines) for where, message in wrong]
    return table, sorted(problems, key=lambda problem: problem.line)


def _problem(where: tuple[str, ...], message: str, lines: Mapping[tuple[str, ...], int]) -> Problem:
    known = next((lines[where[:n]] for n in range(len(where), 0, -1) if where[:n] in lines), 0)
    section, *key = where
    if section in NUMBERED and key:
        section, key = f"{section}.{key[0]}", key[1:]
        return Problem(known, " ".join([f"[{section}]", *key]), message)
    known_section = key or section in SECTIONS or section in NUMBERED
    return Problem(known, " ".join([f"[{section}]" if known_section else section, *key]), message)


def _wrong(table: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
    """List what is wrong, with the path of its key."""
    for name, value in table.items():
        if name in SECTIONS:
            yield from _wrong_section((name,), SECTIONS[name], value)
        elif name in NUMBERED:
            yield from _wrong_numbered(name, value)
        elif name not in TEXTS:
            yield (name,), _unknown((*TEXTS, *(f"[{section}]" for section in (*SECTIONS, *NUMBERED))), name)
        elif not isinstance(value, str):
            yield (name,), f"is a text, got {_shown(value)}"
        elif name == "unit" and value not in UNITS:
            yield (name,), f"is {' or '.join(UNITS)}, got {value!r}"


def _contradictions(table: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], str]]:
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


def _wrong_numbered(name: str, sections: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    if not isinstance(sections, dict):
        yield (name,), f"is a section for each number, such as [{name}.3], got {_shown(sections)}"
        return
    for number, entries in sections.items():
        if re.fullmatch(NUMBER, number) is None:
            yield (name, number), f"is not a number of a {name}; write [{name}.3]"
        else:
            yield from _wrong_section((name, number), NUMBERED[name], entries)


def _wrong_section(where: tuple[str, ...], section: Section, entries: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    if not isinstance(entries, dict):
        yield where, f"is a section with a number for each of {', '.join(section.names)}, got {_shown(entries)}"
        return
    for key in section.required:
        if key not in entries:
            yield where, f"lacks {key}: {section.key(key).meaning}"
    for key, value in entries.items():
        if key not in section.names:
            yield (*where, key), _unknown(section.names, key)
        elif not _fits(section.key(key), value):
            yield (*where, key), f"is {_ALLOWED[section.key(key).kind]}, got {_shown(value)}"


_AMOUNT = f"a number from 0, below {LIMIT:g}"
_ALLOWED = {
    KeyKind.TIME: _AMOUNT,
    KeyKind.BYTES: _AMOUNT,
    KeyKind.COUNT: f"a whole number from 1 to {MOST_LAYERS}",
    KeyKind.FACTOR: f"a number above 0, up to {MOST_FACTOR:g}",
    KeyKind.SHARE: "a number from 0 to 1",
    KeyKind.FACTORS: f"a list of numbers above 0, up to {MOST_FACTOR:g}, one for each micro-batch",
}


def _fits(key: Key, value: Any) -> bool:
    if key.kind is KeyKind.FACTORS:
        return isinstance(value, list) and bool(value) and all(_is_factor(each) for each in value)
    if isinstance(value, bool):
        return False
    if key.kind is KeyKind.COUNT:
        return isinstance(value, int) and 1 <= value <= MOST_LAYERS
    if key.kind is KeyKind.FACTOR:
        return _is_factor(value)
    most = 1 if key.kind is KeyKind.SHARE else LIMIT
    return isinstance(value, int | float) and value >= 0 and (value < most or value == most == 1)


def _is_factor(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= MOST_FACTOR


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
