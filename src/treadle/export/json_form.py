"""The JSON form of a schedule: the text form's lines as keys, and a rank's row on a line of its own.

    {
      "treadle-schedule": 1,
      "name": "1f1b",
      "placement": "loop",
      "pp": 2,
      "vpp": 1,
      "microbatches": 2,
      "rows": [
        ["F0.0", "F1.0", "B0.0", "B1.0"],
        ["F0.0", "B0.0", "F1.0", "B1.0"]
      ]
    }

`"receives": {"0>1": ["F0.0", ...]}` follows where a schedule gives them. `parse(dump(s)) == s`.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from treadle.ir import Action, Cell, Channel, Kind, Placement, Row, Schedule
from treadle.ir.former import renamed_key
from treadle.ir.text import ParseError, parse_action, parse_cell

VERSION_KEY, VERSION = "treadle-schedule", 1
KEYS = (VERSION_KEY, "name", "placement", "pp", "vpp", "microbatches", "rows")
OPTIONAL_KEYS = ("receives",)

_CHANNEL = re.compile("(0|[1-9][0-9]*)>(0|[1-9][0-9]*)")

Object: TypeAlias = dict[str, object]


def dump(schedule: Schedule) -> str:
    """The schedule as a JSON object."""
    scalars = {
        VERSION_KEY: VERSION,
        "name": schedule.name,
        "placement": schedule.placement.name,
        "pp": schedule.pp,
        "vpp": schedule.vpp,
        "microbatches": schedule.num_microbatches,
    }
    items = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in scalars.items()]
    items.append(f'"rows": {_block("[]", map(_tokens, schedule.rows))}')
    if schedule.receives:
        lines = (f'"{src}>{dst}": {_tokens(labels)}' for (src, dst), labels in sorted(schedule.receives.items()))
        items.append(f'"receives": {_block("{}", lines)}')
    return "{\n  " + ",\n  ".join(items) + "\n}\n"


def _tokens(cells: Iterable[Cell]) -> str:
    return json.dumps([str(cell) for cell in cells])


def _block(brackets: str, lines: Iterable[str]) -> str:
    """One item a line: `json.dumps` would put all on one line, or each cell on its own."""
    return brackets[0] + "\n    " + ",\n    ".join(lines) + "\n  " + brackets[1]


def parse(text: str, source: str = "<text>") -> Schedule:
    """Reads the JSON form, and nothing that `dump` would not write, layout aside."""
    reader = _JsonReader(source)
    return reader.schedule(reader.load(text))


@dataclass(frozen=True)
class _JsonReader:
    """Takes the object apart; every error starts with the source."""

    source: str

    def error(self, message: str) -> ValueError:
        return ValueError(f"{self.source}: {message}")

    def load(self, text: str) -> Object:
        try:
            content = json.loads(text, object_pairs_hook=self._once)
        except json.JSONDecodeError as error:
            line = text.split("\n")[error.lineno - 1].rstrip("\r")
            message = f"not JSON: {error.msg}"
            raise ParseError(message, self.source, error.lineno, line, error.colno - 1) from error
        except RecursionError:
            raise self.error("nested deeper than any schedule; rows are lists of cells") from None
        if not isinstance(content, dict):
            raise self.error(f"a schedule is a JSON object with the keys {', '.join(KEYS)}, got {_kind(content)}")
        return renamed_key(content, VERSION_KEY)

    def _once(self, pairs: list[tuple[str, object]]) -> Object:
        content = dict(pairs)
        if len(content) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise self.error(f"{twice!r} is given twice; keep one of them")
        return content

    def schedule(self, content: Object) -> Schedule:
        self._check_keys(content)
        pp, vpp, num_mb = (self._number(content, key) for key in ("pp", "vpp", "microbatches"))
        name, where = (self._text(content, key) for key in ("name", "placement"))
        rows = self._list(content["rows"], "rows", "a list of a row for each rank")
        if len(rows) != pp:
            raise self.error(f"'rows' has a row for each of the pp={pp} ranks, got {len(rows)}")
        cells = tuple(self._row(rank, row) for rank, row in enumerate(rows))
        receives = self._receives(content.get("receives", {}), pp)
        try:
            return Schedule(name, Placement.parse(where, pp, vpp), num_mb, cells, receives)
        except ValueError as error:
            raise self.error(str(error)) from error

    def _check_keys(self, content: Object) -> None:
        version = content.get(VERSION_KEY)
        if version != VERSION or type(version) is not int:
            got = repr(version) if VERSION_KEY in content else "none"
            raise self.error(f"{VERSION_KEY!r} must be {VERSION}, the form this version reads, got {got}")
        for key in content:
            if key not in (*KEYS, *OPTIONAL_KEYS):
                close = difflib.get_close_matches(key, KEYS + OPTIONAL_KEYS, 1)
                hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(KEYS + OPTIONAL_KEYS)}"
                raise self.error(f"{key!r} is not a key of a schedule; {hint}")
        for key in KEYS:
            if key not in content:
                raise self.error(f"{key!r} is missing; a schedule has {', '.join(KEYS)}")

    def _number(self, content: Object, key: str) -> int:
        value = content[key]
        if type(value) is not int or value < 1:  # bool is an int too
            raise self.error(f"{key!r} is a whole number from 1, got {_kind(value)}")
        return value

    def _text(self, content: Object, key: str) -> str:
        value = content[key]
        if not isinstance(value, str):
            raise self.error(f"{key!r} is a text, got {_kind(value)}")
        return value

    def _list(self, value: object, what: str, allowed: str) -> list[object]:
        if not isinstance(value, list):
            raise self.error(f"{what!r} is {allowed}, got {_kind(value)}")
        return value

    def _row(self, rank: int, row: object) -> Row:
        tokens = self._list(row, f"rows[{rank}]", "a list of cells")
        return tuple(self._cell(rank, position, token) for position, token in enumerate(tokens))

    def _cell(self, rank: int, position: int, token: object) -> Cell:
        cell = parse_cell(token) if isinstance(token, str) else None
        if cell is None:
            raise self.error(
                f"rank {rank}, position {position}: {_kind(token)} is not a cell; "
                "cells are F0.0, B0.0, I0.0, W0.0 or (F1.0|B0.0)"
            )
        return cell

    def _receives(self, value: object, pp: int) -> dict[Channel, tuple[Action, ...]]:
        if not isinstance(value, dict):
            raise self.error(f'\'receives\' is an object such as {{"0>1": ["F0.0"]}}, got {_kind(value)}')
        return {self._channel(key, pp): self._labels(key, labels) for key, labels in value.items()}

    def _channel(self, key: str, pp: int) -> Channel:
        match = _CHANNEL.fullmatch(key)
        src, dst = (int(match[1]), int(match[2])) if match else (0, 0)
        if src == dst or max(src, dst) >= pp:
            raise self.error(f"'receives': no channel {key!r}; a channel is two of the {pp} ranks, such as '0>1'")
        return src, dst

    def _labels(self, key: str, value: object) -> tuple[Action, ...]:
        tokens = self._list(value, f"receives {key}", "a list of messages")
        return tuple(self._label(key, position, token) for position, token in enumerate(tokens))

    def _label(self, key: str, position: int, token: object) -> Action:
        label = parse_action(token) if isinstance(token, str) else None
        if label is None or label.kind not in (Kind.F, Kind.B):
            raise self.error(
                f"receives {key}, position {position}: {_kind(token)} is not a message; messages are F0.0 or B0.0"
            )
        return label


def _kind(value: object) -> str:
    """Show a value, short enough for an error's line."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value) if not isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
