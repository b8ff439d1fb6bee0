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

`"receives": {"0>1": ["F0.0", ...]}` follows where a schedule gives them, and `"issue": [[".", ">1", ...], ...]`, the
order in which each rank issues its cells and messages (`treadle.ir.turn`). `parse(dump(s)) == s`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, NotRequired, TypedDict

from treadle.fields.input_files import parse_json
from treadle.fields.kinds import CountFrom1, Text, sentence, shown
from treadle.fields.typed import versioned
from treadle.ir import Action, Cell, Channel, Placement, Schedule
from treadle.ir.text import ParseError, parse_action, parse_cell
from treadle.ir.turn import TURNS, Turn, parse_turn

_NUMBERS = r"(0|[1-9][0-9]{0,5})\.(0|[1-9][0-9]{0,2})"
_CELL = Text(rf"^([FBIW]{_NUMBERS}|\(F{_NUMBERS}\|B{_NUMBERS}\))$", "a cell: F0.0, B0.0, I0.0, W0.0 or (F1.0|B0.0)")
_MESSAGE = Text(rf"^[FB]{_NUMBERS}$", "a message: F0.0 or B0.0")
_TURN = Text(r"^(\.|\+?[<>](0|[1-9][0-9]{0,5})|wait>(0|[1-9][0-9]{0,5}):(0|[1-9][0-9]{0,5}))$", f"a turn: {TURNS}")
_CHANNEL = Text("^(0|[1-9][0-9]*)>(0|[1-9][0-9]*)$", "a channel: two ranks, such as 0>1")


class ScheduleJson(TypedDict):
    """A schedule as JSON, besides its first key."""

    name: Annotated[str, "The schedule's name."]
    placement: Annotated[str, "Where stages are: loop, v, bidirectional, or the stages of each rank."]
    pp: Annotated[CountFrom1, "Ranks of the pipeline."]
    vpp: Annotated[CountFrom1, "Chunks on each rank."]
    microbatches: Annotated[CountFrom1, "Micro-batches of a step, over all pipes."]
    rows: Annotated[
        list[list[Annotated[str, _CELL]]],
        "A row for each rank: its cells in order, such as F0.0 or (F1.0|B0.0).",
    ]
    receives: NotRequired[
        Annotated[
            dict[Annotated[str, _CHANNEL], list[Annotated[str, _MESSAGE]]],
            "By channel, such as 0>1, the order of receives; the sender's order where left out.",
        ]
    ]
    issue: NotRequired[
        Annotated[
            list[list[Annotated[str, _TURN]]],
            "A row for each rank: the order in which its host issues cells (.), sends (>1), receives (<1) and waits.",
        ]
    ]


VERSION_KEY, VERSION = "treadle-schedule", 1
FORM = versioned("schedule", VERSION, ScheduleJson)


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
    if schedule.issue:
        items.append(f'"issue": {_block("[]", map(_tokens, schedule.issue))}')
    return "{\n  " + ",\n  ".join(items) + "\n}\n"


def _tokens(items: Iterable[Cell | Turn]) -> str:
    return json.dumps([str(item) for item in items])


def _block(brackets: str, lines: Iterable[str]) -> str:
    """One item a line: `json.dumps` would put all on one line, or each cell on its own."""
    return brackets[0] + "\n    " + ",\n    ".join(lines) + "\n  " + brackets[1]


def parse(text: str, source: str = "<text>") -> Schedule:
    """Read the JSON form, and nothing that `dump` would not write, layout aside.

    Raises:
        ValueError: the text holds no schedule; the message names the field.

    """
    content = _load(text, source)
    version = FORM.fields[VERSION_KEY].kind
    if isinstance(content, dict) and not version.fits(content.get(VERSION_KEY)):  # before what another version may have
        raise ValueError(f"{source}: {VERSION_KEY} is {version.words}, got {shown(content.get(VERSION_KEY))}")
    for wrong in FORM.wrong(content):
        raise ValueError(sentence(source, wrong))
    pp = content["pp"]
    if len(content["rows"]) != pp:
        raise ValueError(f"{source}: rows has a row for each of the pp={pp} ranks, got {len(content['rows'])}")
    rows = tuple(tuple(map(_cell, row)) for row in content["rows"])
    receives = {
        _channel(key, pp, source): tuple(map(_label, labels)) for key, labels in content.get("receives", {}).items()
    }
    issue = tuple(tuple(map(_turn, turns)) for turns in content.get("issue", ()))
    try:
        placement = Placement.parse(content["placement"], pp, content["vpp"])
        return Schedule(content["name"], placement, content["microbatches"], rows, receives, issue)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def _load(text: str, source: str) -> Any:
    try:
        return parse_json(text)
    except json.JSONDecodeError as error:
        line = text.split("\n")[error.lineno - 1].rstrip("\r")
        raise ParseError(f"not JSON: {error.msg}", source, error.lineno, line, error.colno - 1) from error
    except RecursionError:
        raise ValueError(f"{source}: nested deeper than any schedule; rows are lists of cells") from None
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def _cell(token: str) -> Cell:
    cell = parse_cell(token)
    assert cell is not None, token
    return cell


def _turn(token: str) -> Turn:
    turn = parse_turn(token)
    assert turn is not None, token
    return turn


def _label(token: str) -> Action:
    label = parse_action(token)
    assert label is not None, token
    return label


def _channel(key: str, pp: int, source: str) -> Channel:
    src, dst = map(int, key.split(">"))
    if src == dst or max(src, dst) >= pp:
        raise ValueError(f"{source}: receives has no channel {key!r}; a channel is two of {pp} ranks, such as '0>1'")
    return src, dst
