"""Text, TOML and JSON of files, read whole; errors name the file and the line."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from treadle.fields.kinds import FieldPath, shown

_KEY = r"(?:[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*')"
_PATH = rf"{_KEY}(?:\s*\.\s*{_KEY})*"
_HEADER = re.compile(rf"\s*\[\[?\s*({_PATH})\s*\]")
_ENTRY = re.compile(rf"\s*({_PATH})\s*=")


def read_text(path: str | Path) -> str:
    """Return the text of a file in UTF-8, without a byte order mark.

    Raises:
        ValueError: there is no such file, it cannot be read, or it is not UTF-8.

    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}; save it as UTF-8") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None


class Toml(NamedTuple):
    """The table of a TOML file, and the lines of its fields."""

    source: str
    table: dict[str, Any]
    lines: Mapping[FieldPath, int]

    def at(self, *path: str) -> str:
        """Return the file and the line of a field, with which its errors begin: `mine.toml:7`."""
        line = line_of(path, self.lines)
        return f"{self.source}:{line}" if line else self.source


def read_toml(path: str | Path) -> Toml:
    """Return the table of a TOML file.

    Raises:
        ValueError: there is no such file, or it is not TOML; the message names file and line.

    """
    text = read_text(path)
    try:
        return Toml(str(path), tomllib.loads(text), toml_lines(text))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}:{toml_line(error, text)}: not TOML: {error}") from error


def toml_line(error: tomllib.TOMLDecodeError, text: str) -> int:
    """Return the line that an error of TOML is in."""
    found = re.search(r"\(at line (\d+), column \d+\)", str(error))
    return int(found[1]) if found is not None else text.count("\n") + 1


def toml_lines(text: str) -> dict[FieldPath, int]:
    """Return the line of each table and key of TOML; texts over several lines are skipped, not looked into."""
    found: dict[FieldPath, int] = {}
    section: FieldPath = ()
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


def _path(text: str) -> FieldPath:
    return tuple(part.strip("\"'") for part in re.findall(_KEY, text))


def line_of(path: FieldPath, lines: Mapping[FieldPath, int]) -> int:
    """Return the line of a field, or of the table that it is in; 0 if it is not known."""
    return next((lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in lines), 0)


def toml_value(value: object) -> str:
    r"""Return a value as TOML writes it: text in quotes, a number, true or false, a list of these.

    Example:
        >>> print(toml_value('a "b" \\ c'), toml_value(True), toml_value(["attn", "mlp"]))
        "a \"b\" \\ c" true ["attn", "mlp"]

    """
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    return repr(value)


def read_json(path: str | Path) -> dict[str, Any]:
    """Return the object of a JSON file.

    Raises:
        ValueError: there is no such file, or it has no JSON object; the message names file and line.

    """
    text = read_text(path)
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not JSON: {error.msg} (column {error.colno})") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} has a JSON object, got {shown(found)}")
    return found


def parse_json(text: str | bytes) -> object:
    """Parse strict JSON: no key twice in an object, no NaN.

    Raises:
        json.JSONDecodeError: it is no JSON.
        ValueError: a key is there twice, or a number is none of JSON's.
        RecursionError: it is nested too deeply.

    """
    return json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    content = dict(pairs)
    if len(content) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"{shown(twice)} is given twice in one object; keep one of them")
    return content


def _no_number(text: str) -> object:
    raise ValueError(f"{text} is no number of JSON")
